"""Interface of a kernel family's model: analytic time of many operators at once, and features.

Features are the inputs of a learned residual. They are logarithms of shapes and of ratios (times over times, waves,
bytes over capacities), so that a residual learned on one GPU transfers to another.

**Inverted shares** are factors of measured over analytic time for classes of kernels that no public table holds:
convolutions in 16-bit types, batch norm and pooling by memory layout. Hundreds of whole measured steps of different
models share a few dozen classes of kernels; the factor of each class is fitted so that the sums match
(:mod:`lab.fit.image_steps`). A class is named like ``spatial forward nhwc``.

calibration/vision/shares.json    factor by class; how far measured steps lie from predicted ones; which steps
calibration/vision/hopper.json    factors of classes whose kernels were measured on Hopper; which
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np

from costmodel.gpu.families.rates import dense_peak, kernel_floor, l2_bytes
from costmodel.machines.machine_records import Machine
from costmodel.machines.record_file import read_record
from costmodel.operators.any_operator import AnyOperator, dtype_of
from costmodel.operators.device_work import ConvolutionBackward
from costmodel.operators.layers import Conv2d, CountedWork, LayerWork


@dataclass(frozen=True)
class KernelAnalysis:
    """Analysis of several operators: arrays over the operators."""

    # Seconds of each operator.
    seconds: np.ndarray
    # Terms of the analytic time, in seconds, by name.
    terms: Mapping[str, np.ndarray]
    # Inputs of a learned residual, by name.
    features: Mapping[str, np.ndarray]

    def bound(self, place: int) -> str:
        """Name of the largest term of the operator at index ``place``."""
        return max(self.terms, key=lambda name: float(self.terms[name][place]))

    def matrix(self) -> np.ndarray:
        """Features as a matrix (operators, features), float32."""
        return np.stack([np.asarray(column, dtype=np.float32) for column in self.features.values()], axis=1)


Grade = Literal["measured", "dtype", "kind", "unknown"]


@runtime_checkable
class Gridded(Protocol):
    """Family whose tables are grids of sizes, so that its residual can be a lattice
    (:mod:`costmodel.gpu.residual`). ``axes``: grid points that exist even without table rows.
    """

    name: str
    axes: tuple[np.ndarray, ...]

    def sizes(self, operators: Sequence[Any]) -> np.ndarray:
        """Sizes (operators, axes) of one plain kernel that does no more work than each of ``operators``."""

    def at_sizes(self, sizes: np.ndarray, machine: Machine) -> KernelAnalysis:
        """Analysis of plain kernels of ``sizes`` (rows, axes)."""

    def from_lattice(self, operators: Sequence[Any], plain: np.ndarray, machine: Machine) -> np.ndarray:
        """Seconds (operators,) of operators whose plain kernels of the same sizes take ``plain``."""


FamilyOperator = TypeVar("FamilyOperator", bound=AnyOperator)


class Family(ABC, Generic[FamilyOperator]):
    """One kernel family. ``name``: also that of its fitted model; ``clock_bound``: True if its time depends on the
    clock of the multiprocessors, which drops on power-limited cards, more than on the memory's.
    """

    name: str
    clock_bound: bool = True

    @abstractmethod
    def analyse(self, operators: Sequence[FamilyOperator], machine: Machine) -> KernelAnalysis:
        """Analytic time and features of ``operators`` (all of this family) on the GPU ``machine``."""

    def least(self, operators: Sequence[FamilyOperator], machine: Machine) -> np.ndarray:
        """Lower bound in seconds (operators,) by the datasheet of ``machine``."""
        return least_seconds(operators, machine)

    def covers(self, operator: FamilyOperator) -> bool:
        """True if measurements of this family apply to ``operator`` (depends mainly on its dtype)."""
        return dtype_of(operator) == "float32"

    def follows(self, operator: FamilyOperator) -> bool:
        """True if what those measurements say of this family's analytic times holds for ``operator``."""
        return self.covers(operator)

    def grade(self, operator: FamilyOperator) -> Grade:
        """Similarity of the measured kernels of this family to ``operator``: "measured" if it is one of them, "dtype"
        for the same kernels in another dtype, "kind" for another kind, "unknown" if it is unidentified.
        """
        return "measured" if self.covers(operator) else "kind"


