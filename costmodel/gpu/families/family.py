"""What the model of one kernel family is made of: an analytic time of many operators at once, and features.

Features are what a learned residual may see. They are logarithms of shapes and of ratios (times over times, waves,
bytes over capacities), so that what is learned on one GPU carries over to another.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from costmodel.gpu.families.rates import dense_peak, l2_bytes
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator, dtype_of
from costmodel.operators.counted_work import CountedWork, LayerWork
from costmodel.operators.device_work import ConvolutionBackward
from costmodel.operators.layers import Conv2d


@dataclass(frozen=True)
class KernelAnalysis:
    """Arrays over the operators, seconds. ``terms`` are what the analytic time is made of, ``features`` what a
    learned residual may see, both by name.
    """

    seconds: np.ndarray
    terms: Mapping[str, np.ndarray]
    features: Mapping[str, np.ndarray]

    def bound(self, place: int) -> str:
        """Name of the largest term of the operator at ``place``."""
        return max(self.terms, key=lambda name: float(self.terms[name][place]))

    def matrix(self) -> np.ndarray:
        """Features as a matrix (operators, features), float32."""
        return np.stack([np.asarray(column, dtype=np.float32) for column in self.features.values()], axis=1)


Grade = Literal["measured", "dtype", "kind", "unknown"]


@runtime_checkable
class Gridded(Protocol):
    """A family whose tables are grids of sizes, so that a lattice (:mod:`costmodel.gpu.residuals.lattice`) holds what
    was learned of it. ``axes``: the points that it has even where no table has rows.
    """

    name: str
    axes: tuple[np.ndarray, ...]

    def sizes(self, operators: Sequence[Any]) -> np.ndarray:
        """Sizes (operators, axes) of the one kernel that does no more than each of ``operators``."""

    def at_sizes(self, sizes: np.ndarray, machine: Machine) -> KernelAnalysis:
        """Analysis of plain kernels of ``sizes`` (rows, axes)."""

    def from_lattice(self, operators: Sequence[Any], plain: np.ndarray, machine: Machine) -> np.ndarray:
        """Seconds (operators,) of operators whose plain kernels of the same sizes take ``plain``."""


FamilyOperator = TypeVar("FamilyOperator", bound=AnyOperator)


class Family(ABC, Generic[FamilyOperator]):
    """One kernel family. ``name`` is also that of its fitted model; ``clock_bound``: its time depends on the clock of
    the multiprocessors, which sinks on power-limited cards, more than on the memory's.
    """

    name: str
    clock_bound: bool = True

    @abstractmethod
    def analyse(self, operators: Sequence[FamilyOperator], machine: Machine) -> KernelAnalysis:
        """Analytic time and features of ``operators`` (all of this family) on the GPU ``machine``."""

    def least(self, operators: Sequence[FamilyOperator], machine: Machine) -> np.ndarray:
        """Seconds (operators,) that no kernel can undercut, by the datasheet of ``machine``."""
        return least_seconds(operators, machine)

    def covers(self, operator: FamilyOperator) -> bool:
        """Whether measurements of this family say something about ``operator`` (its dtype above all)."""
        return dtype_of(operator) == "float32"

    def grade(self, operator: FamilyOperator) -> Grade:
        """How near the measured kernels of this family are to ``operator``: those that it is one of, the same in
        another ``dtype``, another ``kind``, or nobody knows what it is.
        """
        return "measured" if self.covers(operator) else "kind"


def least_seconds(operators: Sequence[AnyOperator], machine: Machine, spared: Sequence[float] = ()) -> np.ndarray:
    """By the datasheet of ``machine``: the operations at the rate of their number type, each ``spared`` so many times
    (empty: none), and the bytes that L2 cannot hold at the bandwidth of DRAM. What the machine file does not tell
    counts nothing.
    """
    peaks = {dtype: dense_peak(machine, dtype) or np.inf for dtype in {dtype_of(each) for each in operators}}
    times = spared if len(spared) else [1.0] * len(operators)
    computed: np.ndarray = np.array(
        [_operations(each) / (peaks[dtype_of(each)] * most) for each, most in zip(operators, times, strict=True)]
    )
    cold: np.ndarray = np.array([_moved_bytes(each) for each in operators]) - l2_bytes(machine)
    dram = np.maximum(cold, 0.0) / (machine.memory[-1].datasheet or np.inf)
    return np.asarray(np.maximum(computed / machine.above_datasheet, dram))


def _operations(operator: AnyOperator) -> float:
    return float(operator.flops) if isinstance(operator, CountedWork | LayerWork) else 0.0


def _moved_bytes(operator: AnyOperator) -> float:
    """Bytes that ``operator`` reads and writes at least once. Of rows between the windows of a convolution none."""
    if isinstance(operator, LayerWork):
        rows = min(operator.kernel[0] / operator.stride[0], 1.0) if isinstance(operator, Conv2d) else 1.0
        return rows * operator.input_bytes + operator.weight_bytes + operator.output_bytes
    if isinstance(operator, ConvolutionBackward) and operator.wrt == "weight":
        return _moved_bytes(operator.forward)
    return float(operator.read_bytes + operator.write_bytes) if isinstance(operator, CountedWork) else 0.0


def safe_log2(values: np.ndarray) -> np.ndarray:
    """Base-2 logarithm, of values below a tiny positive number that of this number."""
    return np.asarray(np.log2(np.maximum(np.asarray(values, dtype=float), 1e-30)))
