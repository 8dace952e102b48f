"""From the graph of several ranks to a prediction: price kernels and collectives, simulate, explain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from costmodel.cluster import Cluster
from costmodel.collectives import collective_cost_model
from costmodel.gpu.factory import gpu_cost_model
from costmodel.interface import CostModel
from costmodel.machine_records import Machine
from e2e.breakdowns import breakdown_of, coverage_of, kernel_count, overheads_of
from e2e.collective_figures import collective_figures, stragglers
from e2e.collective_pricing import price_collectives
from e2e.critical_path import CriticalPath, critical_path
from e2e.graph import ExecutionGraph, RankGraph, Task
from e2e.intervals import Deviations
from e2e.memory import MemoryUsage
from e2e.multi_rank_prediction import MultiRankPrediction, RankFigures
from e2e.path_parts import path_parts
from e2e.predictor import PHASES, Setting, host_factor
from e2e.pricing import as_cuda_graph, price
from e2e.rank_attribution import WAITS, rank_attribution
from e2e.simulator import SteadyState, simulate, simulate_iterations
from e2e.skew import Skew, skewed
from e2e.timeline import Timeline

# Iterations that are simulated. The last but one is looked at: in the last, ranks that are ahead have nothing to do.
ITERATIONS = 6
# Of graphs with so many tasks fewer are tried first: a step that long hides what its beginning owes to the one before.
MANY_TASKS, FEW_ITERATIONS = 100_000, 3
Memory = Mapping[int, MemoryUsage]


@dataclass(frozen=True)
class MultiRankResult:
    """A prediction and what it was read from. ``iteration``: the one that is explained; ``paths``: of each rank."""

    prediction: MultiRankPrediction
    graph: ExecutionGraph
    timeline: Timeline
    iteration: int
    path: CriticalPath
    paths: Mapping[int, CriticalPath]


def predict_ranks(
    graph: ExecutionGraph,
    setting: Setting,
    cluster: Cluster,
    memory: Memory | None = None,
    *,
    collectives: CostModel | None = None,
) -> MultiRankPrediction:
    """One steady step of ``graph`` on ``cluster``; missing durations are filled in, those that are there stay.

    ``memory``: rank of the graph -> its usage. ``collectives`` prices transfers (default: the fitted models of
    ``cluster``). ``InputError`` if the graph has more ranks than the cluster GPUs, ``SimulationError`` for a deadlock.
    """
    return run_ranks(graph, setting, cluster, memory, collectives=collectives).prediction


def run_ranks(
    graph: ExecutionGraph,
    setting: Setting,
    cluster: Cluster,
    memory: Memory | None = None,
    *,
    collectives: CostModel | None = None,
    warnings: Sequence[str] = (),
    skew: Skew | None = None,
) -> MultiRankResult:
    """As :func:`predict_ranks`, with the timeline and the paths behind the figures, and with ranks that differ."""
    skew = skew or Skew()
    priced = skewed(price_ranks(graph, setting, cluster, collectives), skew)
    steady = _steady(priced, skew.starts)
    notes = list(warnings)
    if not steady.settled:
        notes.append(f"the step had not settled after {ITERATIONS} iterations; the mean of the last ones is given")
    run = _Run(priced, steady.timeline, steady.timeline.iterations - 2, steady.period_seconds)
    return _explain(run, setting.machine, cluster, memory or {}, notes, host_factor(setting.overheads))


def _steady(graph: ExecutionGraph, starts: Mapping[int, float]) -> SteadyState:
    """As many iterations of a priced ``graph`` as it takes to settle, or :data:`ITERATIONS` of them.

    What late starts cost may show after some iterations only.
    """
    if not starts and sum(len(rank.tasks) for rank in graph.ranks) >= MANY_TASKS:
        steady = simulate_iterations(graph, FEW_ITERATIONS, starts)
        if steady.settled:
            return steady
    return simulate_iterations(graph, ITERATIONS, starts)


def explain_once(
    graph: ExecutionGraph,
    machine: Machine,
    place: Place | Cluster,
    memory: Memory | None = None,
    *,
    starts: Mapping[int, float] | None = None,
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> MultiRankResult:
    """One iteration of a priced ``graph`` from a standing start, such as a recorded one.

    ``starts``: rank -> seconds by which it begins late; ``notes``: where durations come from.
    """
    timeline = simulate(graph, starts)
    run = _Run(graph, timeline, 0, timeline.step_seconds, starts or {})
    result = _explain(run, machine, place, memory or {}, list(warnings))
    return replace(result, prediction=replace(result.prediction, notes=tuple(notes)))


def price_ranks(
    graph: ExecutionGraph, setting: Setting, cluster: Cluster, collectives: CostModel | None = None
) -> ExecutionGraph:
    """``graph`` with a duration for everything."""
    priced = price_collectives(graph, cluster, collectives or collective_cost_model(cluster))
    priced = price(priced, setting.cost_model or gpu_cost_model(setting.machine), setting.overheads)
    if setting.cuda_graph:
        priced = as_cuda_graph(priced, setting.overheads.seconds("T4", "cudaGraphLaunch"))
    return priced


@dataclass(frozen=True)
class Place:
    """Where ranks ran, as far as a report needs it; a :class:`costmodel.cluster.Cluster` is one."""

    name: str
    nodes: int = 1


@dataclass(frozen=True)
class _Run:
    graph: ExecutionGraph
    timeline: Timeline
    iteration: int
    step_seconds: float
    starts: Mapping[int, float] = field(default_factory=dict)


def _explain(
    run: _Run, machine: Machine, place: Place | Cluster, memory: Memory, warnings: list[str], factor: float = 1.0
) -> MultiRankResult:
    graph, timeline = run.graph, run.timeline
    path = critical_path(graph, timeline, iteration=run.iteration)
    paths = {rank.rank: critical_path(graph, timeline, iteration=run.iteration, rank=rank.rank) for rank in graph.ranks}
    capacity = int(machine.memory[-1].capacity_bytes)
    ranks = [_rank_figures(run, rank, paths[rank.rank], memory.get(rank.rank), capacity) for rank in graph.ranks]
    figures = collective_figures(graph, timeline, run.iteration)
    fits = _all_fit(ranks)
    coverage = coverage_of(graph)
    place_of_slowest = max(range(len(ranks)), key=lambda each: ranks[each].compute_seconds)
    slowest = graph.ranks[place_of_slowest]
    phases = _phases(slowest, timeline, run.iteration)
    activity = timeline.activity(slowest.rank, timeline.window(run.iteration))
    prediction = MultiRankPrediction(
        workload=graph.source,
        machine=machine.name,
        cluster=place.name,
        gpus=sum(rank.multiplicity for rank in ranks),
        nodes=place.nodes,
        iteration_seconds=run.step_seconds,
        interval_seconds=_interval(graph, path, run.step_seconds, factor),
        critical_path_seconds=path.seconds,
        attribution=path.by_kind,
        critical_path=path_parts(path),
        ranks=ranks,
        collectives=figures,
        stragglers=stragglers(figures),
        memory_capacity_bytes=capacity,
        fits=fits,
        coverage=coverage,
        kernels=sum(kernel_count(rank) for rank in graph.ranks),
        warnings=[*warnings, *_warnings(ranks, coverage, machine, capacity)],
        forward_seconds=phases["forward"],
        backward_seconds=phases["backward"],
        optimizer_seconds=phases["optimizer"],
        gpu_active_seconds=activity.active,
        gpu_idle_seconds=activity.idle,
        host_bound_fraction=path.host_bound_fraction,
        breakdown=breakdown_of(slowest),
        overheads=overheads_of(slowest),
        peak_memory_bytes=max(
            (rank.peak_memory_bytes for rank in ranks if rank.peak_memory_bytes is not None), default=None
        ),
    )
    return MultiRankResult(prediction, graph, timeline, run.iteration, path, paths)


def _phases(rank: RankGraph, timeline: Timeline, iteration: int) -> dict[str, float]:
    """Time between the ends of two tasks belongs to the phase of the later one: in a pipeline phases take turns."""
    begin, end = timeline.window(iteration)
    ends = [(timeline.task(rank.rank, task.id, iteration).end, _phase(rank, task)) for task in rank.tasks]
    found = dict.fromkeys(PHASES, 0.0)
    before, last = begin, ""
    for moment, phase in sorted(ends):
        if phase in found and moment > before:
            found[phase] += min(moment, end) - before
            before, last = min(moment, end), phase
    if last:
        found[last] += end - before  # what follows on the host
    return found


def _phase(rank: RankGraph, task: Task) -> str:
    call = None if task.call is None else rank.calls.get(task.call)
    return "other" if call is None else call.phase


def _rank_figures(
    run: _Run, rank: RankGraph, path: CriticalPath, memory: MemoryUsage | None, capacity: int
) -> RankFigures:
    low, high = run.timeline.window(run.iteration)
    start = run.starts.get(rank.rank, 0.0)
    activity = run.timeline.activity(rank.rank, (max(low, min(start, high)), high))
    ends = (start, *run.timeline.rank_ends(rank.rank))
    attribution = rank_attribution(path, rank, run.timeline)
    wait, bubble = (attribution.get(kind, 0.0) for kind in WAITS)
    used = activity.compute + activity.exposed_transfer + wait + bubble
    return RankFigures(
        rank=rank.rank,
        multiplicity=run.graph.multiplicity.get(rank.rank, 1),
        step_seconds=ends[run.iteration + 1] - ends[run.iteration],
        compute_seconds=activity.compute,
        communication_seconds=activity.communication,
        exposed_transfer_seconds=activity.exposed_transfer,
        exposed_wait_seconds=wait,
        bubble_seconds=bubble,
        idle_seconds=max(activity.window - used, 0.0),
        attribution=attribution,
        peak_memory_bytes=None if memory is None else memory.peak_bytes,
        memory_breakdown=None if memory is None else {str(role): size for role, size in memory.breakdown.items()},
        fits=None if memory is None else memory.peak_bytes <= capacity,
    )


def _all_fit(ranks: Sequence[RankFigures]) -> bool | None:
    known = [rank.fits for rank in ranks if rank.fits is not None]
    if False in known:
        return False
    return True if len(known) == len(ranks) else None


def _interval(graph: ExecutionGraph, path: CriticalPath, seconds: float, factor: float) -> tuple[float, float]:
    """Kernels and collectives of one family on the path err alike, families independently; so does the host."""
    tasks: dict[int, tuple[Task, ...]] = {rank.rank: rank.tasks for rank in graph.ranks}
    deviations = Deviations()
    for segment in path.segments:
        task = None if segment.task is None else tasks[segment.rank][segment.task]
        if task is not None and task.duration is not None and task.duration.seconds > 0:
            deviations.add(task, segment.seconds / task.duration.seconds)
    return deviations.around(seconds, path.host_bound_fraction * path.seconds, factor)


def _warnings(
    ranks: Sequence[RankFigures], coverage: Mapping[str, float], machine: Machine, capacity: int
) -> list[str]:
    found = []
    full = [rank for rank in ranks if rank.fits is False]
    if full:
        most = max(full, key=lambda rank: rank.peak_memory_bytes or 0)
        found.append(
            f"does not fit: rank {most.rank} needs {(most.peak_memory_bytes or 0) / 2**30:.1f} GiB, "
            f"{machine.name} has {capacity / 2**30:.1f} GiB"
        )
    if coverage.get("analytic", 0.0) > 0.2:
        found.append(f"{coverage['analytic']:.0%} of the device time comes from analytic bounds without measurements")
    return found
