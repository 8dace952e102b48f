"""Cost of each range named by the script on one rank: device, host and critical path."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from e2e.explain.breakdowns import device_seconds
from e2e.explain.critical_path import CriticalPath
from e2e.step.execution_graph import HostWork, Launch, RankGraph
from e2e.step.named_ranges import around, around_forward, names_around

_PASSES = ("forward", "backward")


@dataclass(frozen=True)
class RangeFigures:
    """Figures of all ranges called ``name`` within one step.

    Backward work also belongs to the ranges of its forward operators, and work inside several names to each of them:
    rows do not sum to the step. Device time counts regardless of overlap.
    """

    name: str
    # Number of times that the script entered the range.
    entered: int
    # Number of launched kernels, copies and fills.
    launches: int
    forward_seconds: float
    backward_seconds: float
    # Optimizer, data, or no pass.
    other_seconds: float
    host_seconds: float
    # Part of the critical path.
    path_seconds: float

    @property
    def device_seconds(self) -> float:
        """Device seconds of all passes."""
        return self.forward_seconds + self.backward_seconds + self.other_seconds


def range_figures(rank: RankGraph, path: CriticalPath) -> tuple[RangeFigures, ...]:
    """Figures of each name, most device time first; empty if the script names nothing.

    ``path``: path of the only rank, or that of this rank alone.
    """
    if not rank.ranges:
        return ()
    device: Mapping[tuple[int | None, str], float] = device_seconds(
        rank, lambda task, _: (task.call, _pass(rank, task.call))
    )
    passes: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    launches: Counter[str] = Counter()
    host: dict[str, float] = defaultdict(float)
    on_path: dict[str, float] = defaultdict(float)
    names = {call: tuple(names_around(rank.ranges, rank.calls, call)) for call in rank.calls}

    def named(call: int | None) -> tuple[str, ...]:
        return () if call is None else names.get(call, ())

    for (call, direction), seconds in device.items():
        for name in named(call):
            passes[name][direction] += seconds
    for task in rank.tasks:
        for each in task.kernels or (task,):
            launches.update(named(each.call))
    for call, seconds in _host_seconds(rank):
        for name in named(call):
            host[name] += seconds
    for segment in path.segments:
        if segment.rank == rank.rank:
            for name in named(segment.call):
                on_path[name] += segment.seconds
    entered = _entered(rank)
    figures = [
        RangeFigures(
            name, count, launches[name], passes[name]["forward"], passes[name]["backward"], passes[name]["other"],
            host[name], on_path[name],
        )
        for name, count in entered.items()
    ]  # fmt: skip
    return tuple(sorted(figures, key=lambda each: (-each.device_seconds, -each.host_seconds)))


def _entered(rank: RankGraph) -> Counter[str]:
    """Number of times that the script enters each name in this step; a recording may have more steps."""
    used: dict[int, str] = {}
    for call in rank.calls:
        for each in (*around(rank.ranges, rank.calls, call), *around_forward(rank.ranges, rank.calls, call)):
            used[each.id] = each.name
    return Counter(used.values())


def _pass(rank: RankGraph, call: int | None) -> str:
    info = None if call is None else rank.calls.get(call)
    return info.phase if info is not None and info.phase in _PASSES else "other"


def _host_seconds(rank: RankGraph) -> Iterator[tuple[int | None, float]]:
    for action in rank.actions():
        if isinstance(action, HostWork | Launch) and action.duration is not None:
            call = rank.tasks[action.task].call if isinstance(action, Launch) else action.call
            yield call, action.duration.seconds
