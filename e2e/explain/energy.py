"""What the GPUs of a step draw, and what a step costs.

Power is that of the model of the clock (:mod:`costmodel.gpu.power`): a part that the clock does not move, and above it
what kernels draw while they run. It is the board's alone: host, network, cooling and power supply come on top. What
draws how much above rest follows from rates under a limit, not from measured joules.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.gpu.families.clock import memory_power
from costmodel.gpu.power import board_watts
from costmodel.machines.machine_records import Machine
from e2e.step.execution_graph import ExecutionGraph, RankGraph

# Kernels of unknown power up to this share of the kernels' time are taken to draw what those that wait for memory do.
_UNKNOWN_SHARE = 0.1
SECONDS_OF_AN_HOUR = 3600.0
JOULES_OF_A_KILOWATT_HOUR = 3.6e6


@dataclass(frozen=True)
class StepEnergy:
    """``joules``: of one step, the boards of all GPUs; ``mean_watts``: of one board; ``limit_watts``: its limit."""

    joules: float
    mean_watts: float
    limit_watts: float


@dataclass(frozen=True)
class GpuPrice:
    """``per_gpu_hour`` in ``currency``; ``origin``: whose price it is, ``date``: of which day (both may be empty)."""

    per_gpu_hour: float
    currency: str = "USD"
    origin: str = ""
    date: str = ""


@dataclass(frozen=True)
class StepCost:
    """``per_step``: of all GPUs, in the currency of ``price``."""

    price: GpuPrice
    per_step: float


def cost_of(price: GpuPrice, seconds: float, gpus: int) -> StepCost:
    """Of a step of ``seconds``."""
    return StepCost(price, price.per_gpu_hour * gpus * seconds / SECONDS_OF_AN_HOUR)


def energy_of(graph: ExecutionGraph, machine: Machine, seconds: float) -> StepEnergy | None:
    """Of a step of ``seconds``; ``None`` of GPUs without a model of their power, and of recorded kernels."""
    shares = [_drawn(rank, machine) for rank in graph.ranks]
    if seconds <= 0 or any(each is None for each in shares):
        return None
    watts = gpus = 0.0
    for rank, drawn in zip(graph.ranks, shares, strict=True):
        alike = graph.multiplicity.get(rank.rank, 1)
        watts += alike * board_watts(machine, (drawn or 0.0) / seconds)
        gpus += alike
    return StepEnergy(watts * seconds, watts / gpus, machine.chip().power_watts)


def _drawn(rank: RankGraph, machine: Machine) -> float | None:
    """Seconds x power above rest, in shares of (limit - rest). A transfer draws what waiting for memory does, by the
    share of the memory's bandwidth that it takes.
    """
    waiting = memory_power(machine)
    drawn = known = unknown = 0.0
    for task in rank.tasks:
        if task.duration is None:
            continue
        power = task.duration.power
        if task.collective is not None:
            power = waiting * (0.0 if task.load is None else task.load.memory)
        elif power is None and task.kind == "kernel":
            unknown += task.duration.seconds
        elif power is not None:
            known += task.duration.seconds
        drawn += task.duration.seconds * (waiting if power is None else power)
    return None if known == 0.0 or unknown > _UNKNOWN_SHARE * (known + unknown) else drawn
