"""Builder of the arrays of a timeline from the lists that a simulation fills."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from e2e.simulate.device_streams import LAUNCHED
from e2e.simulate.host_threads import HostThreads, Thread
from e2e.simulate.instructions import AWAIT, RankProgram
from e2e.simulate.timeline import KINDS, Edge, RankLayout, Timeline
from e2e.step.arrays import Floats, Integers
from e2e.step.execution_graph import ExecutionGraph, RankGraph


def build_timeline(
    graph: ExecutionGraph, programs: Sequence[RankProgram], hosts: Sequence[HostThreads], iterations: int
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


def _layout(rank: RankGraph, program: RankProgram, offset: int) -> RankLayout:
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

    def add_rank(self, layout: RankLayout, program: RankProgram, host: HostThreads) -> None:
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

    def _tasks(self, layout: RankLayout, program: RankProgram, host: HostThreads) -> None:
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
        """Convert cause numbers of :mod:`e2e.simulate.device_streams` to nodes; undefined for ``LAUNCHED``."""
        causes = causes.astype(np.int64)
        by_task = causes >= 0
        tasks = self._task_node(layout, np.where(by_task, causes, 0)) if layout.tasks else causes
        return np.where(by_task, tasks, self._action_node(layout, np.where(by_task, 0, np.maximum(-2 - causes, 0))))
