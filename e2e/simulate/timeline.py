"""When every action and task of a simulated graph happened, and what determined that moment.

Actions and tasks are *nodes*. Rank by rank and iteration by iteration, first the actions (thread by thread, in program
order), then the tasks (by id) are numbered through; all arrays of a :class:`Timeline` are indexed by that number.
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
    """Why a node could not go on before another one's end."""

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
    """Where a rank's nodes are. ``threads``: name -> (first action, count); ``streams``, ``kinds`` (places in
    :data:`KINDS`): of every task.
    """

    rank: int
    offset: int
    threads: Mapping[str, tuple[int, int]]
    actions: int
    streams: Integers
    kinds: NDArray[np.uint8]

    @property
    def tasks(self) -> int:
        """How many tasks one iteration has."""
        return len(self.streams)

    @property
    def nodes(self) -> int:
        """How many nodes one iteration of the rank has: actions of the host and tasks of its streams."""
        return self.actions + self.tasks


@dataclass(frozen=True, slots=True)
class Span:
    """One node. It waits from ``start`` to ``ready`` and works until ``end``.

    ``start_cause`` is the node whose end was its start (``None``: the beginning), ``ready_cause`` the one whose end
    ended its wait: for a synchronising call, an await or a collective. Without a wait the two are the same.
    """

    start: float
    ready: float
    end: float
    start_cause: int | None
    start_edge: Edge
    ready_cause: int | None
    ready_edge: Edge


@dataclass(frozen=True, slots=True)
class TaskPlace:
    """What a node is: an action (``thread`` and place in it) or a task of a rank (by position in the graph)."""

    position: int
    iteration: int
    action: int | None
    task: int | None


@dataclass(frozen=True, slots=True)
class RankActivity:
    """Seconds of one rank within a window; every figure is a union over its streams.

    ``active``: some task is on the device, waiting collectives included; ``idle``: none, so the host is what the
    device waits for. ``compute``: kernels; ``communication``: collectives, of which ``exposed_communication`` while no
    kernel runs and ``collective_wait`` before the transfer begins. ``exposed_transfer``: of what is exposed, some
    transfer is under way.
    """

    window: float
    active: float
    idle: float
    compute: float
    communication: float
    exposed_communication: float
    collective_wait: float
    exposed_transfer: float


@dataclass(frozen=True, eq=False)
class Timeline:
    """Seconds from the start of the first iteration. A cause of -1 is the beginning; edges are :class:`Edge`."""

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
        """From the start to the end of the last node, over all iterations."""
        return float(self.end.max(initial=0.0))

    @cached_property
    def iteration_ends(self) -> tuple[float, ...]:
        """When all of the iterations up to each one had ended."""
        # Every node ends later than in the iteration before: it follows that one on its thread or stream.
        return tuple(
            max(float(self._rank(layout, self.end)[iteration].max(initial=0.0)) for layout in self.layouts)
            for iteration in range(self.iterations)
        )

    @property
    def iteration_seconds(self) -> tuple[float, ...]:
        """Seconds that each iteration added to the end of the one before, in order."""
        return tuple(np.diff(self.iteration_ends, prepend=0.0).tolist())

    def window(self, iteration: int) -> TimeWindow:
        """Seconds at which ``iteration`` begins, where the one before ends, and at which it ends."""
        return (self.iteration_ends[iteration - 1] if iteration else 0.0, self.iteration_ends[iteration])

    def task(self, rank: int, task: int, iteration: int = 0) -> Span:
        """Times of a task by its id."""
        layout = self._layout(rank)
        return self.span(layout.offset + iteration * layout.nodes + layout.actions + task)

    def action(self, rank: int, thread: str, place: int, iteration: int = 0) -> Span:
        """Times of an action by its place on its thread."""
        layout = self._layout(rank)
        return self.span(layout.offset + iteration * layout.nodes + layout.threads[thread][0] + place)

    def span(self, node: int) -> Span:
        """Times of a node by its number."""

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
        """Which action or task of which rank and iteration ``node`` is."""
        position, local = self.locate(node)
        layout = self.layouts[position]
        iteration = (node - layout.offset) // layout.nodes
        if local < layout.actions:
            return TaskPlace(position, iteration, local, None)
        return TaskPlace(position, iteration, None, local - layout.actions)

    def locate(self, node: int) -> tuple[int, int]:
        """Position of the node's rank in the graph, and its place among the actions and tasks of that rank."""
        position = bisect_right(self._offsets, node) - 1
        layout = self.layouts[position]
        return position, (node - layout.offset) % layout.nodes

    @cached_property
    def _offsets(self) -> list[int]:
        return [layout.offset for layout in self.layouts]

    def activity(self, rank: int, window: TimeWindow | None = None) -> RankActivity:
        """Device time of a rank within ``window`` (default: from the start to the end of the whole)."""
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
            exposed_transfer=max(moving - busy, 0.0),  # of sums: rounding may leave less than nothing
        )

    def task_times(self, rank: int) -> tuple[Floats, Floats]:
        """When the tasks of ``rank`` began to work and ended: (iterations, tasks) each."""
        layout = self._layout(rank)
        return self._rank(layout, self.ready)[:, layout.actions :], self._rank(layout, self.end)[:, layout.actions :]

    def rank_ends(self, rank: int) -> tuple[float, ...]:
        """When ``rank`` had ended each iteration; others may be earlier or later."""
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
        """A rank's part of ``values``: (iterations, nodes of one iteration)."""
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
