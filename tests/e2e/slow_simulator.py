"""A second simulator to compare with: slow, short, and by another method.

Every step the call that takes effect first in the whole graph is carried out, then all times on all streams are
computed anew from what has been put on them. That a wait never ends before the present is then plain.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from e2e.step.execution_graph import (
    Await,
    ExecutionGraph,
    HostWork,
    Launch,
    RankGraph,
    RecordEvent,
    Signal,
    StreamWait,
    Synchronize,
)


@dataclass
class _Thread:
    place: int = 0
    clock: float = 0.0
    ends: list[float] = field(default_factory=list)


@dataclass
class _Mark:
    """``at``: (stream, how many items were before it) once recorded; ``called``: by the host."""

    at: tuple[int, int] | None = None
    called: float = 0.0


class _Rank:
    def __init__(self, graph: RankGraph) -> None:
        self.graph = graph
        self.threads = [_Thread() for _ in graph.threads]
        self.code = list(graph.threads.values())
        # Per stream: ("task", id, launched) or ("wait", mark, 0).
        self.streams: dict[int, list[tuple]] = {}
        self.events: dict[int, _Mark] = {}
        self.flags: dict[int, float] = {}
        self.starts: dict[int, float] = {}
        self.ends: dict[int, float] = {}
        # Per stream: when each item had ended, as far as known.
        self.known: dict[int, list[float]] = {}

    def reached(self, mark: _Mark) -> float | None:
        if mark.at is None:
            return None
        stream, count = mark.at
        times = self.known.get(stream, [])
        if len(times) < count:
            return None
        return max([mark.called, *times[:count]])

    def advance_streams(self) -> bool:
        """Extends ``known`` by one round; whether anything was new."""
        new = False
        for stream, items in self.streams.items():
            times = self.known.setdefault(stream, [])
            while len(times) < len(items):
                kind, what, launched = items[len(times)]
                before = max(times, default=0.0)
                if kind == "wait":
                    end = self.reached(what)
                else:
                    self.starts[what] = max(before, launched)
                    task = self.graph.tasks[what]
                    if task.collective is None:
                        self.ends[what] = self.starts[what] + task.duration.seconds
                    end = self.ends.get(what)
                if end is None:
                    break
                times.append(max(before, end))
                new = True
        return new


def slow_simulate(graph: ExecutionGraph) -> dict[int, tuple[list[list[float]], list[float]]] | None:
    """Per rank: ends of the actions of each thread, ends of the tasks. ``None``: a deadlock."""
    ranks = sorted((_Rank(rank) for rank in graph.ranks), key=lambda rank: rank.graph.rank)
    while True:
        best = None
        for number, rank in enumerate(ranks):
            for index, thread in enumerate(rank.threads):
                moment = _next_moment(rank, index)
                if moment is not None and (best is None or moment < best[0]):
                    best = (moment, number, index, thread)
        if best is None:
            break
        _act(ranks[best[1]], best[2], best[0])
        while any(rank.advance_streams() for rank in ranks) or _meet(ranks):
            pass
    if any(thread.place < len(code) for rank in ranks for thread, code in zip(rank.threads, rank.code, strict=True)):
        return None
    if any(len(rank.known[stream]) < len(items) for rank in ranks for stream, items in rank.streams.items()):
        return None
    return {
        rank.graph.rank: ([thread.ends for thread in rank.threads], [rank.ends[task.id] for task in rank.graph.tasks])
        for rank in ranks
    }


def _next_moment(rank: _Rank, index: int) -> float | None:
    """When the thread's next action takes effect; ``None`` if it is unknown or there is none."""
    thread, code = rank.threads[index], rank.code[index]
    if thread.place == len(code):
        return None
    action = code[thread.place]
    if isinstance(action, (HostWork, Launch)):
        return thread.clock + action.duration.seconds
    if isinstance(action, Await):
        return max(thread.clock, rank.flags[action.flag]) if action.flag in rank.flags else None
    if isinstance(action, _Waiting):
        times = [rank.reached(mark) for mark in action.marks]
        return None if None in times else max([thread.clock, *times]) + action.seconds
    return thread.clock


@dataclass(frozen=True)
class _Waiting:
    """A synchronising call after it was made."""

    marks: tuple[_Mark, ...]
    seconds: float


def _act(rank: _Rank, index: int, moment: float) -> None:
    thread = rank.threads[index]
    action = rank.code[index][thread.place]
    if isinstance(action, Synchronize):
        marks = _what(rank, action, moment)
        code = list(rank.code[index])
        code[thread.place] = _Waiting(marks, action.duration.seconds)
        rank.code[index] = tuple(code)
        return
    if isinstance(action, Launch):
        rank.streams.setdefault(rank.graph.tasks[action.task].stream, []).append(("task", action.task, moment))
    elif isinstance(action, RecordEvent):
        mark = rank.events.get(action.event)
        if mark is None or mark.at is not None:
            mark = rank.events[action.event] = _Mark()
        mark.at, mark.called = (action.stream, len(rank.streams.get(action.stream, []))), moment
    elif isinstance(action, StreamWait):
        mark = rank.events.setdefault(action.event, _Mark())
        rank.streams.setdefault(action.stream, []).append(("wait", mark, 0.0))
    elif isinstance(action, Signal):
        rank.flags.setdefault(action.flag, moment)
    thread.clock = moment
    thread.ends.append(moment)
    thread.place += 1


def _what(rank: _Rank, action: Synchronize, moment: float) -> tuple[_Mark, ...]:
    if action.event is not None:
        return (rank.events.setdefault(action.event, _Mark()),)
    streams = list(rank.streams) if action.stream is None else [action.stream]
    return tuple(_Mark((stream, len(rank.streams.get(stream, []))), moment) for stream in streams)


def _meet(ranks: list[_Rank]) -> bool:
    """Ends the collectives for which all ranks are ready; whether there was one."""
    here: dict[tuple[str, int], list[tuple[_Rank, int]]] = {}
    for rank in ranks:
        for task in rank.graph.tasks:
            if task.collective is not None and task.id in rank.starts and task.id not in rank.ends:
                here.setdefault((task.collective.group, task.collective.sequence), []).append((rank, task.id))
    found = False
    for parties in here.values():
        first, task = parties[0]
        if len(parties) == len(first.graph.tasks[task].collective.ranks):
            begin = max(rank.starts[task] for rank, task in parties)
            end = begin + max(rank.graph.tasks[task].duration.seconds for rank, task in parties)
            for rank, task in parties:
                rank.ends[task] = end
            found = True
    return found
