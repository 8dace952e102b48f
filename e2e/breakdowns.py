"""What device and host time consist of, without regard to what overlaps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

from e2e.graph import ExecutionGraph, HostWork, Launch, RankGraph, Task
from e2e.path_parts import task_family


def coverage_of(graph: ExecutionGraph) -> dict[str, float]:
    """Share of the device time of all ranks by source of its price."""
    total: dict[str, float] = defaultdict(float)
    for rank in graph.ranks:
        for task in rank.tasks:
            if task.duration is not None:
                total[task.duration.source] += task.duration.seconds * graph.multiplicity.get(rank.rank, 1)
    whole = sum(total.values())
    return {source: value / whole for source, value in total.items()} if whole else {}


def breakdown_of(rank: RankGraph) -> dict[str, dict[str, float]]:
    """Device time by operator, by what limits it, and by kind of kernel."""
    return {
        "by_operator": _device_time(rank, lambda task: _operator(rank, task)),
        "by_bound": _device_time(rank, lambda task: (task.duration.bound if task.duration else "") or task.kind),
        "by_kind": _device_time(rank, task_family),
    }


def overheads_of(rank: RankGraph) -> dict[str, float]:
    """Host time by kind of overhead, T1 to T5."""
    sums: dict[str, float] = defaultdict(float)
    for action in rank.actions():
        if isinstance(action, HostWork | Launch) and action.duration is not None:
            sums["T4" if isinstance(action, Launch) else action.kind] += action.duration.seconds
    return dict(sorted(sums.items()))


def _device_time(rank: RankGraph, key: Callable[[Task], str]) -> dict[str, float]:
    sums: dict[str, float] = defaultdict(float)
    for task in rank.tasks:
        if task.duration is not None:
            sums[key(task)] += task.duration.seconds
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def _operator(rank: RankGraph, task: Task) -> str:
    return task.name if task.call is None or task.call not in rank.calls else rank.calls[task.call].name
