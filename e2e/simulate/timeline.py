"""Times of every action and task of a simulated graph, and the causes of these times.

Actions and tasks are *nodes*. They are numbered rank by rank and iteration by iteration, first the actions (thread by
thread, in program order), then the tasks (by id); all arrays of a :class:`Timeline` are indexed by that number.
:func:`build_timeline` fills them from the lists of a simulation.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from e2e.simulate.instructions import AWAIT, CompiledRank
from e2e.simulate.simulated_rank import LAUNCHED, HostThreads, Thread
from e2e.step.arrays import Floats, Integers
from e2e.step.execution_graph import ExecutionGraph, RankGraph, TaskKind

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
        active = union_seconds(start, end)
        busy = union_seconds(start[compute], end[compute])
        moving = union_seconds(
            np.concatenate((start[compute], ready[communication])), np.concatenate((end[compute], end[communication]))
        )
        return RankActivity(
            window=high - low,
            active=active,
            idle=high - low - active,
            compute=busy,
            communication=union_seconds(start[communication], end[communication]),
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


def union_seconds(start: Floats, end: Floats) -> float:
    """Length of the union of intervals."""
    if not len(start):
        return 0.0
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    before = np.maximum.accumulate(np.concatenate(([start[0]], end[:-1])))
    return float(np.maximum(end - np.maximum(start, before), 0.0).sum())


def build_timeline(
    graph: ExecutionGraph, programs: Sequence[CompiledRank], hosts: Sequence[HostThreads], iterations: int
) -> Timeline:
    """Build the timeline of a simulation that has ended."""
    layouts: list[RankLayout] = []
    offset = 0
    for rank, program in zip(graph.ranks, programs, strict=True):
        layouts.append(_layout(rank, program, offset))
        offset += iterations * program.nodes
    builder = _Builder(tuple(layouts), iterations, offset)
    for layout, program, host in zip(layouts, programs, hosts, strict=True):
        builder.add_rank(layout, program, host)
    return builder.timeline


def _layout(rank: RankGraph, program: CompiledRank, offset: int) -> RankLayout:
    kinds = ["collective" if task.collective is not None else task.kind for task in rank.tasks]
    return RankLayout(
        rank=program.rank,
        offset=offset,
        threads={thread.name: (thread.first, len(thread.code)) for thread in program.threads},
        actions=program.actions,
        streams=np.array([task.stream for task in rank.tasks], dtype=np.int64),
        kinds=np.array([KINDS.index(kind) for kind in kinds], dtype=np.uint8),
    )


class _Builder:
    def __init__(self, layouts: tuple[RankLayout, ...], iterations: int, nodes: int) -> None:
        self.timeline = Timeline(
            layouts=layouts,
            iterations=iterations,
            start=np.full(nodes, np.nan),
            ready=np.full(nodes, np.nan),
            end=np.full(nodes, np.nan),
            start_cause=np.full(nodes, -1),
            start_edge=np.zeros(nodes, dtype=np.uint8),
            ready_cause=np.full(nodes, -1),
            ready_edge=np.zeros(nodes, dtype=np.uint8),
        )

    def add_rank(self, layout: RankLayout, program: CompiledRank, host: HostThreads) -> None:
        for thread in host.threads:
            if thread.ends:
                self._thread(layout, thread)
        if layout.tasks:
            self._tasks(layout, program, host)
        part = slice(layout.offset, layout.offset + self.timeline.iterations * layout.nodes)
        timeline = self.timeline
        # Invariant: every launched task has ended.
        assert not np.isnan(timeline.end[part]).any()
        for to, of in ((timeline.ready_cause, timeline.start_cause), (timeline.ready_edge, timeline.start_edge)):
            to[part] = of[part]
        for thread in host.threads:
            self._waits(layout, thread)
        self._transfers(layout, host)

    def _thread(self, layout: RankLayout, thread: Thread) -> None:
        """Set the times of a thread's actions: each begins when the previous one ends."""
        nodes = self._action_nodes(layout, thread)
        ends = np.array(thread.ends)
        timeline = self.timeline
        timeline.end[nodes] = ends
        timeline.start[nodes[1:]] = ends[:-1]
        timeline.start[nodes[0]] = thread.start
        timeline.ready[nodes] = timeline.start[nodes]
        timeline.start_cause[nodes[1:]] = nodes[:-1]
        timeline.start_edge[nodes[1:]] = Edge.PROGRAM_ORDER

    def _tasks(self, layout: RankLayout, program: CompiledRank, host: HostThreads) -> None:
        tasks = np.arange(layout.tasks * self.timeline.iterations)
        nodes = self._task_node(layout, tasks)
        causes = np.array(host.streams.causes)
        launches = self._action_node(layout, np.array(program.launches)[tasks % layout.tasks]) + (
            tasks // layout.tasks * layout.nodes
        )
        launched, by_task = causes == LAUNCHED, causes >= 0
        before = np.where(by_task, causes, 0)
        same_stream = layout.streams[before % layout.tasks] == layout.streams[tasks % layout.tasks]
        timeline = self.timeline
        timeline.start[nodes] = timeline.ready[nodes] = host.streams.starts
        timeline.end[nodes] = host.streams.ends
        timeline.start_cause[nodes] = np.where(launched, launches, self._cause_node(layout, causes))
        after = np.where(by_task & same_stream, Edge.STREAM_ORDER, Edge.EVENT)
        timeline.start_edge[nodes] = np.where(launched, Edge.LAUNCH, after)

    def _waits(self, layout: RankLayout, thread: Thread) -> None:
        """Set end and cause of the waits of synchronising calls and awaits."""
        if not thread.waits:
            return
        actions, ready, causes = (np.array(column) for column in zip(*thread.waits, strict=True))
        nodes = self._action_node(layout, actions)
        operations = np.array([instruction[0] for instruction in thread.program.code])
        awaits = operations[actions % layout.actions - thread.program.first] == AWAIT
        timeline = self.timeline
        timeline.ready[nodes] = ready
        timeline.ready_cause[nodes] = self._cause_node(layout, causes)
        timeline.ready_edge[nodes] = np.where(awaits, Edge.FLAG, Edge.SYNCHRONISATION)

    def _transfers(self, layout: RankLayout, host: HostThreads) -> None:
        """Set the waits of collectives: every rank waited for the last one to arrive."""
        timeline = self.timeline
        for task, ready, position, last in host.streams.transfers:
            node = int(self._task_node(layout, task))
            timeline.ready[node] = ready
            if ready > timeline.start[node]:
                timeline.ready_cause[node] = self._task_node(timeline.layouts[position], last)
                timeline.ready_edge[node] = Edge.RENDEZVOUS

    def _action_nodes(self, layout: RankLayout, thread: Thread) -> Integers:
        rounds = np.arange(self.timeline.iterations) * layout.nodes
        places = layout.offset + thread.program.first + np.arange(len(thread.program.code))
        return (rounds[:, None] + places).ravel()

    @staticmethod
    def _task_node(layout: RankLayout, task: Integers | int) -> Integers:
        """Return the node of a task numbered through all iterations."""
        return np.asarray(layout.offset + task // layout.tasks * layout.nodes + layout.actions + task % layout.tasks)

    @staticmethod
    def _action_node(layout: RankLayout, action: Integers | int) -> Integers:
        return np.asarray(layout.offset + action // layout.actions * layout.nodes + action % layout.actions)

    def _cause_node(self, layout: RankLayout, causes: Floats | Integers) -> Integers:
        """Convert cause numbers of :mod:`e2e.simulate.simulated_rank` to nodes; undefined for ``LAUNCHED``."""
        causes = causes.astype(np.int64)
        by_task = causes >= 0
        tasks = self._task_node(layout, np.where(by_task, causes, 0)) if layout.tasks else causes
        return np.where(by_task, tasks, self._action_node(layout, np.where(by_task, 0, np.maximum(-2 - causes, 0))))
