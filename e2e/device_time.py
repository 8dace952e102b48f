"""What the device time of priced ranks consists of: by operator, by limit, by kind of kernel, by source of its price.

A task that stands for several kernels counts as these.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator

from e2e.graph import Duration, ExecutionGraph, Kernel, RankGraph, Task

Launched = Task | Kernel


def task_family(task: Launched) -> str:
    """The type of a task's first record, or its kind: kernels of one family err alike."""
    if task.operators:
        return type(task.operators[0]).__name__
    collective = task.collective if isinstance(task, Task) else None
    return collective.kind if collective is not None else task.kind


def breakdown_of(rank: RankGraph) -> dict[str, dict[str, float]]:
    """Device time by operator, by what limits it, and by kind of kernel."""
    return {
        "by_operator": _device_time(rank, lambda task, _: _operator(rank, task)),
        "by_bound": _device_time(rank, lambda task, duration: duration.bound or task.kind),
        "by_kind": _device_time(rank, lambda task, _: task_family(task)),
    }


def coverage_of(graph: ExecutionGraph) -> dict[str, float]:
    """Share of the device time of all ranks by source of its price."""
    sums: dict[str, float] = defaultdict(float)
    for rank in graph.ranks:
        for _, duration, seconds in _kernels(rank.tasks):
            sums[duration.source] += seconds * graph.multiplicity.get(rank.rank, 1)
    whole = sum(sums.values())
    return {source: value / whole for source, value in sums.items()} if whole else {}


def kernel_count(rank: RankGraph) -> int:
    """Launches of the device's work."""
    return sum(len(task.kernels) or 1 for task in rank.tasks)


class Deviations:
    """By how much the families of kernels may be faster (``below``) and slower (``above``), in seconds.

    Kernels of one family err alike, families independently.
    """

    def __init__(self) -> None:
        self.below: dict[str, float] = defaultdict(float)
        self.above: dict[str, float] = defaultdict(float)
        self._runs: dict[int, dict[str, tuple[float, float]]] = {}

    def add(self, task: Task, share: float) -> None:
        """``share`` of the time of ``task``."""
        if task.duration is None:
            return
        if not task.kernels:
            self._add(task_family(task), *_deviation(task.duration), share)
            return
        if id(task.kernels) not in self._runs:
            self._runs[id(task.kernels)] = _relative_deviations(task.kernels)
        for family, deviation in self._runs[id(task.kernels)].items():
            self._add(family, *deviation, share * task.duration.seconds)

    def _add(self, family: str, below: float, above: float, share: float) -> None:
        self.below[family] += share * below
        self.above[family] += share * above


def _deviation(duration: Duration) -> tuple[float, float]:
    return duration.seconds - duration.lower, duration.upper - duration.seconds


def _relative_deviations(kernels: Iterable[Kernel]) -> dict[str, tuple[float, float]]:
    """Of each family, as shares of what all ``kernels`` take."""
    priced = [(task_family(each), each.duration) for each in kernels if each.duration is not None]
    whole = sum(duration.seconds for _, duration in priced) or 1.0
    sums: dict[str, tuple[float, float]] = {}
    for family, duration in priced:
        known, added = sums.get(family, (0.0, 0.0)), _deviation(duration)
        sums[family] = known[0] + added[0] / whole, known[1] + added[1] / whole
    return sums


def _kernels(tasks: Iterable[Task]) -> Iterator[tuple[Launched, Duration, float]]:
    """Every priced kernel and its seconds. Tasks that repeat share their kernels: these come once, with the sum."""
    runs: dict[int, tuple[tuple[Kernel, ...], float]] = {}
    for task in tasks:
        if task.duration is not None and task.kernels:
            before = runs.get(id(task.kernels), ((), 0.0))[1]
            runs[id(task.kernels)] = task.kernels, before + task.duration.seconds
        elif task.duration is not None:
            yield task, task.duration, task.duration.seconds
    for kernels, seconds in runs.values():
        # The kernels have the prices of a GPU like all others; the tasks may be of a slower one.
        times = seconds / (sum(each.duration.seconds for each in kernels if each.duration is not None) or 1.0)
        for kernel in kernels:
            if kernel.duration is not None:
                yield kernel, kernel.duration, kernel.duration.seconds * times


def _device_time(rank: RankGraph, key: Callable[[Launched, Duration], str]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for task, duration, seconds in _kernels(rank.tasks):
        sums[key(task, duration)] += seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _operator(rank: RankGraph, task: Launched) -> str:
    return task.name if task.call is None or task.call not in rank.calls else rank.calls[task.call].name
