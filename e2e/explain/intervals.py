"""Interval of a step time from the intervals of its parts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping

from e2e.explain.critical_path import CriticalPath, task_family
from e2e.price.speed_band import StepErrors
from e2e.step.execution_graph import Duration, ExecutionGraph, Kernel, Task


def step_interval(
    graph: ExecutionGraph,
    path: CriticalPath,
    seconds: float,
    host_factor: float = 1.0,
    errors: StepErrors | None = None,
) -> tuple[float, float]:
    """Return the lower and upper bound of a step of ``seconds``, from what is on its critical path.

    Errors within one family of kernels and collectives are fully correlated, those of different families independent;
    so is the error of the host, whose times may be ``host_factor`` times shorter or longer. Errors off the path do not
    count. ``errors``: error figures learned from measured whole steps of this kind.
    """
    host_seconds = path.host_bound_fraction * path.seconds
    return path_deviations(graph, path).around(seconds, host_seconds, host_factor, errors)


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
    """Possible deviations of each family of kernels, in seconds.

    Errors within one family of kernels and collectives are fully correlated, those of different families independent.
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

    def around(
        self, seconds: float, host_seconds: float, host_factor: float, errors: StepErrors | None = None
    ) -> tuple[float, float]:
        """Lower and upper bound of a step of ``seconds`` with ``host_seconds`` on the host.

        Host times may be ``host_factor`` times shorter or longer. ``errors``: share of the kernels' errors that remains
        in such a step, and its residual error (``None``: all of them, and no residual).
        """
        learned = StepErrors() if errors is None else errors.in_step(self.taken, seconds)
        below = [learned.share(family) * each for family, each in self.below.items()]
        above = [learned.share(family) * each for family, each in self.above.items()]
        down = math.hypot(host_seconds * (1 - 1 / host_factor), -seconds * math.expm1(-learned.residual), *below)
        up = math.hypot(host_seconds * (host_factor - 1), seconds * math.expm1(learned.residual), *above)
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
