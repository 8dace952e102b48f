"""Composition of device time and host time, regardless of overlap.

A task that represents several kernels counts as these kernels.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import TypeVar

from e2e.explain.path_parts import task_family
from e2e.step.execution_graph import Duration, ExecutionGraph, HostWork, Kernel, Launch, RankGraph, Task
from e2e.step.marked_ranges import MARKED

KeyT = TypeVar("KeyT", bound=Hashable)


def coverage_of(graph: ExecutionGraph) -> dict[str, float]:
    """Share of the device time of all ranks by source of its price."""
    total: dict[str, float] = defaultdict(float)
    for rank in graph.ranks:
        for _, duration, seconds in _kernels(rank.tasks):
            total[duration.source] += seconds * graph.multiplicity.get(rank.rank, 1)
    whole = sum(total.values())
    return {source: value / whole for source, value in total.items()} if whole else {}


def breakdown_of(rank: RankGraph) -> dict[str, dict[str, float]]:
    """Device time in seconds by operator, by limiting resource, and by kind of kernel."""
    return {
        "by_operator": device_seconds(rank, lambda task, _: _operator(rank, task)),
        "by_bound": device_seconds(rank, lambda task, duration: duration.bound or task.kind),
        "by_kind": device_seconds(rank, lambda task, _: task_family(task)),
    }


def overheads_of(rank: RankGraph) -> dict[str, float]:
    """Host time in seconds by kind of overhead, T1 to T5."""
    sums: dict[str, float] = defaultdict(float)
    for action in rank.actions():
        if isinstance(action, HostWork | Launch) and action.duration is not None:
            sums["T4" if isinstance(action, Launch) else action.kind] += action.duration.seconds
    return dict(sorted(sums.items()))


def kernel_count(rank: RankGraph) -> int:
    """Number of kernels, copies and fills that the rank launches in one iteration."""
    return sum(len(task.kernels) or 1 for task in rank.tasks)


def operator_count(rank: RankGraph) -> int:
    """Number of operators that the host calls in one iteration, nested ones included."""
    if rank.operator_calls is not None:
        return rank.operator_calls
    return sum(info.name not in MARKED for info in rank.calls.values())


def device_seconds(rank: RankGraph, key: Callable[[Task | Kernel, Duration], KeyT]) -> dict[KeyT, float]:
    """Sum the device time of every kernel by ``key``, in descending order."""
    sums: dict[KeyT, float] = defaultdict(float)
    for task, duration, seconds in _kernels(rank.tasks):
        sums[key(task, duration)] += seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _kernels(tasks: Iterable[Task]) -> Iterator[tuple[Task | Kernel, Duration, float]]:
    """Iterate over priced kernels and their seconds. Tasks may share kernels, which then come once, with the sum."""
    runs: dict[int, tuple[tuple[Kernel, ...], float]] = {}
    for task in tasks:
        if task.duration is not None and task.kernels:
            before = runs.get(id(task.kernels), ((), 0.0))[1]
            runs[id(task.kernels)] = task.kernels, before + task.duration.seconds
        elif task.duration is not None:
            yield task, task.duration, task.duration.seconds
    for kernels, seconds in runs.values():
        # Kernels are priced for a nominal GPU; their tasks may belong to a slower one.
        times = seconds / (sum(each.duration.seconds for each in kernels if each.duration is not None) or 1.0)
        for kernel in kernels:
            if kernel.duration is not None:
                yield kernel, kernel.duration, kernel.duration.seconds * times


def _operator(rank: RankGraph, task: Task | Kernel) -> str:
    return task.name if task.call is None or task.call not in rank.calls else rank.calls[task.call].name
