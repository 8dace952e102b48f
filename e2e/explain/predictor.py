"""Prediction of a step from its execution graph: price, simulate, explain. A single GPU is one rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from costmodel.gpu.factory import gpu_cost_model
from costmodel.machines.machine_records import Machine
from costmodel.model.cost_model import CostModel
from e2e.explain.critical_path import CriticalPath
from e2e.explain.explanation import RankSite, explain
from e2e.explain.prediction import Prediction
from e2e.explain.simulated_step import SimulatedStep
from e2e.price.collective_pricing import price_collectives
from e2e.price.contention import kernel_loads, load_on
from e2e.price.pricing import HostOverheads, as_cuda_graph, price
from e2e.price.release_spread import OfOlderLibraries
from e2e.price.speed_band import SpeedBand, StepErrors, slowed
from e2e.simulate.simulator import SteadyState, simulate, simulate_iterations
from e2e.simulate.skew import Skew, skewed
from e2e.simulate.timeline import Timeline
from e2e.step.execution_graph import ExecutionGraph
from e2e.step.memory import MemoryUsage

if TYPE_CHECKING:
    from costmodel.machines.cluster import Cluster

# Number of simulated iterations: enough for the host's lead over the device to become steady. The last but one is
# explained: in the last one, ranks that are ahead have nothing to do.
ITERATIONS = 6
# Graphs with at least MANY_TASKS are tried with fewer iterations first: long steps settle sooner.
MANY_TASKS, FEW_ITERATIONS = 100_000, 3
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
    # See `e2e.price.release_spread.OfOlderLibraries`.
    older_libraries: bool = False

    def prices(self) -> CostModel:
        """Return the cost model of all device work."""
        model = self.cost_model or gpu_cost_model(self.machine)
        return OfOlderLibraries(model, self.machine) if self.older_libraries else model


@dataclass(frozen=True)
class RecordedSite:
    """Site of recorded ranks, with only a name and a number of nodes.

    A :class:`e2e.explain.explanation.RankSite`.
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
    # Error figures as in `e2e.explain.simulated_step.SimulatedStep`.
    host_factor: float = 1.0
    errors: StepErrors | None = None


def predict(
    graph: ExecutionGraph,
    setting: Setting,
    cluster: Cluster,
    memory: Memory | None = None,
    *,
    collectives: CostModel | None = None,
    warnings: Sequence[str] = (),
    notes: Sequence[str] = (),
    skew: Skew | None = None,
    band: SpeedBand | None = None,
    altered: Callable[[ExecutionGraph], ExecutionGraph] | None = None,
) -> PredictionResult:
    """Predict one steady step of ``graph`` on ``cluster``; missing durations are filled in, existing ones are kept.

    ``memory``: rank of the graph -> its usage. ``collectives``: cost model of transfers (default: the fitted models of
    ``cluster``). ``notes``: where durations come from. ``skew``: differences between ranks. ``band``: slowdown of all
    ranks to the slowest of several GPUs, unless ``skew`` gives a spread. ``altered``: change of the priced graph by a
    what-if question. Raises ``InputError`` if the graph has more ranks than the cluster GPUs, ``SimulationError`` for a
    deadlock.
    """
    skew = skew or Skew()
    gpus = sum(graph.multiplicity.get(rank.rank, 1) for rank in graph.ranks)
    lost = band.slowdown(gpus) if band is not None and skew.spread is None else 0.0
    priced = priced_graph(graph, setting, cluster, collectives)
    priced = skewed(slowed(priced if altered is None else altered(priced), lost), skew)
    steady = _steady(priced, skew.starts)
    step = SimulatedStep(
        priced,
        steady.timeline,
        steady.timeline.iterations - 2,
        steady.period_seconds,
        host_factor=setting.overheads.factor,
        errors=None if band is None else band.errors,
    )
    told = [*notes, *_waiting_for_the_slowest(gpus, lost)]
    found = _result(step, setting.machine, cluster, memory, [*warnings, *_unsettled(steady)], told)
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
    return replace(_result(step, machine, site, memory, warnings, notes), starts=starts or {})


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
    if setting.cuda_graph:
        priced = as_cuda_graph(priced, setting.overheads.seconds("T4", "cudaGraphLaunch"))
    return priced


def _collective_model(cluster: Cluster) -> CostModel:
    # Slow to import, so imported only for graphs with collectives.
    from costmodel.collectives import collective_cost_model

    return collective_cost_model(cluster)


def _steady(graph: ExecutionGraph, starts: Mapping[int, float]) -> SteadyState:
    """Simulate as many iterations of a priced ``graph`` as it takes to settle, or :data:`ITERATIONS` of them.

    The cost of late starts may show only after several iterations.
    """
    if not starts and sum(len(rank.tasks) for rank in graph.ranks) >= MANY_TASKS:
        steady = simulate_iterations(graph, FEW_ITERATIONS, starts)
        if steady.settled:
            return steady
    return simulate_iterations(graph, ITERATIONS, starts)


def _waiting_for_the_slowest(gpus: int, lost: float) -> list[str]:
    if not lost:
        return []
    return [
        f"kernels take {lost:.1%} longer than alone: {gpus:,} GPUs wait for the slowest of them (fitted to published "
        "training steps; --skew spread=... says otherwise, spread=0 that all are alike)"
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
) -> PredictionResult:
    prediction = explain(step, machine, site, memory or {}, warnings, notes)
    return PredictionResult(
        prediction,
        step.graph,
        step.timeline,
        step.iteration,
        step.path,
        step.paths,
        memory or {},
        host_factor=step.host_factor,
        errors=step.errors,
    )