def least_seconds(operators: Sequence[AnyOperator], machine: Machine, spared: Sequence[float] = ()) -> np.ndarray:
    """Lower bound in seconds by the datasheet of ``machine``: operations at the rate of their dtype, divided by the
    savings factor ``spared`` (empty: 1), and bytes beyond L2's capacity at the DRAM bandwidth. Figures missing from the
    machine file count as no time.
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
    """Bytes that ``operator`` reads and writes at least once, excluding rows skipped between the windows of a
    convolution.
    """
    if isinstance(operator, LayerWork):
        rows = min(operator.kernel[0] / operator.stride[0], 1.0) if isinstance(operator, Conv2d) else 1.0
        return rows * operator.input_bytes + operator.weight_bytes + operator.output_bytes
    if isinstance(operator, ConvolutionBackward) and operator.wrt == "weight":
        return _moved_bytes(operator.forward)
    return float(operator.read_bytes + operator.write_bytes) if isinstance(operator, CountedWork) else 0.0


def safe_log2(values: np.ndarray) -> np.ndarray:
    """Base-2 logarithm, with values clamped below at a tiny positive number."""
    return np.asarray(np.log2(np.maximum(np.asarray(values, dtype=float), 1e-30)))


SHARES = Path(__file__).parents[2] / "calibration" / "vision" / "shares.json"


@dataclass(frozen=True)
class InvertedShares:
    """Factors of kernel classes."""

    # Measured over analytic time, by class of kernels.
    factors: Mapping[str, float]
    # Half of the interval, in log units, that holds 80 % of the steps of models left out of the fit; single classes
    # vary far more.
    spread: float
    provenance: Mapping[str, Any]

    def factor(self, name: str) -> float:
        """Factor of the class ``name``; 1 if no step contains it."""
        return self.factors.get(name, 1.0)

    def scaled(self, plain: KernelAnalysis, classes: Sequence[str], machine: Machine) -> KernelAnalysis:
        """Analysis ``plain`` of one kernel of each of ``classes`` multiplied by their factors; the launch is
        unchanged.
        """
        factor = np.array([self.factor(name) for name in classes])
        floor = kernel_floor(machine)
        terms = {name: column * factor for name, column in plain.terms.items()}
        terms["launch"] = plain.terms["launch"]
        return KernelAnalysis((plain.seconds - floor) * factor + floor, terms, plain.features)


@lru_cache(maxsize=4)
def inverted_shares(path: Path = SHARES) -> InvertedShares:
    """Read factors from ``path``; without the file every factor is 1. ``InputError`` names a corrupt file."""
    if not path.exists():
        return InvertedShares({}, 0.0, {})
    return read_record(path, InvertedShares, "install the package again")


# Architectures whose classes of kernels were measured themselves, kernel by kernel, or are built like those.
MEASURED_KERNELS = ("hopper", "blackwell")
MEASURED_SHARES = SHARES.with_name("hopper.json")


def shares_of(machine: Machine) -> InvertedShares:
    """Factors of kernel classes on ``machine``: those inverted from whole steps, replaced by measured ones on Hopper
    and its successor, with the spread of single kernels.
    """
    inverted = inverted_shares()
    if machine.chip().architecture not in MEASURED_KERNELS:
        return inverted
    measured = inverted_shares(MEASURED_SHARES)
    return replace(inverted, factors={**inverted.factors, **measured.factors}, spread=measured.spread)


def layout_name(channels_last: bool) -> str:
    """Name of a memory layout in class names."""
    return "nhwc" if channels_last else "nchw"
