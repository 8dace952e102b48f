"""Energy and cost of a step.

The power model is that of the clock (:mod:`costmodel.gpu.power`): a constant part, and above it the power of running
kernels. It covers the board alone: host, network, cooling and power supply come on top. The split between kernels of
the power above idle is inferred from rates under a power limit, not from measured joules.
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.gpu.families.clock import memory_power
from costmodel.gpu.power import board_watts
from costmodel.machines.machine_records import Machine
from e2e.step.execution_graph import ExecutionGraph, RankGraph

# Up to this share of the kernels' time, kernels of unknown power are assumed to draw that of memory-bound ones.
_UNKNOWN_SHARE = 0.1
SECONDS_OF_AN_HOUR = 3600.0
JOULES_OF_A_KILOWATT_HOUR = 3.6e6


@dataclass(frozen=True)
class StepEnergy:
    """Energy of one step."""

    # Energy of all boards.
    joules: float
    # Mean power of one board.
    mean_watts: float
    # Power limit of one board.
    limit_watts: float


@dataclass(frozen=True)
class GpuPrice:
    """Price of a GPU hour."""

    per_gpu_hour: float
    currency: str = "USD"
    # Vendor and date of the price; both may be empty.
    origin: str = ""
    date: str = ""


@dataclass(frozen=True)
class StepCost:
    """Cost of one step."""

    price: GpuPrice
    # Cost of all GPUs, in the currency of `price`.
    per_step: float


def cost_of(price: GpuPrice, seconds: float, gpus: int) -> StepCost:
    """Return the cost of a step of ``seconds`` on ``gpus`` GPUs."""
    return StepCost(price, price.per_gpu_hour * gpus * seconds / SECONDS_OF_AN_HOUR)


def energy_of(graph: ExecutionGraph, machine: Machine, seconds: float) -> StepEnergy | None:
    """Energy of a step of ``seconds``; ``None`` for recorded kernels and for GPUs without a power model."""
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
    """Sum of seconds times power above idle, as a fraction of (limit - idle) power; ``None`` if too much is unknown.

    A transfer draws the power of a memory-bound kernel times the share of the memory bandwidth that it uses.
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
