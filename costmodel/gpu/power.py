"""Clock of a GPU under its power limit during a step.

A GPU whose arithmetic would draw more than its limit lowers the clock until the average of the last tens of
milliseconds meets it. A machine file gives both ends: ``burst`` is the rate of kernels that finish before the clock
drops, ``sustained`` that of a long load of pure arithmetic. Intermediate cases (benchmarks that repeat kernels, steps
whose kernels wait for memory part of the time) follow from :mod:`costmodel.gpu.families.rates`, this module and
:mod:`costmodel.machines.power_law`.

In a long run of steps some kernels compute and some wait for memory; the power, averaged over all of them, meets the
limit. With T the time of arithmetic at the clock of
a burst, M that of kernels that wait for memory, y the clock relative to a burst's and p(y) the power of arithmetic
above idle, as a share of (limit - idle):

    sum over arithmetic of T / y * p(y) + M * memory's power = sum of T / y + M,     y at most 1

Arithmetic that fills its units to a share u draws u of what the best products draw, which is the limit at the clock
of a long load: p(y) = u * power(y) / power(long load).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from costmodel.cost_model import CostModel, Dispatch, Estimate
from costmodel.machines.machine_records import Machine
from costmodel.machines.power_law import REST_SHARE, VOLTAGE_FLOOR, power_at

# Power above rest of a kernel that waits for DRAM, in shares of (limit - rest). NeuSight op_latency, convolutions of 3
# to 10 ms on T4 against the same shape and kernels on V100, whose clock holds: where arithmetic is all (implicit GEMM)
# T4 takes 2.68 times as long; of 711 by Winograd 0.12 to 0.27 of V100's time are transforms, whose bytes take T4 3.44
# times as long; this share leaves the least absolute error of their log times (0.12; as much power as arithmetic 0.19).
MEMORY_POWER = 0.45
# For cards with GDDR memory and 128 lanes per multiprocessor: an RTX 5060 Ti draws 172.7 of its 180 W while it decodes
# one token at a time, and 147 of 150 W (inventivehq.com, "I capped my GPU to 150W", power by limit).
GDDR_MEMORY_POWER = 0.95
_GDDR_ARCHITECTURES = ("ampere", "ada", "blackwell-rtx")


def memory_power(machine: Machine) -> float:
    """Power above idle of a kernel that waits for DRAM, as a share of (limit - idle)."""
    chip = machine.chip()
    gddr = chip.architecture in _GDDR_ARCHITECTURES and chip.lanes == 128
    return GDDR_MEMORY_POWER if gddr else MEMORY_POWER


# Notes of :class:`costmodel.gpu.kernel_model.KernelModel` in the breakdown of arithmetic kernels on a GPU whose clock
# drops: rate of a long load over that of a burst; clock of a burst as a share of the boost clock; clock, relative to a
# burst's, at which the kernel was priced.
LONG_LOAD, BURST_CLOCK, PRICED_CLOCK = "long_load_share", "burst_clock", "priced_clock"
# Notes added by this module: the clock during the step, relative to a burst's; the kernel's power above idle, as a
# share of (limit - idle).
STEP_CLOCK, DRAWN_POWER = "step_clock", "drawn_power"
_SWEEPS = 40  # bisection steps of the clock


class GpuCostModel(Dispatch):
    """Models of all operator types on ``machine``, and its clock under their mixture."""

    def __init__(self, models: Mapping[type, CostModel], machine: Machine) -> None:
        super().__init__(models)
        self._memory_power = memory_power(machine)
        self._sinks = any(each.burst is not None for each in machine.compute.values())

    def settle(self, estimates: Sequence[Estimate], counts: Sequence[int]) -> list[Estimate]:
        if not self._sinks:
            return list(estimates)
        clock = step_clock(estimates, counts, self._memory_power)
        return [
            _at(each, clock) if _clocked(each) else _noted(each, {DRAWN_POWER: self._memory_power})
            for each in estimates
        ]


def step_clock(estimates: Sequence[Estimate], counts: Sequence[int], waiting: float = MEMORY_POWER) -> float:
    """Clock of arithmetic, relative to a burst's, while ``estimates`` run in turns with the given counts.

    ``waiting``: power of kernels that wait for memory (:func:`costmodel.gpu.power.memory_power`).
    """
    pairs = list(zip(estimates, counts, strict=True))
    memory = sum(each.seconds * count for each, count in pairs if each.memory_bound)
    rows = [_arithmetic(each, count) for each, count in pairs if _clocked(each)]
    if not rows:
        return 1.0
    seconds, used, long_load, burst = np.array(rows).T
    full = used / _power(long_load * burst)

    def excess(clock: float) -> float:
        drawn = full * _power(clock * burst)
        return float((seconds / clock * (drawn - 1)).sum()) + memory * (waiting - 1)

    low, high = 0.0, 1.0
    if excess(high) <= 0:
        return high
    for _ in range(_SWEEPS):
        middle = (low + high) / 2
        low, high = (low, middle) if excess(middle) > 0 else (middle, high)
    return (low + high) / 2


def _power(clock: np.ndarray) -> np.ndarray:
    """:func:`costmodel.machines.power_law.power_at` for an array of clocks."""
    return np.asarray(clock * np.maximum(clock, VOLTAGE_FLOOR) ** 2)


def _clocked(estimate: Estimate) -> bool:
    """True if the time depends on the clock."""
    return estimate.bound == "compute" and PRICED_CLOCK in estimate.breakdown


def _arithmetic(estimate: Estimate, count: int) -> tuple[float, float, float, float]:
    """Seconds of all ``count`` at the clock of a burst, share of the units' rate, long load, burst clock."""
    notes = estimate.breakdown
    used = min(1.0, float(notes.get("compute_seconds", estimate.seconds)) / estimate.seconds)
    seconds = estimate.seconds * count * float(notes[PRICED_CLOCK])
    return seconds, used, float(notes[LONG_LOAD]), float(notes[BURST_CLOCK])


def drawn_power(estimate: Estimate) -> float | None:
    """Power above idle of the kernel of an estimate of :meth:`GpuCostModel.settle`, as a share of (limit - idle);
    ``None`` for a GPU whose clock never drops: its distance from the limit is unknown. Kernels that neither compute nor
    wait for memory, such as short ones dominated by their launch, are assumed to draw the power of memory-bound
    kernels.
    """
    known = estimate.breakdown.get(DRAWN_POWER)
    return None if known is None else float(known)


def board_watts(machine: Machine, drawn: float) -> float:
    """Power of the board, at most its limit, while the share ``drawn`` of (limit - idle) is drawn above idle."""
    limit = machine.chip().power_watts
    rest = REST_SHARE * limit
    return rest + min(drawn, 1.0) * (limit - rest)


def _at(estimate: Estimate, clock: float) -> Estimate:
    """``estimate`` at ``clock``; its interval still includes the time in a table of kernels."""
    factor = float(estimate.breakdown[PRICED_CLOCK]) / clock
    lower, upper = estimate.lower * min(factor, 1.0), estimate.upper * max(factor, 1.0)
    _, used, long_load, burst = _arithmetic(estimate, 1)
    drawn = used * power_at(clock * burst) / power_at(long_load * burst)
    moved = dataclasses.replace(estimate, seconds=estimate.seconds * factor, lower=lower, upper=upper)
    return _noted(moved, {STEP_CLOCK: clock, DRAWN_POWER: drawn})


def _noted(estimate: Estimate, notes: Mapping[str, float]) -> Estimate:
    return dataclasses.replace(estimate, breakdown={**estimate.breakdown, **notes})
