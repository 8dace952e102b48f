"""Utilisation of the GPUs' peak compute rate by a step (MFU and HFU), its energy and its cost.

    MFU = (FLOPs in 8 bits / peak rate of 8 bits + all other FLOPs of the model / peak rate of the step) / (GPUs x time)

FLOPs are those of the captured operators, counted by :mod:`costmodel.operators.any_operator`; the rate is the dense one
of the vendor's datasheet. Forward and backward pass count, recomputation in the backward pass does not: HFU includes
everything that is executed. The rate of the step is that of the fastest number type of 16 bits or more among its
products: wider internal arithmetic of attention kernels does not reduce the model's work. This is the definition of
PaLM (Chowdhery et al., arXiv 2204.02311, appendix B); 8-bit products are compared with their own peak.

The power model is that of the clock (:mod:`costmodel.gpu.power`): a constant part, and above it the power of running
kernels. It covers the board alone: host, network, cooling and power supply come on top. The split between kernels of
the power above idle is inferred from rates under a power limit, not from measured joules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from costmodel.gpu.families.rates import dense_peak
from costmodel.gpu.power import board_watts, memory_power
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator, CountedFlops, counted_flops, dtype_of
from e2e.explain.breakdowns import autograd_tasks
from e2e.step.execution_graph import CallInfo, ExecutionGraph, Kernel, RankGraph, Task

# Largest share of the kernels' time in unknown operators for which FLOPs are reported.
_UNKNOWN_SHARE = 0.1
# Number types of 8 bits, as operators name them.
EIGHT_BITS = ("float8", "int8")


@dataclass(frozen=True)
class Utilisation:
    """FLOPs of one step and their share of the peak."""

    # FLOPs on all GPUs together.
    model_flops: float
    executed_flops: float
    # Fractions of the peak; `None` if the machine file has no datasheet rate.
    mfu: float | None
    hfu: float | None
    # Peak of one GPU, by dtype of the products.
    peak_flops_per_second: Mapping[str, float]


@dataclass
class _Counted:
    """FLOPs by dtype."""

    model: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    executed: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def add(self, dtype: str, flops: CountedFlops, times: int, *, again: bool) -> None:
        """Add ``times`` runs; ``again``: recomputation, which is not counted in the model's FLOPs."""
        self.executed[dtype] += flops.executed * times
        if not again:
            self.model[dtype] += flops.model * times


def beyond_the_peak(used: Utilisation | None) -> list[str]:
    """Return a warning if the step computes more than its GPUs can."""
    if used is None or used.hfu is None or used.hfu <= 1.0:
        return []
    return [
        f"computes {used.hfu:.0%} of what its GPUs can by their datasheet: the step cannot be so fast; look at the "
        "rates in the machine file, or at what the step was taken for"
    ]


def utilisation_of(graph: ExecutionGraph, machine: Machine, seconds: float) -> Utilisation | None:
    """Utilisation by a step of ``seconds``; ``None`` where the FLOPs of too many kernels of ``graph`` are unknown."""
    if _unknown_share(graph) > _UNKNOWN_SHARE:
        return None
    counted = _Counted()
    for rank in graph.ranks:
        _count(rank, graph.multiplicity.get(rank.rank, 1), counted)
    if not any(counted.model.values()):
        return None
    gpus = sum(graph.multiplicity.get(rank.rank, 1) for rank in graph.ranks)
    peaks = {dtype: dense_peak(machine, dtype) for dtype, flops in counted.executed.items() if flops}
    known = {dtype: peak for dtype, peak in peaks.items() if peak is not None}
    step = max((dtype for dtype in known if dtype not in EIGHT_BITS), key=lambda dtype: known[dtype], default="")

    def share(flops: Mapping[str, float]) -> float | None:
        if len(known) < len(peaks) or seconds <= 0:
            return None
        held = (known[dtype if dtype in EIGHT_BITS else step] for dtype in known)
        return sum(flops[dtype] / peak for dtype, peak in zip(known, held, strict=True)) / (gpus * seconds)

    return Utilisation(
        sum(counted.model.values()), sum(counted.executed.values()), share(counted.model), share(counted.executed),
        {dtype: peak for dtype, peak in known.items() if dtype in EIGHT_BITS or dtype == step},
    )  # fmt: skip


def _count(rank: RankGraph, alike: int, counted: _Counted) -> None:
    flops: dict[AnyOperator, CountedFlops] = {}
    for kernel, on_autograd, times in _runs(rank):
        info = None if kernel.call is None else rank.calls.get(kernel.call)
        again = _is_repeated(info, on_autograd)
        for operator in kernel.operators:
            if operator not in flops:
                flops[operator] = counted_flops(operator)
            if flops[operator].executed:
                counted.add(dtype_of(operator), flops[operator], alike * times, again=again)


def _is_repeated(info: CallInfo | None, on_autograd: bool) -> bool:
    """True if the call's products do not count for the model: recomputed forward pass, or the optimizer."""
    if info is None:
        return False
    return info.recomputed or info.phase in ("optimizer", "data") or (on_autograd and info.phase == "forward")


def _runs(rank: RankGraph) -> Iterator[tuple[Task | Kernel, bool, int]]:
    """Iterate over (kernel, launched by autograd's thread, repetitions). Repeated tasks share their kernels."""
    backward = autograd_tasks(rank)
    repeated: dict[tuple[int, bool], tuple[tuple[Kernel, ...], int]] = {}
    for task in rank.tasks:
        on_autograd = task.id in backward
        if not task.kernels:
            yield task, on_autograd, 1
            continue
        key = (id(task.kernels), on_autograd)
        repeated[key] = (task.kernels, repeated.get(key, (task.kernels, 0))[1] + 1)
    for (_, on_autograd), (kernels, times) in repeated.items():
        for kernel in kernels:
            yield kernel, on_autograd, times


def _unknown_share(graph: ExecutionGraph) -> float:
    """Share of the kernels' time, without collectives, in unknown operators."""
    whole = unknown = 0.0
    for rank in graph.ranks:
        for task in rank.tasks:
            if task.collective is None and task.duration is not None and task.kind == "kernel":
                whole += task.duration.seconds
                unknown += 0.0 if task.operators or task.kernels else task.duration.seconds
    return unknown / whole if whole else 0.0


# Up to this share of the kernels' time, kernels of unknown power are assumed to draw that of memory-bound ones.
_UNKNOWN_POWER_SHARE = 0.1
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
    return None if known == 0.0 or unknown > _UNKNOWN_POWER_SHARE * (known + unknown) else drawn
