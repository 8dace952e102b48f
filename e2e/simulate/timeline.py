"""Times of every action and task of a simulated graph, and the causes of these times.

Actions and tasks are *nodes*. They are numbered rank by rank and iteration by iteration, first the actions (thread by
thread, in program order), then the tasks (by id); all arrays of a :class:`Timeline` are indexed by that number.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from e2e.step.arrays import Floats, Integers
from e2e.step.execution_graph import TaskKind

TimeWindow = tuple[float, float]

KINDS: tuple[TaskKind, ...] = ("kernel", "copy", "memset", "collective", "graph")
_COMPUTE = (KINDS.index("kernel"), KINDS.index("graph"))
_COMMUNICATION = KINDS.index("collective")


class Edge(IntEnum):
    """Reason why a node could not start, or could not go on, before the end of another node."""

    NONE = 0
    PROGRAM_ORDER = 1
    LAUNCH = 2
    STREAM_ORDER = 3
    EVENT = 4
    SYNCHRONISATION = 5
    RENDEZVOUS = 6
    FLAG = 7


@dataclass(frozen=True, eq=False)
class RankLayout:
    """Node numbers and task attributes of one rank."""

    rank: int
    offset: int
    # Name -> (first action, count).
    threads: Mapping[str, tuple[int, int]]
    actions: int
    # Stream of every task.
    streams: Integers
    # Kind of every task, as index into `KINDS`.
    kinds: NDArray[np.uint8]

    @property
    def tasks(self) -> int:
        """Number of tasks of one iteration."""
        return len(self.streams)

    @property
    def nodes(self) -> int:
        """Number of nodes of one iteration of the rank: host actions and tasks of its streams."""
        return self.actions + self.tasks


@dataclass(frozen=True, slots=True)
class Span:
    """Times of one node. It waits from ``start`` to ``ready`` and works until ``end``.

    Only synchronising calls, awaits and collectives wait; for other nodes both causes are the same.
    """

    start: float
    ready: float
    end: float
    # Node whose end was this one's start; `None`: start of the simulation.
    start_cause: int | None
    start_edge: Edge
    # Node whose end ended the wait.
    ready_cause: int | None
    ready_edge: Edge


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """Identity of a node: an action of a rank or a task of a rank; the other one is ``None``."""

    # Position of the rank in the graph.
    position: int
    iteration: int
    action: int | None
    task: int | None


@dataclass(frozen=True, slots=True)
class RankActivity:
    """Seconds of one rank within a window; every figure is a union over its streams."""

    window: float
    # Some task is on the device, waiting collectives included.
    active: float
    # No task is on the device, which waits for the host.
    idle: float
    # Some kernel runs.
    compute: float
    # Some collective is on a stream.
    communication: float
    # Some collective is on a stream and no kernel runs.
    exposed_communication: float
    # Some collective waits for its transfer to begin.
    collective_wait: float
    # Some transfer is under way and no kernel runs.
    exposed_transfer: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """Times in seconds from the start of the first iteration, by node. A cause of -1 is the start of the simulation."""

    layouts: tuple[RankLayout, ...]
    iterations: int
    start: Floats
    ready: Floats
    end: Floats
    start_cause: Integers
    start_edge: NDArray[np.uint8]
    ready_cause: Integers
    ready_edge: NDArray[np.uint8]

    @property
    def step_seconds(self) -> float:
        """Seconds from zero to the end of the last node, over all iterations."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def iteration_ends(self) -> tuple[float, ...]:
        """End of each iteration: the time at which it and all before it had ended."""
        # Every node ends later than in the previous iteration, which precedes it on its thread or stream.
        return tuple(
            max(float(self._rank(layout, self.end)[iteration].max(initial=0.0)) for layout in self.layouts)
            for iteration in range(self.iterations)
        )

    @property
    def iteration_seconds(self) -> tuple[float, ...]:
        """Seconds by which each iteration ended after the previous one, in order."""
        return tuple(np.diff(self.iteration_ends, prepend=0.0).tolist())

    def window(self, iteration: int) -> TimeWindow:
        """Begin of ``iteration`` (the end of the previous one) and its end, in seconds."""
        return (self.iteration_ends[iteration - 1] if iteration else 0.0, self.iteration_ends[iteration])

    def task(self, rank: int, task: int, iteration: int = 0) -> Span:
        """Return the times of a task by its id."""
        layout = self._layout(rank)
        return self.span(layout.offset + iteration * layout.nodes + layout.actions + task)

    def action(self, rank: int, thread: str, place: int, iteration: int = 0) -> Span:
        """Return the times of an action by its place on its thread."""
        layout = self._layout(rank)
        return self.span(layout.offset + iteration * layout.nodes + layout.threads[thread][0] + place)

    def span(self, node: int) -> Span:
        """Return the times of a node by its number."""

        def cause(of: Integers) -> int | None:
            return None if of[node] < 0 else int(of[node])

        return Span(
            start=float(self.start[node]),
            ready=float(self.ready[node]),
            end=float(self.end[node]),
            start_cause=cause(self.start_cause),
            start_edge=Edge(self.start_edge[node]),
            ready_cause=cause(self.ready_cause),
            ready_edge=Edge(self.ready_edge[node]),
        )

    def place(self, node: int) -> TaskPlace:
        """Return which action or task of which rank and iteration ``node`` is."""
        position, local = self.locate(node)
        layout = self.layouts[position]
        iteration = (node - layout.offset) // layout.nodes
        if local < layout.actions:
            return TaskPlace(position, iteration, local, None)
        return TaskPlace(position, iteration, None, local - layout.actions)

    def locate(self, node: int) -> tuple[int, int]:
        """Return the position of the node's rank in the graph, and the node's index within one iteration."""
        position = bisect_right(self._offsets, node) - 1
        layout = self.layouts[position]
        return position, (node - layout.offset) % layout.nodes

    @cached_property
    def _offsets(self) -> list[int]:
        return [layout.offset for layout in self.layouts]

    def activity(self, rank: int, window: TimeWindow | None = None) -> RankActivity:
        """Return the activity of a rank within ``window`` (default: the whole timeline)."""
        low, high = window or (0.0, self.step_seconds)
        layout = self._layout(rank)
        start, ready, end = (
            np.clip(self._rank(layout, of)[:, layout.actions :].ravel(), low, high)
            for of in (self.start, self.ready, self.end)
        )
        kinds = np.tile(layout.kinds, self.iterations)
        compute, communication = np.isin(kinds, _COMPUTE), kinds == _COMMUNICATION
        active = covered(start, end)
        busy = covered(start[compute], end[compute])
        both = compute | communication
        moving = covered(
            np.concatenate((start[compute], ready[communication])), np.concatenate((end[compute], end[communication]))
        )
        return RankActivity(
            window=high - low,
            active=active,
            idle=high - low - active,
            compute=busy,
            communication=covered(start[communication], end[communication]),
            exposed_communication=covered(start[both], end[both]) - busy,
            collective_wait=covered(start[communication], ready[communication]),
            exposed_transfer=max(moving - busy, 0.0),  # difference of sums: rounding may make it negative
        )

    def task_times(self, rank: int) -> tuple[Floats, Floats]:
        """Start of work and end of the tasks of ``rank``, arrays of shape (iterations, tasks)."""
        layout = self._layout(rank)
        return self._rank(layout, self.ready)[:, layout.actions :], self._rank(layout, self.end)[:, layout.actions :]

    def rank_ends(self, rank: int) -> tuple[float, ...]:
        """End time of each iteration on ``rank`` alone."""
        return tuple(float(ends.max(initial=0.0)) for ends in self._rank(self._layout(rank), self.end))

    def _layout(self, rank: int) -> RankLayout:
        layout = self._by_rank.get(rank)
        if layout is None:
            raise KeyError(f"no rank {rank}; the timeline has {list(self._by_rank)}")
        return layout

    @cached_property
    def _by_rank(self) -> dict[int, RankLayout]:
        return {layout.rank: layout for layout in self.layouts}

    def _rank(self, layout: RankLayout, values: NDArray[Any]) -> NDArray[Any]:
        """View of a rank's part of ``values``, shape (iterations, nodes of one iteration)."""
        part = values[layout.offset : layout.offset + self.iterations * layout.nodes]
        return part.reshape(self.iterations, layout.nodes)


def covered(start: Floats, end: Floats) -> float:
    """Length of the union of intervals."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    before = np.maximum.accumulate(np.concatenate(([start[0]], end[:-1])))
    return float(np.maximum(end - np.maximum(start, before), 0.0).sum())
