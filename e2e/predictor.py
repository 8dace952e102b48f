"""From a trace of operators to the time of a step: lower, price, simulate, explain."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from costmodel.gpu.factory import gpu_cost_model
from costmodel.interface import CostModel
from costmodel.machine_records import Machine
from e2e.breakdowns import breakdown_of, coverage_of, kernel_count, overheads_of
from e2e.compilation import compile_rank
from e2e.critical_path import CriticalPath, critical_path
from e2e.graph import ExecutionGraph, RankGraph
from e2e.intervals import Deviations
from e2e.lowering import LoweringOptions, lower, unknown_operators
from e2e.memory import MemoryUsage, peak_memory
from e2e.path_parts import path_parts
from e2e.prediction import Prediction
from e2e.pricing import Overheads, as_cuda_graph, price
from e2e.simulator import SteadyState, simulate_iterations

if TYPE_CHECKING:
    from e2e.operators import OperatorTrace

# Iterations that are simulated; after a few the host's lead over the device no longer grows or shrinks a step.
ITERATIONS = 6
PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Setting:
    """The machine and the software stack. ``cost_model``: ``None`` for the fitted models of ``machine``.

    ``cuda_graph``: the step is replayed as one CUDA graph. ``compiled``: forward and backward by ``torch.compile``.
    """

    machine: Machine
    overheads: Overheads
    cost_model: CostModel | None = None
    tf32: bool = False
    cuda_graph: bool = False
    compiled: bool = False


@dataclass(frozen=True)
class Result:
    """A prediction and what it was read from, for timelines and reports."""

    prediction: Prediction
    graph: ExecutionGraph
    steady: SteadyState
    path: CriticalPath


def predict(trace: OperatorTrace, setting: Setting) -> Result:
    """One steady step of ``trace`` on one GPU."""
    rank = lower(trace, LoweringOptions(tf32=setting.tf32))
    warnings = lowering_warnings(rank)
    if setting.compiled:
        rank = compile_rank(rank, trace)
    elif trace.compiled:
        warnings.append("the script compiles its model (torch.compile), which runs eagerly here; add --compile")
    graph = ExecutionGraph((rank,), source=trace.source)
    return predict_graph(graph, setting, peak_memory(trace), warnings)


def predict_graph(
    graph: ExecutionGraph,
    setting: Setting,
    memory: MemoryUsage | None = None,
    warnings: list[str] | None = None,
    notes: Sequence[str] = (),
) -> Result:
    """One steady step of ``graph``, whose missing durations are filled in. ``notes``: where durations come from."""
    model = setting.cost_model or gpu_cost_model(setting.machine)
    priced = price(graph, model, setting.overheads)
    if setting.cuda_graph:
        priced = as_cuda_graph(priced, setting.overheads.seconds("T4", "cudaGraphLaunch"))
    steady = simulate_iterations(priced, ITERATIONS)
    path = critical_path(priced, steady.timeline, iteration=ITERATIONS - 1)
    prediction = _explain(priced, steady, path, setting, memory, list(warnings or []))
    return Result(replace(prediction, notes=tuple(notes)), priced, steady, path)


def _explain(
    graph: ExecutionGraph,
    steady: SteadyState,
    path: CriticalPath,
    setting: Setting,
    memory: MemoryUsage | None,
    warnings: list[str],
) -> Prediction:
    rank = graph.ranks[0]
    window = steady.timeline.window(ITERATIONS - 1)
    activity = steady.timeline.activity(rank.rank, window)
    seconds = steady.period_seconds
    capacity = int(setting.machine.memory[-1].capacity_bytes)
    fits = None if memory is None else memory.peak_bytes <= capacity
    if memory is not None and not fits:
        warnings.append(
            f"does not fit: {memory.peak_bytes / 2**30:.1f} GiB needed at {memory.operator}, "
            f"{setting.machine.name} has {capacity / 2**30:.1f} GiB"
        )
    if not steady.settled:
        warnings.append(f"the step had not settled after {ITERATIONS} iterations; the mean of the last ones is given")
    coverage = coverage_of(graph)
    if coverage.get("analytic", 0.0) > 0.2:
        warnings.append(
            f"{coverage['analytic']:.0%} of the device time comes from analytic bounds without measurements"
        )
    phases = _phases(rank, steady)
    return Prediction(
        workload=graph.source,
        machine=setting.machine.name,
        iteration_seconds=seconds,
        interval_seconds=_interval(
            rank,
            seconds,
            activity.active / max(activity.window, 1e-12),
            path.host_bound_fraction * seconds,
            host_factor(setting.overheads),
        ),
        forward_seconds=phases["forward"],
        backward_seconds=phases["backward"],
        optimizer_seconds=phases["optimizer"],
        gpu_active_seconds=activity.active,
        gpu_idle_seconds=activity.idle,
        host_bound_fraction=path.host_bound_fraction,
        breakdown=breakdown_of(rank),
        overheads=overheads_of(rank),
        critical_path=path_parts(path),
        peak_memory_bytes=None if memory is None else memory.peak_bytes,
        memory_breakdown={} if memory is None else {str(role): size for role, size in memory.breakdown.items()},
        memory_capacity_bytes=capacity,
        fits=fits,
        coverage=coverage,
        kernels=kernel_count(rank),
        operators=len(rank.calls),
        warnings=warnings,
    )


def lowering_warnings(rank: RankGraph) -> list[str]:
    """Names the operators that no table knows."""
    unknown = unknown_operators(rank)
    if not unknown:
        return []
    names = ", ".join(f"{name} ({count})" for name, count in unknown.most_common(5))
    more = f" and {len(unknown) - 5} more" if len(unknown) > 5 else ""
    return [
        f"{sum(unknown.values())} launches of operators without a model, priced by the bytes they move: {names}{more}"
    ]


def _phases(rank: RankGraph, steady: SteadyState) -> dict[str, float]:
    """Device time from the end of the phase before to the end of each phase, in the last iteration."""
    timeline = steady.timeline
    begin, end = timeline.window(ITERATIONS - 1)
    ends: dict[str, float] = dict.fromkeys(PHASES, begin)
    for task in rank.tasks:
        call = None if task.call is None else rank.calls.get(task.call)
        phase: str = "other" if call is None else call.phase
        if phase in ends:
            ends[phase] = max(ends[phase], timeline.task(rank.rank, task.id, ITERATIONS - 1).end)
    found: dict[str, float] = {}
    before = begin
    for phase in PHASES:
        found[phase] = max(0.0, ends[phase] - before)
        before = max(before, ends[phase])
    last = next((phase for phase in reversed(PHASES) if found[phase]), None)
    if last is not None:
        found[last] += end - before  # what follows the last phase on the host belongs to it
    return found


def host_factor(overheads: Overheads) -> float:
    """By how much the host may be slower or faster than ``overheads`` say; one where the table does not tell."""
    return float(getattr(overheads, "factor", 1.0))


def _interval(
    rank: RankGraph, seconds: float, active_share: float, host_seconds: float, factor: float
) -> tuple[float, float]:
    """Kernels of one family err alike, families independently; so does the host, on the critical path
    ``host_seconds``.
    """
    deviations = Deviations()
    for task in rank.tasks:
        deviations.add(task, active_share)
    return deviations.around(seconds, host_seconds, factor)
