"""Uncertainty of the ratio of two predicted steps that differ by one change: most errors are common to both.

Each cause of error (the host is faster or slower than its table; so is a family of kernels or collectives) is set to
both ends of its interval, in both steps at once, and both are simulated again. The effect of a cause on the ratio is
its effect on the answer: an error that lengthens both steps equally has none, one that moves the bottleneck has more
than any sum over a critical path would show. Causes are independent and combine as the root of the sum of squares. The
residual error of whole steps (:class:`e2e.price.speed_band.StepErrors`) is common to both steps of one job.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from e2e.explain.critical_path import task_family
from e2e.explain.intervals import MOST_TASKS, path_deviations, scaled, simulated_seconds, task_count, with_host
from e2e.explain.predictor import PredictionResult
from e2e.price.speed_band import StepErrors
from e2e.step.execution_graph import Duration, ExecutionGraph, Kernel, RankGraph, Task

# Number of families of kernels and collectives that are separate causes, the others err together; share of a step below
# which a cause is ignored.
_ALONE, _NOTHING = 3, 1e-4
# Half-width of the interval (log units) that holds 80 % of the ratios between two batches of one model, predicted
# against measured: 36 pairs of `python -m lab.validate models`. Other shapes have other errors.
BATCH_RATIO_ERROR = 0.05
Interval = tuple[float, float]


@dataclass(frozen=True)
class ComparedStep:
    """One step of a comparison."""

    result: PredictionResult
    # Identifies the table of its host times, which may be `host_factor` times as fast or slow.
    host: Hashable = ""
    host_factor: float = 1.0
    # Share of the kernels' errors that remains in it.
    errors: StepErrors | None = None
    # Identifies its shapes.
    batch: Hashable = None
    # What-if questions that only make kernels or the host faster; `changed`: all others.
    faster: frozenset[Hashable] = frozenset()
    changed: frozenset[Hashable] = frozenset()

    def only_slower_than(self, other: ComparedStep) -> bool:
        """True if ``other`` is this step with more made faster, so that it takes no longer whatever the errors are."""
        return self.changed == other.changed and self.faster < other.faster

    @property
    def is_small(self) -> bool:
        """True if it is small enough to simulate again."""
        return task_count(self.result.graph) <= MOST_TASKS


class Comparison:
    """Comparison of steps of one job, each with something changed; not ``possible`` if one of them is too large."""

    def __init__(self, steps: Sequence[ComparedStep]) -> None:
        self._steps = list(steps)
        self.possible = all(step.is_small for step in self._steps)
        self._logs: list[tuple[list[float], list[float]]] = []
        if self.possible:
            self._base = [math.log(_seconds(step, step.result.graph)) for step in self._steps]
            self._logs = [self._under(cause) for cause in self._causes()]

    def ratio(self, one: int, other: int) -> Interval | None:
        """Return the factors (80 %) by which the ratio of step ``one`` to step ``other`` may be lower and higher.

        (0.9, 1.2) means that the ratio may be 10 % less or 20 % more. ``None`` if not ``possible``.
        """
        if not self.possible:
            return None
        below, above = [0.0], [0.0]
        nominal = self._base[one] - self._base[other]
        for ways in self._logs:
            moved = [way[one] - way[other] - nominal for way in ways]
            below.append(min(0.0, *moved))
            above.append(max(0.0, *moved))
        if self._steps[one].batch != self._steps[other].batch:
            below.append(BATCH_RATIO_ERROR)
            above.append(BATCH_RATIO_ERROR)
        low, high = nominal - math.hypot(*below), nominal + math.hypot(*above)
        if self._steps[one].only_slower_than(self._steps[other]):
            low = max(low, min(nominal, 0.0))
        if self._steps[other].only_slower_than(self._steps[one]):
            high = min(high, max(nominal, 0.0))
        return math.exp(low - nominal), math.exp(high - nominal)

    # --- causes --------------------------------------------------------------------------------------

    def _causes(self) -> list[Callable[[ComparedStep, int], ExecutionGraph]]:
        hosts = {step.host for step in self._steps if step.host_factor > 1.0}
        sums: dict[str, float] = {}
        for step in self._steps:
            found = path_deviations(step.result.graph, step.result.path)
            learned = _learned(step)
            for family in found.above:
                size = learned.share(family) * max(found.above[family], found.below[family])
                sums[family] = max(sums.get(family, 0.0), size / step.result.prediction.iteration_seconds)
        ordered = sorted((family for family in sums if sums[family] > _NOTHING), key=lambda family: -sums[family])
        alone, rest = ordered[:_ALONE], ordered[_ALONE:]
        groups = [*([family] for family in alone), *([rest] if rest else [])]
        return [*map(_host_cause, hosts), *map(_family_cause, groups)]

    def _under(self, cause: Callable[[ComparedStep, int], ExecutionGraph]) -> tuple[list[float], list[float]]:
        """Return the logarithms of all step times with ``cause`` at its lower and at its upper end."""
        found = []
        for way in (-1, 1):
            graphs = [cause(step, way) for step in self._steps]
            found.append(
                [
                    nominal if graph is step.result.graph else math.log(_seconds(step, graph))
                    for step, graph, nominal in zip(self._steps, graphs, self._base, strict=True)
                ]
            )
        return found[0], found[1]


def _seconds(step: ComparedStep, graph: ExecutionGraph) -> float:
    """Simulate as ``step`` was simulated."""
    return simulated_seconds(graph, step.result.starts)


def _learned(step: ComparedStep) -> StepErrors:
    """Return the share of kernel errors that remains in ``step``."""
    if step.errors is None:
        return StepErrors()
    taken = path_deviations(step.result.graph, step.result.path).taken
    return step.errors.in_step(taken, step.result.prediction.iteration_seconds)


def _host_cause(host: Hashable) -> Callable[[ComparedStep, int], ExecutionGraph]:
    def graph(step: ComparedStep, way: int) -> ExecutionGraph:
        given = step.result.graph
        if step.host != host or step.host_factor <= 1.0:
            return given
        return with_host(given, step.host_factor**way)

    return graph


def _family_cause(families: Sequence[str]) -> Callable[[ComparedStep, int], ExecutionGraph]:
    def graph(step: ComparedStep, way: int) -> ExecutionGraph:
        learned = _learned(step)
        shares = {family: learned.share(family) for family in families}
        given = step.result.graph
        return replace(given, ranks=tuple(_with_kernels(rank, shares, way) for rank in given.ranks))

    return graph


def _with_kernels(rank: RankGraph, shares: Mapping[str, float], way: int) -> RankGraph:
    """Return ``rank`` with the kernels and collectives of the given families moved to one end of their interval.

    ``shares``: family -> share of the interval; ``way``: 1 for the upper end, -1 for the lower one.
    """
    runs: dict[int, float] = {}  # by tasks that share their kernels

    def moved(task: Task) -> Task:
        if task.duration is None or task.duration.seconds <= 0:
            return task
        if not task.kernels:
            share = shares.get(task_family(task))
            if share is None:
                return task
            return replace(task, duration=scaled(task.duration, _end(task.duration, share, way)))
        if id(task.kernels) not in runs:
            runs[id(task.kernels)] = _run_factor(task.kernels, shares, way)
        return replace(task, duration=scaled(task.duration, runs[id(task.kernels)]))

    return replace(rank, tasks=tuple(map(moved, rank.tasks)))


def _run_factor(kernels: Sequence[Kernel], shares: Mapping[str, float], way: int) -> float:
    whole = changed = 0.0
    for kernel in kernels:
        if kernel.duration is not None:
            share = shares.get(task_family(kernel))
            whole += kernel.duration.seconds
            changed += kernel.duration.seconds * (1.0 if share is None else _end(kernel.duration, share, way))
    return changed / whole if whole else 1.0


def _end(duration: Duration, share: float, way: int) -> float:
    """Return the end of ``share`` of the interval, relative to the duration."""
    if duration.seconds <= 0:
        return 1.0
    return 1.0 + share * ((duration.upper if way > 0 else duration.lower) / duration.seconds - 1.0)
