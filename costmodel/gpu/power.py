"""The clock of power-limited GPUs under a mixed load.

Such a card lowers its clock until its power, averaged over many kernels, meets the limit. Kernels that wait for memory
draw less, and what they leave lets the others run faster than they do one after another by themselves, as in a sweep of
matrix products. With M seconds of kernels bound by memory beside C seconds (at the new clock) of those bound by
arithmetic, power linear in the clock gives the factor

    clock / clock of arithmetic alone = 1 + gain * M / C
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from costmodel.machines.machine_records import Machine
from costmodel.model.cost_model import CostModel, Estimate
from costmodel.model.dispatch import Dispatch

# (limit - power of memory-bound kernels) / (limit - power at rest). NeuSight op_latency, convolutions of 3 to 10 ms on
# T4 against the same shape and kernels on V100, whose clock holds: where arithmetic is all (implicit GEMM) T4 takes
# 2.68 times as long. Of 711 by Winograd 0.12 to 0.27 of V100's time are transforms, whose bytes take T4 3.44 times as
# long; this gain leaves the least absolute error of their log times (0.12, without it 0.19).
_GAIN = 0.55
# As far as those tables reach: nine tenths have at most 37 % of T4's time in transforms, 1 + 0.55 * 0.37 / 0.63.
_MOST = 1.32


class GpuCostModel(Dispatch):
    """The models of all operator types on ``machine``, and what its clock does under their mixture."""

    def __init__(self, models: Mapping[type, CostModel], machine: Machine) -> None:
        super().__init__(models)
        self._power_limited = machine.chip().power_limited

    def settle(self, estimates: Sequence[Estimate], counts: Sequence[int]) -> list[Estimate]:
        if not self._power_limited:
            return list(estimates)
        factor = clock_factor(estimates, counts)
        return [_faster(each, factor) if each.bound == "compute" else each for each in estimates]


def clock_factor(estimates: Sequence[Estimate], counts: Sequence[int]) -> float:
    """How much faster the clock of a power-limited card is under this mixture than under its arithmetic alone."""
    pairs = list(zip(estimates, counts, strict=True))
    arithmetic = sum(each.seconds * count for each, count in pairs if each.bound == "compute")
    memory = sum(each.seconds * count for each, count in pairs if each.memory_bound)
    # C is the arithmetic alone over the factor, so that factor = 1 + gain * M * factor / arithmetic alone.
    relief = _GAIN * memory
    return min(arithmetic / (arithmetic - relief), _MOST) if relief * _MOST < arithmetic * (_MOST - 1) else _MOST


def _faster(estimate: Estimate, factor: float) -> Estimate:
    """``estimate`` at a clock higher by ``factor``; its interval still reaches up to what a sweep would measure."""
    breakdown = {**estimate.breakdown, "mixed_load_clock": factor}
    seconds, lower = estimate.seconds / factor, estimate.lower / factor
    return dataclasses.replace(estimate, seconds=seconds, lower=lower, breakdown=breakdown)
