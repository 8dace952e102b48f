"""Prediction of a step from its execution graph: price, simulate, explain. A single GPU is one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Protocol

from costmodel.cost_model import CostModel
from costmodel.gpu.factory import gpu_cost_model
from costmodel.machines.machine_records import Machine
from e2e.explain.breakdowns import breakdown_of, coverage_of, overheads_of, phase_seconds, range_figures
from e2e.explain.critical_path import CriticalPath, SimulatedStep, path_parts
from e2e.explain.intervals import MOST_TASKS, Deviations, simulated_seconds, step_deviations, task_count
from e2e.explain.prediction import Prediction, board_of
from e2e.explain.rank_figures import (
    RankFigures,
    collective_figures,
    find_stragglers,
    fits_memory,
    fullest_rank,
    memory_verdict,
    rank_figures,
)
from e2e.explain.utilisation import beyond_the_peak, energy_of, utilisation_of
from e2e.price.collective_pricing import kernel_loads, load_on, price_collectives
from e2e.price.pricing import HostOverheads, as_cuda_graph, price
from e2e.price.speed_band import OfOlderLibraries, SpeedBand, StepErrors, slow_down, with_speeds
from e2e.simulate.simulator import SteadyState, simulate, simulate_iterations
from e2e.simulate.timeline import Timeline
from e2e.step.execution_graph import ExecutionGraph
from e2e.step.memory import MemoryUsage
from e2e.step.memory_room import SURE, Verdict, largest_fitting, memory_room

if TYPE_CHECKING:
    from costmodel.machines.cluster import Cluster


# Share of the device time priced by analytic models without measurements from which a warning is given.
_MUCH_ANALYTIC = 0.2


class RankSite(Protocol):
    """Location of the ranks as a report needs it; :class:`costmodel.machines.cluster.Cluster` is one implementation."""

    @property
    def name(self) -> str:
        """Name of the site."""
        ...

    @property
    def nodes(self) -> int:
        """Number of nodes that the ranks are spread over."""
        ...


def explain(
    step: SimulatedStep,
    deviations: Deviations,
    machine: Machine,
    site: RankSite,
    memory: Mapping[int, MemoryUsage],
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Prediction:
    """Make the prediction of ``step``. ``deviations``: what its time may deviate by; ``memory``: rank of the graph ->
    its usage, as far as known.
    """
    graph, path = step.graph, step.path
    room = memory_room(machine, graph, site)
    ranks = [rank_figures(step, each, step.paths[each.rank], memory.get(each.rank), room) for each in graph.ranks]
    collectives = collective_figures(graph, step.timeline, step.iteration)
    longest = graph.ranks[max(range(len(ranks)), key=lambda place: ranks[place].compute_seconds)]
    phases = phase_seconds(longest, step.timeline, step.iteration)
    activity = step.timeline.activity(longest.rank, step.window)
    coverage = coverage_of(graph)
    full = fullest_rank(ranks)
    used = utilisation_of(graph, machine, step.seconds)
    judged = memory_verdict(ranks, room)
    said = _memory_warning(judged, ranks, memory, machine, room)
    return Prediction(
        workload=graph.source,
        machine=machine.name,
        cluster=site.name,
        gpus=sum(rank.multiplicity for rank in ranks),
        nodes=site.nodes,
        iteration_seconds=step.seconds,
        interval_seconds=deviations.around(step.seconds, step.errors),
        critical_path_seconds=path.seconds,
        forward_seconds=phases.forward,
        backward_seconds=phases.backward,
        optimizer_seconds=phases.optimizer,
        other_seconds=phases.other,
        gpu_active_seconds=activity.active,
        gpu_idle_seconds=activity.idle,
        host_bound_fraction=path.host_bound_fraction,
        breakdown=breakdown_of(longest),
        overheads=overheads_of(longest),
        attribution=path.by_kind,
        critical_path=path_parts(path),
        ranks=ranks,
        collectives=collectives,
        stragglers=find_stragglers(collectives),
        peak_memory_bytes=None if full is None else full.peak_memory_bytes,
        memory_breakdown={} if full is None else full.memory_breakdown or {},
        memory_capacity_bytes=int(machine.memory[-1].capacity_bytes),
        memory_room_bytes=room,
        memory_verdict=judged,
        fits=fits_memory(judged),
        memory_shortage=said if judged == "does not fit" else None,
        coverage=coverage,
        kernels=sum(rank.kernels for rank in ranks),
        operators=sum(rank.operators for rank in ranks),
        warnings=[
            *warnings,
            *([] if said is None else [said]),
            *_unmeasured(coverage),
            *beyond_the_peak(used),
        ],
        notes=tuple(notes),
        board=board_of(machine),
        utilisation=used,
        energy=energy_of(graph, machine, step.seconds),
        ranges=range_figures(longest, path if len(ranks) == 1 else step.paths[longest.rank]),
    )


def _memory_warning(
    judged: Verdict, ranks: Sequence[RankFigures], memory: Mapping[int, MemoryUsage], machine: Machine, room: int
) -> str | None:
    """Return a warning about the fullest rank if it does not fit, may not fit or leaves no room, else ``None``."""
    full = fullest_rank(ranks)
    if full is not None and judged == "fits" and (full.peak_memory_bytes or 0) > largest_fitting(room):
        return (
            "the allocator's reserve fills the GPU: where it has to free memory and take it again within a step, the "
            "step is longer than predicted (a step measured on four H100 took 1.4 times its predicted time)"
        )
    if full is None or judged not in ("does not fit", "may not fit"):
        return None
    share = (full.allocated_bytes or 0) / room if room else float("inf")
    more = f"{share - 1:.0%} more than there is" if share > 1 else f"{share:.0%} of it, where {SURE:.0%} are sure"
    return f"{judged}: {_need(ranks, full, memory)}, {machine.name} has {room / 2**30:.1f} GiB for tensors: {more}"


def _need(ranks: Sequence[RankFigures], full: RankFigures, memory: Mapping[int, MemoryUsage]) -> str:
    usage = memory[full.rank]
    needed = f"{usage.allocated_bytes / 2**30:.1f} GiB"
    if sum(rank.multiplicity for rank in ranks) == 1:
        return f"{needed} needed at {usage.operator}"
    return f"rank {full.rank} needs {needed}"


def _unmeasured(coverage: Mapping[str, float]) -> list[str]:
    share = coverage.get("analytic", 0.0)
    if share <= _MUCH_ANALYTIC:
        return []
    return [f"{share:.0%} of the device time comes from analytic bounds without measurements"]


# Number of simulated iterations: enough for the host's lead over the device to become steady. The last but one is
# explained: in the last one, ranks that are ahead have nothing to do.
ITERATIONS = 6
# Graphs with at least MANY_TASKS are tried with fewer iterations first: long steps settle sooner.
MANY_TASKS, FEW_ITERATIONS = 100_000, 3
# Part of the usual network that an unnamed one may have: nodes of eight V100 are let with 25 to 400 Gb/s, those of
# eight A100 with 400 to 1,600.
_SLOWER_NETWORK = 4
# Relative difference below which iterations count as equal: it cannot be measured.
WORTH_TELLING = 1e-3
Memory = Mapping[int, MemoryUsage]


@dataclass(frozen=True)
class Setting:
    """Machine and software stack."""

    machine: Machine
    overheads: HostOverheads
    # `None`: the fitted models of `machine`
    cost_model: CostModel | None = None
    # The step is replayed as one CUDA graph.
    cuda_graph: bool = False
    # Forward and backward pass run by `torch.compile`.
    compiled: bool = False
    # See `e2e.price.speed_band.OfOlderLibraries`.
    older_libraries: bool = False

    def prices(self) -> CostModel:
        """Return the cost model of all device work."""
        model = self.cost_model or gpu_cost_model(self.machine)
        return OfOlderLibraries(model, self.machine) if self.older_libraries else model


@dataclass(frozen=True)
class RecordedSite:
    """Site of recorded ranks, with only a name and a number of nodes.

    A :class:`e2e.explain.predictor.RankSite`.
    """

    name: str
    nodes: int = 1


@dataclass(frozen=True)
class PredictionResult:
    """Prediction and the data behind it."""

    prediction: Prediction
    graph: ExecutionGraph
    timeline: Timeline
    # The explained iteration.
    iteration: int
    path: CriticalPath
    # Path of each rank alone.
    paths: Mapping[int, CriticalPath]
    # Memory of the ranks for which it is known.
    memory: Memory = field(default_factory=dict)
    # Start times of a recorded iteration that is run once; `None`: a steady step.
    starts: Mapping[int, float] | None = None
    # What its time may deviate by.
    deviations: Deviations = field(default_factory=Deviations)
    # Error figures as in `e2e.explain.critical_path.SimulatedStep`.
    host_factor: float = 1.0
    errors: StepErrors | None = None


def predict_graph(
    graph: ExecutionGraph,
    setting: Setting,
    cluster: Cluster,
    memory: Memory | None = None,
    *,
    collectives: CostModel | None = None,
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
    speed_spread: float | None = None,
    band: SpeedBand | None = None,
    altered: Callable[[ExecutionGraph], ExecutionGraph] | None = None,
) -> PredictionResult:
    """Predict one steady step of ``graph`` on ``cluster``; missing durations are filled in, existing ones are kept.

    ``memory``: rank of the graph -> its usage. ``collectives``: cost model of transfers (default: the fitted models of
    ``cluster``). ``notes``: where durations come from. ``band``: slowdown of all ranks to the slowest of several GPUs,
    unless ``speed_spread`` gives the standard deviation of their speeds. ``altered``: change of the priced graph by a
    what-if question. Raises ``InputError`` if the graph has more ranks than the cluster GPUs, ``SimulationError`` for a
    deadlock.
    """
    gpus = sum(graph.multiplicity.get(rank.rank, 1) for rank in graph.ranks)
    priced = priced_graph(graph, setting, cluster, collectives)
    lost = band.slowdown_of(priced) if band is not None and speed_spread is None else 0.0

    def running(priced: ExecutionGraph) -> ExecutionGraph:
        slowed = slow_down(priced if altered is None else altered(priced), lost)
        return with_speeds(slowed, speed_spread or 0.0)

    priced = running(priced)
    steady = _steady(priced)
    step = SimulatedStep(
        priced,
        steady.timeline,
        steady.timeline.iterations - 2,
        steady.period_seconds,
        host_factor=setting.overheads.factor,
        errors=None if band is None else band.errors,
    )
    told = [*notes, *_waiting_for_the_slowest(gpus, lost)]
    slower: dict[str, float] = {}
    if cluster.network_assumed and cluster.network is not None and cluster.nodes > 1 and collectives is None:
        told.append(
            f"the network between nodes is taken to be {cluster.network_text}, and by the interval down to "
            f"1/{_SLOWER_NETWORK} of it; name it by --network, or the cluster by --gpu"
        )
        if task_count(priced) <= MOST_TASKS:
            link = replace(cluster.network, bandwidth=cluster.network.bandwidth / _SLOWER_NETWORK)
            other = running(priced_graph(graph, setting, replace(cluster, network=link)))
            slower["network"] = max(simulated_seconds(other, None) - simulated_seconds(priced, None), 0.0)
    found = _result(step, setting.machine, cluster, memory, [*warnings, *_unsettled(steady)], told, slower)
    return replace(found, prediction=replace(found.prediction, cuda_graph=setting.cuda_graph))


def explain_once(
    graph: ExecutionGraph,
    machine: Machine,
    site: RankSite,
    memory: Memory | None = None,
    *,
    starts: Mapping[int, float] | None = None,
    steady: bool = False,
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
    host_factor: float = 1.0,
) -> PredictionResult:
    """Simulate and explain one iteration of a priced ``graph`` from an idle start, such as a recorded one.

    ``starts``: rank -> seconds by which it begins late; ``steady``: explain a steady iteration among several instead,
    with the lag of the device behind the host that is then usual; ``notes``: where durations come from;
    ``host_factor``: factor by which the host's times may be shorter or longer.
    """
    if steady:
        settled = simulate_iterations(graph, ITERATIONS)
        step = SimulatedStep(graph, settled.timeline, settled.timeline.iterations - 2, settled.period_seconds)
        step = replace(step, host_factor=host_factor)
        return _result(step, machine, site, memory, warnings, notes)
    timeline = simulate(graph, starts)
    step = SimulatedStep(graph, timeline, 0, timeline.step_seconds, starts or {}, host_factor=host_factor)
    return _result(step, machine, site, memory, warnings, notes)


def priced_graph(
    graph: ExecutionGraph, setting: Setting, cluster: Cluster, collectives: CostModel | None = None
) -> ExecutionGraph:
    """Return ``graph`` with a duration for everything, and with the GPU load of kernels and collectives that overlap.

    A given cost model of ``collectives`` does not tell their load on a GPU: they slow no kernel.
    """
    if any(task.collective is not None for rank in graph.ranks for task in rank.tasks):
        if collectives is None:
            graph = price_collectives(graph, cluster, _collective_model(cluster), load_on(cluster))
        else:
            graph = price_collectives(graph, cluster, collectives)
    priced = price(graph, setting.prices(), setting.overheads)
    priced = kernel_loads(graph, priced, setting.machine)
    if setting.cuda_graph or any(rank.graphs for rank in graph.ranks):
        launch = setting.overheads.seconds("T4", "cudaGraphLaunch")
        priced = as_cuda_graph(priced, launch, setting.cuda_graph)
    return priced


def _collective_model(cluster: Cluster) -> CostModel:
    # Slow to import, so imported only for graphs with collectives.
    from costmodel.collectives import collective_cost_model

    return collective_cost_model(cluster)


def _steady(graph: ExecutionGraph) -> SteadyState:
    """Simulate as many iterations of a priced ``graph`` as it takes to settle, or :data:`ITERATIONS` of them."""
    if sum(len(rank.tasks) for rank in graph.ranks) >= MANY_TASKS:
        steady = simulate_iterations(graph, FEW_ITERATIONS)
        if steady.settled:
            return steady
    return simulate_iterations(graph, ITERATIONS)


def _waiting_for_the_slowest(gpus: int, lost: float) -> list[str]:
    if not lost:
        return []
    if gpus == 1:
        return [f"kernels take {lost:.1%} longer than in short benchmarks (half of what is fitted to published steps)"]
    return [
        f"kernels take {lost:.1%} longer than alone: {gpus:,} GPUs wait for the slowest of them (fitted to published "
        "training steps; --speed-spread says otherwise, --speed-spread 0 that all are alike)"
    ]


def _unsettled(steady: SteadyState) -> list[str]:
    if steady.spread <= WORTH_TELLING:
        return []
    return [
        f"the step had not settled after {ITERATIONS} iterations: the last ones differ by {steady.spread:.1%}, their "
        "mean is given"
    ]


def _result(
    step: SimulatedStep,
    machine: Machine,
    site: RankSite,
    memory: Memory | None,
    warnings: Sequence[str],
    notes: Sequence[str],
    slower: Mapping[str, float] | None = None,
) -> PredictionResult:
    """Explain ``step``; ``slower``: seconds by which it may be slower, by other causes than its kernels and host."""
    deviations = step_deviations(step)
    deviations.above.update(slower or {})
    prediction = explain(step, deviations, machine, site, memory or {}, warnings, notes)
    return PredictionResult(
        prediction,
        step.graph,
        step.timeline,
        step.iteration,
        step.path,
        step.paths,
        memory or {},
        starts=step.starts,
        deviations=deviations,
        host_factor=step.host_factor,
        errors=step.errors,
    )
