"""From an execution graph to the time of a step: price, simulate, explain. One GPU is the case of one rank."""

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

# Iterations that are simulated; after a few the host's lead over the device no longer grows or shrinks a step. The
# last but one is looked at: in the last, ranks that are ahead have nothing to do.
ITERATIONS = 6
# Of graphs with so many tasks fewer are tried first: a step that long hides what its beginning owes to the one before.
MANY_TASKS, FEW_ITERATIONS = 100_000, 3
# Iterations that differ by less, as a share of one, are taken for alike: nobody can tell them apart by measuring.
WORTH_TELLING = 1e-3
Memory = Mapping[int, MemoryUsage]


@dataclass(frozen=True)
class Setting:
    """The machine and the software stack. ``cost_model``: ``None`` for the fitted models of ``machine``.

    ``cuda_graph``: the step is replayed as one CUDA graph. ``compiled``: forward and backward by ``torch.compile``.
    ``older_libraries``: see :class:`e2e.price.release_spread.OfOlderLibraries`.
    """

    machine: Machine
    overheads: HostOverheads
    cost_model: CostModel | None = None
    cuda_graph: bool = False
    compiled: bool = False
    older_libraries: bool = False

    def prices(self) -> CostModel:
        """The cost model of all device work."""
        model = self.cost_model or gpu_cost_model(self.machine)
        return OfOlderLibraries(model, self.machine) if self.older_libraries else model


@dataclass(frozen=True)
class RecordedSite:
    """Where recorded ranks ran: a :class:`e2e.explain.explanation.RankSite` of which no more is known."""

    name: str
    nodes: int = 1


@dataclass(frozen=True)
class PredictionResult:
    """A prediction and what it was read from. ``iteration``: the one that is explained; ``paths``: of each rank;
    ``memory``: of those of which it is known. ``starts``: of a recorded iteration, run once; ``None``: a steady step.
    ``host_factor`` and ``errors`` as in :class:`e2e.explain.simulated_step.SimulatedStep`.
    """

    prediction: Prediction
    graph: ExecutionGraph
    timeline: Timeline
    iteration: int
    path: CriticalPath
    paths: Mapping[int, CriticalPath]
    memory: Memory = field(default_factory=dict)
    starts: Mapping[int, float] | None = None
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
    """One steady step of ``graph`` on ``cluster``; missing durations are filled in, those that are there stay.

    ``memory``: rank of the graph -> its usage. ``collectives`` prices transfers (default: the fitted models of
    ``cluster``). ``notes``: where durations come from. ``skew``: how ranks differ. ``band``: what all lose to the
    slowest of several GPUs, unless ``skew`` says how their speeds differ. ``altered``: what a question makes of the
    priced graph. ``InputError`` if the graph has more ranks
    than the cluster GPUs, ``SimulationError`` for a deadlock.
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
    """One iteration of a priced ``graph`` from a standing start, such as a recorded one.

    ``starts``: rank -> seconds by which it begins late; ``steady``: one of several alike after each other instead, with
    the device as far behind the host as it then is; ``notes``: where durations come from; ``host_factor``: by how much
    the host's times may be shorter or longer.
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
    """``graph`` with a duration for everything, and with what kernels and collectives beside each other share.

    Of a given model of ``collectives`` it is not known what they take of a GPU: they slow nothing.
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
    # Slow to import; a graph without collectives does without.
    from costmodel.collectives import collective_cost_model

    return collective_cost_model(cluster)


def _steady(graph: ExecutionGraph, starts: Mapping[int, float]) -> SteadyState:
    """As many iterations of a priced ``graph`` as it takes to settle, or :data:`ITERATIONS` of them.

    What late starts cost may show after some iterations only.
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
