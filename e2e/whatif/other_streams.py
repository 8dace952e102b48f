"""Moves operators to another stream of their GPU, ordered with the rest only by data dependencies."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from e2e.step.execution_graph import Action, Launch, RankGraph, RecordEvent, StreamWait, Synchronize, Task
from e2e.whatif.traced_rank import TracedRank

# Place on a stream: (stream, task), or `None` as task for the end of the previous step.
_Place = tuple[int, int | None]


def move(rank: RankGraph, traced: TracedRank, calls: Collection[int], stream: int) -> RankGraph:
    """Return ``rank`` with the tasks launched by ``calls`` on ``stream``.

    A moved task waits for the last work that wrote what it reads, or used what it writes, and later work waits for it
    in the same way. Data of the previous step (weights updated by its optimizer) is ready when that step's work on the
    writing stream has ended. Longer memory lifetimes in the allocator due to two streams are ignored.
    """
    return _Mover(rank, traced, calls, stream).moved()


@dataclass
class _Touched:
    """Last writer of a storage, and its readers since, as tasks in order."""

    writer: int | None = None
    readers: list[int] = field(default_factory=list)


class _Mover:
    def __init__(self, rank: RankGraph, traced: TracedRank, calls: Collection[int], stream: int) -> None:
        self._rank, self._traced = rank, traced
        self._homes = traced.homes(rank)
        self._moved = {task.id for task in rank.tasks if self._homes.get(task.id) in calls and not task.collective}
        self._streams = [stream if task.id in self._moved else task.stream for task in rank.tasks]
        events = [
            action.event
            for action in rank.actions()
            if isinstance(action, RecordEvent | StreamWait | Synchronize) and action.event is not None
        ]
        self._next_event = max(events, default=0) + 1
        self._events: dict[_Place, int] = {}
        self._before: dict[int, list[Action]] = {}
        self._after: dict[int, list[Action]] = {}
        self._first: list[Action] = []
        # (waiting stream, awaited stream) -> last place on the latter that the former is known to follow.
        self._behind: dict[tuple[int, int], int] = {}

    def moved(self) -> RankGraph:
        if not self._moved:
            return self._rank
        touched: dict[int, _Touched] = {}
        carried = self._carried()
        for task in self._in_order():
            call = self._homes.get(task.id)
            if call is None:
                continue
            reads, writes = self._traced.reads(call), self._traced.writes(call)
            self._order(task, reads, writes, touched, carried)
            for storage in reads:
                touched.setdefault(storage, _Touched()).readers.append(task.id)
            for storage in writes:
                touched[storage] = _Touched(task.id)
        tasks = tuple(replace(task, stream=self._streams[task.id]) for task in self._rank.tasks)
        threads = {name: tuple(self._actions(actions)) for name, actions in self._rank.threads.items()}
        first = next(iter(threads))
        threads[first] = (*self._first, *threads[first])
        return replace(self._rank, tasks=tasks, threads=threads)

    def _in_order(self) -> list[Task]:
        """Return the tasks in the launch order of a program with one thread: that of their calls."""
        places = {call.id: place for place, call in enumerate(self._traced.trace.calls)}
        return sorted(self._rank.tasks, key=lambda task: (places.get(self._homes.get(task.id, -1), -1), task.id))

    def _carried(self) -> dict[int, set[int]]:
        """Map storages to the streams on which the step writes them."""
        found: dict[int, set[int]] = {}
        for task in self._rank.tasks:
            call = self._homes.get(task.id)
            for storage in () if call is None else self._traced.writes(call):
                found.setdefault(storage, set()).add(self._streams[task.id])
        return found

    def _order(
        self,
        task: Task,
        reads: Iterable[int],
        writes: Iterable[int],
        touched: Mapping[int, _Touched],
        carried: Mapping[int, set[int]],
    ) -> None:
        waits: dict[int, int] = {}  # stream -> latest task on it
        for storage in {*reads, *writes}:
            known = touched.get(storage)
            if known is None:
                if task.id in self._moved:
                    for stream in carried.get(storage, ()):
                        if stream != self._streams[task.id]:
                            self._wait_for_last_step(task, stream)
                continue
            others = [known.writer, *(known.readers if storage in writes else ())]
            for other in others:
                if other is not None and (other in self._moved) != (task.id in self._moved):
                    stream = self._streams[other]
                    waits[stream] = max(waits.get(stream, other), other)
        for stream, other in waits.items():
            key = (self._streams[task.id], stream)
            if stream != key[0] and self._behind.get(key, -1) < other:
                self._behind[key] = other
                self._before.setdefault(task.id, []).append(StreamWait(self._event(other), key[0]))

    def _event(self, task: int) -> int:
        place = (self._streams[task], task)
        if place not in self._events:
            self._events[place] = self._next_event
            self._after.setdefault(task, []).append(RecordEvent(self._next_event, place[0]))
            self._next_event += 1
        return self._events[place]

    def _wait_for_last_step(self, task: Task, stream: int) -> None:
        place, key = (stream, None), (self._streams[task.id], stream)
        if place not in self._events:
            self._events[place] = self._next_event
            self._first.append(RecordEvent(self._next_event, stream))
            self._next_event += 1
        if key not in self._behind:
            self._behind[key] = -1
            self._before.setdefault(task.id, []).append(StreamWait(self._events[place], key[0]))

    def _actions(self, actions: Iterable[Action]) -> Iterable[Action]:
        for action in actions:
            if not isinstance(action, Launch):
                yield action
                continue
            yield from self._before.get(action.task, ())
            yield action
            yield from self._after.get(action.task, ())
