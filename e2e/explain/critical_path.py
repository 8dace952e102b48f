"""Critical path of a simulated step: the chain of actions and tasks each of which had to wait for the previous one.

From the end of the step back to its start, every node points to the node whose end let it go on, so the chain has no
gaps and its pieces sum to the step time. Across ranks it follows the last rank to arrive at each collective; restricted
to one rank, the time spent there is ``collective wait``, or ``bubble`` where the rank waits for the other end of a
pipeline's send or receive. :func:`path_parts` is its summary; :func:`task_family` names the families of tasks whose
errors are correlated.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np

from costmodel.base.errors import SimulationError
from e2e.price.speed_band import StepErrors
from e2e.simulate.instructions import action_label
from e2e.simulate.timeline import Edge, Timeline, TimeWindow
from e2e.step.collective_names import POINT_TO_POINT
from e2e.step.execution_graph import (
    UNKNOWN_PRODUCT,
    Action,
    ExecutionGraph,
    HostWork,
    Kernel,
    Launch,
    RankGraph,
    Synchronize,
    Task,
)

SegmentKind = Literal[
    "compute", "memory", "kernel", "copy", "collective transfer", "collective wait", "bubble",
    "T1", "T2", "T3", "T4", "T5", "host", "synchronisation", "idle", "late start",
]  # fmt: skip
PathKey = TypeVar("PathKey", str, int)
_EDGES = tuple(Edge)
HOST_KINDS: tuple[SegmentKind, ...] = ("T1", "T2", "T3", "T4", "T5", "host", "synchronisation")


@dataclass(frozen=True, slots=True)
class Segment:
    """Piece of the path, in seconds from the start of the simulation."""

    # `compute` and `memory` are kernels by limiting resource, `kernel` those of unknown limit; `T4` is the launch call,
    # `synchronisation` the cost of such a call after its wait; `idle` only ends the path of a rank that finishes before
    # the others, `late start` only begins that of a rank that starts after zero.
    kind: SegmentKind
    start: float
    seconds: float
    rank: int
    # The task, or the host's work.
    name: str
    # Operator call that issued it.
    operator: str
    # Reason why it did not begin earlier.
    edge: Edge
    waits_for: str
    # Task id, for device work.
    task: int | None = None
    # Number of the operator call that issued it.
    call: int | None = None


@dataclass(frozen=True)
class CriticalPath:
    """Segments in order of time that cover ``window`` without gaps."""

    segments: tuple[Segment, ...]
    window: TimeWindow

    @property
    def seconds(self) -> float:
        """Sum of the segments: the length of the window."""
        return math.fsum(segment.seconds for segment in self.segments)

    @property
    def by_kind(self) -> Mapping[str, float]:
        """Seconds per kind, in descending order."""
        return self._sum(lambda segment: segment.kind)

    @property
    def by_rank(self) -> Mapping[int, float]:
        """Seconds of the path on each rank, in descending order."""
        return self._sum(lambda segment: segment.rank)

    @property
    def host_bound_fraction(self) -> float:
        """Share of the path on the host: a lower bound of what an infinitely fast device would leave of it."""
        host = math.fsum(segment.seconds for segment in self.segments if segment.kind in HOST_KINDS)
        return host / self.seconds if self.seconds else 0.0

    def _sum(self, key: Callable[[Segment], PathKey]) -> dict[PathKey, float]:
        parts: dict[PathKey, list[float]] = {}
        for segment in self.segments:
            parts.setdefault(key(segment), []).append(segment.seconds)
        sums = {name: math.fsum(values) for name, values in parts.items()}
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def critical_path(
    graph: ExecutionGraph, timeline: Timeline, *, iteration: int | None = None, rank: int | None = None
) -> CriticalPath:
    """Return the critical path of the whole timeline, or of the window of one ``iteration``.

    With ``rank`` it stays on that rank: waiting for others in collectives is then a segment of its own, and a rank that
    ran ahead of the others is seen at work on its next iteration.
    """
    window = (0.0, timeline.step_seconds) if iteration is None else timeline.window(iteration)
    last = timeline.iterations if iteration is None or rank is not None else iteration + 1
    return _Walk(graph, timeline, window, rank).path(last)


class _Walk:
    def __init__(self, graph: ExecutionGraph, timeline: Timeline, window: TimeWindow, rank: int | None) -> None:
        self._graph, self._timeline = graph, timeline
        self._low, self._high = window
        self._rank = rank
        # Action or task of every node of an iteration, in the order of the timeline.
        self._items: list[tuple[Action | Task, ...]] = [(*entry.actions(), *entry.tasks) for entry in graph.ranks]
        self._segments: list[Segment] = []

    def path(self, iterations: int) -> CriticalPath:
        """Return the path from the last node of the first ``iterations`` back to the start of the window."""
        last = self._last_node(iterations)
        end = float(self._timeline.end[last])
        if end < self._high:
            number = self._graph.ranks[self._timeline.locate(last)[0]].rank
            start = max(end, self._low)
            idle = Segment("idle", start, self._high - start, number, "idle", "idle", Edge.NONE, "other ranks")
            self._segments.append(idle)
        first = last
        node: int | None = last
        while node is not None and self._timeline.end[node] > self._low:
            first, node = node, self._step(node)
        self._add_late_start(first)
        return CriticalPath(tuple(reversed(self._segments)), (self._low, self._high))

    def _add_late_start(self, first: int) -> None:
        """Add the segment of a rank that began after zero, before its first node."""
        begin = float(self._timeline.start[first])
        if self._timeline.start_cause[first] < 0 and begin > self._low:
            number = self._graph.ranks[self._timeline.locate(first)[0]].rank
            self._segments.append(
                Segment(
                    "late start", self._low, begin - self._low, number, "late start", "late start", Edge.NONE, "start"
                )
            )

    def _last_node(self, iterations: int) -> int:
        """Return the node that ends last; ties: one on the host."""
        best, latest = -1, -math.inf
        for layout in self._timeline.layouts:
            if self._rank is None or layout.rank == self._rank:
                ends = self._timeline.end[layout.offset : layout.offset + iterations * layout.nodes]
                if len(ends) and ends.max() > latest:
                    best, latest = layout.offset + int(np.argmax(ends)), float(ends.max())
        if best < 0:
            raise SimulationError("the graph has nothing to do, so no critical path; capture at least one operator")
        return best

    def _step(self, node: int) -> int | None:
        """Add the segments of ``node``; return the previous node of the path."""
        timeline = self._timeline
        ready, cause = timeline.ready.item(node), timeline.ready_cause.item(node)
        edge = _EDGES[timeline.ready_edge.item(node)]
        self._add(node, ready, timeline.end.item(node), edge, cause)
        if edge is Edge.RENDEZVOUS:
            # The last rank's task ends with this one; its lateness is due to its predecessors.
            late = cause if self._rank is None else node
            cause = timeline.start_cause.item(late)
            if late == node:
                edge = _EDGES[timeline.start_edge.item(node)]
                self._add(node, timeline.start.item(node), ready, edge, cause, waiting=True)
        return cause if cause >= 0 else None

    def _add(self, node: int, start: float, end: float, edge: Edge, cause: int, waiting: bool = False) -> None:
        start, end = max(start, self._low), min(end, self._high)
        if end <= start:
            return
        rank, item = self._find(node)
        if isinstance(item, Task):
            kind: SegmentKind = wait_kind(item) if waiting else task_kind(item)
            name, call, task = item.name, item.call, item.id
        else:
            kind, name, call = _action_kind(item, rank)
            task = None
        operator = rank.calls[call].name if call is not None and call in rank.calls else name
        waits_for = self._name(cause, rank) if cause >= 0 else "start"
        length = end - start
        self._segments.append(Segment(kind, start, length, rank.rank, name, operator, edge, waits_for, task, call))

    def _name(self, node: int, seen_from: RankGraph) -> str:
        rank, item = self._find(node)
        name = item.name if isinstance(item, Task) else action_label(item, rank)
        return name if rank is seen_from else f"rank {rank.rank}: {name}"

    def _find(self, node: int) -> tuple[RankGraph, Action | Task]:
        position, local = self._timeline.locate(node)
        return self._graph.ranks[position], self._items[position][local]


def wait_kind(task: Task) -> SegmentKind:
    """Path kind of the time that a task waits for other ranks."""
    collective = task.collective
    return "bubble" if collective is not None and collective.kind in POINT_TO_POINT else "collective wait"


def task_kind(task: Task) -> SegmentKind:
    """Path kind of a task, without its waiting."""
    if task.kind == "collective" or task.collective is not None:
        return "collective transfer"
    if task.kind == "copy":
        return "copy"
    if task.kind == "memset":
        return "memory"
    bound = task.duration.bound.partition(":")[0] if task.duration is not None else ""
    return "compute" if bound == "compute" else "memory" if bound == "memory" else "kernel"


def _action_kind(action: Action, rank: RankGraph) -> tuple[SegmentKind, str, int | None]:
    """Return kind, name and operator call of host time."""
    match action:
        case HostWork(kind, call):
            return kind, kind, call
        case Launch(task):
            return "T4", "T4", rank.tasks[task].call
        case Synchronize(call=call):
            return "synchronisation", action_label(action, rank), call
    raise AssertionError(f"{action!r} takes no time")


PATH_PARTS = 40


@dataclass(frozen=True)
class PathPart:
    """Part of the critical path: all segments of one ``kind`` and ``name``."""

    kind: str
    name: str
    seconds: float
    count: int
    # What the segments mostly waited for.
    waits_for: str


# Tensor-core operators: their errors depend on the number type and, in experts, on the rows of each expert.
_PRODUCTS = ("Gemm", "Attention", "ScaledGemm")
_SHORT = ("bfloat16", "float16")
_OF_EXPERTS = ("moe::", "float8::each", "float8::grouped")


def task_family(task: Task | Kernel) -> str:
    """Family of a task: the type of its first record, or its kind.

    Matrix products and attention also have their number type, unless it has 16 bits, and whether they are of experts.
    """
    if task.operators:
        first = task.operators[0]
        name = type(first).__name__
        if name not in _PRODUCTS:
            return UNKNOWN_PRODUCT if getattr(first, "kind", "") == UNKNOWN_PRODUCT else name
        dtype = getattr(first, "dtype", "")
        name += "" if dtype in _SHORT else f" in {dtype}"
        return f"{name} of experts" if task.name.startswith(_OF_EXPERTS) else name
    collective = task.collective if isinstance(task, Task) else None
    return collective.kind if collective is not None else task.kind


def path_parts(path: CriticalPath) -> tuple[PathPart, ...]:
    """Sum the path by kind and name, in descending order; the rest is one part, so that all parts sum to the step."""
    groups: dict[tuple[str, str], list[Segment]] = defaultdict(list)
    for segment in path.segments:
        groups[segment.kind, segment.operator or segment.name].append(segment)
    parts = sorted((_part(*key, segments) for key, segments in groups.items()), key=lambda part: -part.seconds)
    rest = parts[PATH_PARTS:]
    if rest:
        seconds = math.fsum(part.seconds for part in rest)
        parts = [*parts[:PATH_PARTS], PathPart("other", "all the rest", seconds, sum(part.count for part in rest), "")]
    return tuple(parts)


def _part(kind: str, name: str, segments: list[Segment]) -> PathPart:
    waits: Mapping[str, int] = Counter(segment.waits_for for segment in segments)
    most = max(waits, key=lambda each: waits[each])
    return PathPart(kind, name, math.fsum(segment.seconds for segment in segments), len(segments), most)


@dataclass(frozen=True)
class SimulatedStep:
    """Iteration ``iteration`` of ``timeline``."""

    graph: ExecutionGraph
    timeline: Timeline
    iteration: int
    # Time of a step.
    seconds: float
    # Rank -> seconds by which it began late, if it ran once; `None`: a steady step.
    starts: Mapping[int, float] | None = None
    # Factor by which the host's times may be shorter or longer.
    host_factor: float = 1.0
    # Error figures learned from measured steps of its kind.
    errors: StepErrors | None = None

    @property
    def window(self) -> TimeWindow:
        """Window from the end of the previous iteration to the end of this one."""
        return self.timeline.window(self.iteration)

    @cached_property
    def path(self) -> CriticalPath:
        """Critical path of the explained iteration through all ranks."""
        return critical_path(self.graph, self.timeline, iteration=self.iteration)

    @cached_property
    def paths(self) -> Mapping[int, CriticalPath]:
        """Critical path of the explained iteration through each rank alone, by rank."""
        return {
            rank.rank: critical_path(self.graph, self.timeline, iteration=self.iteration, rank=rank.rank)
            for rank in self.graph.ranks
        }
