"""Roofline predictions for a whole network in each precision, with and without fusion."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from costmodel.cpu.roofline import RooflineModel
from costmodel.machines.machine_records import Machine
from fusion.model.candidates import find_sites
from fusion.model.precision import BFLOAT16, FLOAT32, INT8, layers_covered, stored_in
from fusion.model.selection import select

if TYPE_CHECKING:
    from costmodel.operators.layers import Operator
    from fusion.model.conv_graph import Graph
    from schedules.contract.cpu_target import CpuTarget

# Number types of layers, most exact first.
PRECISE_TYPES = (FLOAT32, BFLOAT16, INT8)
# Accuracy of predicted gains: networks of docs/benchmarks.md, sites of docs/limits.md.
WORTH_OF_GAINS = (
    "gains are what the roofline predicts, without an interval. Measured in 15 tuned networks that fused something, "
    "fusion alone made them 1.06 times as fast (0.98 to 1.27); whether a site gains was told right for 68 to 79 % of "
    "sites, little more often than by fusing always (57 against 55 % on one machine, 86 against 96 % on another)"
)


@dataclass(frozen=True)
class PrecisionOutlook:
    """Prediction for a network with some layers in ``precision``, the others in float32."""

    precision: str
    # Number of layers in ``precision``.
    layers: int
    sites: int
    sites_fused: int
    # Sustained rate of the machine in flop/s.
    peak_flops: float
    unfused_seconds: float
    fused_seconds: float
    # Flop per byte that kernels read or write.
    unfused_intensity: float
    fused_intensity: float
    # Reason for the lack of kernels in this precision, or None.
    missing: str | None = None

    @property
    def gain(self) -> float:
        """Speedup by fusion."""
        return self.unfused_seconds / self.fused_seconds if self.fused_seconds else 1.0


def outlooks(graph: Graph, machine: Machine, cpu: CpuTarget) -> tuple[PrecisionOutlook, ...]:
    """Outlooks for every precision that the machine has a compute rate for."""
    return tuple(_outlook(graph, machine, cpu, dtype) for dtype in PRECISE_TYPES if dtype in machine.compute)


def in_precision(graph: Graph, dtype: str, cpu: CpuTarget) -> Graph:
    """``graph`` with every layer in ``dtype`` that our kernels support in it."""
    return stored_in(graph, layers_covered(graph, dtype, cpu), dtype)


def _outlook(graph: Graph, machine: Machine, cpu: CpuTarget, dtype: str) -> PrecisionOutlook:
    stored = in_precision(graph, dtype, cpu)
    sites = find_sites(stored, cpu)
    apart = [node.operator for node in stored.nodes]
    everything = list(dict.fromkeys([*apart, *(site.operator for site in sites)]))
    size = float(sum(operator.weight_bytes + operator.output_bytes for operator in apart))
    estimates = RooflineModel(machine, cpu.threads, size).estimate(everything)
    seconds = {operator: found.seconds for operator, found in zip(everything, estimates, strict=True)}
    plan = select(stored, sites, seconds)
    fused = [group.operator for group in plan.groups]
    return PrecisionOutlook(
        precision=dtype,
        layers=sum(node.operator.dtype == dtype for node in stored.nodes),
        sites=len(sites),
        sites_fused=sum(group.is_fused for group in plan.groups),
        peak_flops=machine.peak_flops(dtype, cpu.threads),
        unfused_seconds=sum(seconds[operator] for operator in apart),
        fused_seconds=sum(seconds[operator] for operator in fused),
        unfused_intensity=_intensity(apart),
        fused_intensity=_intensity(fused),
        missing=None if dtype == FLOAT32 else cpu.lacks(dtype),
    )


def _intensity(operators: Sequence[Operator]) -> float:
    size = sum(each.input_bytes + each.weight_bytes + each.output_bytes + each.residual_bytes for each in operators)
    return sum(each.flops for each in operators) / size if size else 0.0
