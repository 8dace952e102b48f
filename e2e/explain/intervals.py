"""Interval of a step time from the intervals of its parts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace

from e2e.explain.critical_path import CriticalPath, SimulatedStep, task_family
from e2e.price.speed_band import StepErrors
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.step.execution_graph import Action, Duration, ExecutionGraph, HostWork, Kernel, Launch, RankGraph, Task

# Largest graph that is simulated again for each cause of error: larger ones take seconds each time.
MOST_TASKS = 60_000
# Fraction of a step below which the host, at the slow end of its times, cannot become what the step waits for.
_IDLE_HOST = 0.8
_ITERATIONS = 4
_HOST = "host"


def step_deviations(step: SimulatedStep) -> Deviations:
    """Return by how many seconds ``step`` may be faster or slower because of its kernels and collectives on the
    critical path, and of its host, whose times may be divided or multiplied by ``step.host_factor`` (1: known).

    The step is simulated again with the fastest and the slowest host: with a fast one the device limits the step, and
    a slow one may become the bottleneck. If even the slowest cannot, or the graph has more than :data:`MOST_TASKS`
    tasks, the host's time on the critical path is scaled instead.
    """
    deviations = path_deviations(step.graph, step.path)
    factor = step.host_factor
    if factor <= 1.0:
        return deviations
    on_path = step.path.host_bound_fraction * step.path.seconds
    fast, slow = on_path * (1 - 1 / factor), on_path * (factor - 1)
    busiest = max((seconds for rank in step.graph.ranks for seconds in _host_seconds(rank)), default=0.0)
    if factor * busiest > _IDLE_HOST * step.seconds and task_count(step.graph) <= MOST_TASKS:
        # Both ends are compared with a simulation of as many iterations as theirs.
        nominal = simulated_seconds(step.graph, step.starts)
        ends = [simulated_seconds(with_host(step.graph, end), step.starts) for end in (1 / factor, factor)]
        fast, slow = max(nominal - ends[0], 0.0), max(ends[1] - nominal, 0.0)
    deviations.below[_HOST], deviations.above[_HOST] = fast, slow
    return deviations


def task_count(graph: ExecutionGraph) -> int:
    """Return the number of tasks of all ranks of ``graph``."""
    return sum(len(rank.tasks) for rank in graph.ranks)


def simulated_seconds(graph: ExecutionGraph, starts: Mapping[int, float] | None) -> float:
    """Return the seconds of a steady step, or of one iteration whose ranks begin at ``starts``."""
    if starts is not None:
        return simulate(graph, starts).step_seconds
    return simulate_iterations(graph, _ITERATIONS).period_seconds


def with_host(graph: ExecutionGraph, factor: float) -> ExecutionGraph:
    """Return ``graph`` with a host that takes ``factor`` times as long."""
    return replace(graph, ranks=tuple(_rank_with_host(rank, factor) for rank in graph.ranks))


def _rank_with_host(rank: RankGraph, factor: float) -> RankGraph:
    def longer(action: Action) -> Action:
        if isinstance(action, HostWork | Launch) and action.duration is not None:
            return replace(action, duration=scaled(action.duration, factor))
        return action

    return replace(rank, threads={name: tuple(map(longer, actions)) for name, actions in rank.threads.items()})


def scaled(duration: Duration, factor: float) -> Duration:
    """Return ``duration`` and its interval, ``factor`` times as long."""
    return replace(
        duration, seconds=factor * duration.seconds, lower=factor * duration.lower, upper=factor * duration.upper
    )


def _host_seconds(rank: RankGraph) -> Iterable[float]:
    """Return the seconds of host work of each thread of ``rank``."""
    for actions in rank.threads.values():
        yield math.fsum(
            action.duration.seconds
            for action in actions
            if isinstance(action, HostWork | Launch) and action.duration is not None
        )


def path_deviations(graph: ExecutionGraph, path: CriticalPath) -> Deviations:
    """Return the deviations of all tasks on ``path``."""
    tasks: Mapping[int, tuple[Task, ...]] = {rank.rank: rank.tasks for rank in graph.ranks}
    deviations = Deviations()
    for segment in path.segments:
        task = None if segment.task is None else tasks[segment.rank][segment.task]
        if task is not None and task.duration is not None and task.duration.seconds > 0:
            deviations.add(task, segment.seconds / task.duration.seconds)
    return deviations


class Deviations:
    """Possible deviations of each family of kernels and of the host, in seconds.

    Errors within one family of kernels and collectives are fully correlated, those of different families independent;
    so is the error of the host.
    """

    def __init__(
        self,
        below: Mapping[str, float] | None = None,
        above: Mapping[str, float] | None = None,
        taken: Mapping[str, float] | None = None,
    ) -> None:
        # Seconds by which each family may be faster (`below`) or slower (`above`), and its time (`taken`).
        self.below: dict[str, float] = defaultdict(float, below or {})
        self.above: dict[str, float] = defaultdict(float, above or {})
        self.taken: dict[str, float] = defaultdict(float, taken or {})
        self._runs: dict[int, dict[str, tuple[float, float, float]]] = {}

    def add(self, task: Task, share: float) -> None:
        """Add ``share`` of the time of ``task``; does nothing for a task without a price."""
        if task.duration is None:
            return
        if not task.kernels:
            self._add(task_family(task), *_deviation(task.duration), task.duration.seconds, share)
            return
        if id(task.kernels) not in self._runs:
            self._runs[id(task.kernels)] = _relative_deviations(task.kernels)
        for family, parts in self._runs[id(task.kernels)].items():
            self._add(family, *parts, share * task.duration.seconds)

    def around(self, seconds: float, errors: StepErrors | None = None) -> tuple[float, float]:
        """Lower and upper bound of a step of ``seconds``.

        ``errors``: share of the kernels' errors that remains in such a step, and its residual error (``None``: all of
        them, and no residual).
        """
        learned = StepErrors() if errors is None else errors.in_step(self.taken, seconds)
        below = [learned.share(family) * each for family, each in self.below.items()]
        above = [learned.share(family) * each for family, each in self.above.items()]
        down = math.hypot(-seconds * math.expm1(-learned.residual), *below)
        up = math.hypot(seconds * math.expm1(learned.residual), *above)
        return max(0.0, seconds - down), seconds + up

    def _add(self, family: str, below: float, above: float, seconds: float, share: float) -> None:
        self.below[family] += share * below
        self.above[family] += share * above
        self.taken[family] += share * seconds


def _deviation(duration: Duration) -> tuple[float, float]:
    return duration.seconds - duration.lower, duration.upper - duration.seconds


def _relative_deviations(kernels: Iterable[Kernel]) -> dict[str, tuple[float, float, float]]:
    """Return (below, above, time) of each family, relative to the total time of ``kernels``."""
    priced = [(task_family(each), each.duration) for each in kernels if each.duration is not None]
    whole = sum(duration.seconds for _, duration in priced) or 1.0
    sums: dict[str, tuple[float, float, float]] = {}
    for family, duration in priced:
        known, added = sums.get(family, (0.0, 0.0, 0.0)), _deviation(duration)
        taken = known[2] + duration.seconds / whole
        sums[family] = known[0] + added[0] / whole, known[1] + added[1] / whole, taken
    return sums
