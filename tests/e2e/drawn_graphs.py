"""Graphs for the tests of the simulator: drawn by hand, or at random without a deadlock."""

from __future__ import annotations

import random
from dataclasses import replace

from e2e.step.execution_graph import (
    Action,
    Await,
    CallInfo,
    Collective,
    Duration,
    ExecutionGraph,
    HostWork,
    Launch,
    OverheadKind,
    RankGraph,
    RecordEvent,
    Signal,
    StreamWait,
    Synchronize,
    Task,
    TaskKind,
)


def seconds(value: float, bound: str = "") -> Duration:
    return Duration(value, value, value, bound)


class Drawing:
    """One rank, drawn in program order: ``d.host(2); d.kernel("gemm", 10)`` on thread ``main`` and stream 7."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank
        self.threads: dict[str, list[Action]] = {}
        self.tasks: list[Task] = []
        self.calls: dict[int, CallInfo] = {}

    def add(self, *actions: Action, thread: str = "main") -> None:
        self.threads.setdefault(thread, []).extend(actions)

    def host(self, value: float, kind: OverheadKind = "host", thread: str = "main", call: int | None = None) -> None:
        self.add(HostWork(kind, call, seconds(value)), thread=thread)

    def kernel(
        self, name: str, value: float, *, stream: int = 7, launch: float = 1.0, thread: str = "main",
        kind: TaskKind = "kernel", bound: str = "compute", call: int | None = None,
    ) -> int:  # fmt: skip
        return self._launch(
            Task(len(self.tasks), name, kind, stream, (), seconds(value, bound), None, call), launch, thread
        )

    def collective(
        self, name: str, value: float, sequence: int, *, ranks: tuple[int, ...] = (0, 1), stream: int = 20,
        launch: float = 1.0, thread: str = "main", kind: str = "all_reduce", group: str = "world", size: int = 1024,
    ) -> int:  # fmt: skip
        meeting = Collective(kind, group, ranks, sequence, size)
        task = Task(len(self.tasks), name, "collective", stream, (), seconds(value), meeting)
        return self._launch(task, launch, thread)

    def event(self, event: int, record: int, wait: int, thread: str = "main") -> None:
        """Stream ``wait`` goes on after what is now on stream ``record``."""
        self.add(RecordEvent(event, record), StreamWait(event, wait), thread=thread)

    def synchronize(
        self, *, stream: int | None = None, event: int | None = None, cost: float = 0.0, thread: str = "main"
    ) -> None:
        self.add(Synchronize(stream, event, seconds(cost)), thread=thread)

    def graph(self) -> RankGraph:
        threads = {name: tuple(actions) for name, actions in self.threads.items()}
        return RankGraph(self.rank, threads, tuple(self.tasks), self.calls)

    def _launch(self, task: Task, launch: float, thread: str) -> int:
        self.tasks.append(task)
        self.add(Launch(task.id, seconds(launch)), thread=thread)
        return task.id


def together(*drawings: Drawing, multiplicity: dict[int, int] | None = None) -> ExecutionGraph:
    return ExecutionGraph(tuple(drawing.graph() for drawing in drawings), multiplicity or {}, "drawn")


def random_graph(seed: int, *, steps: int = 40, shared: bool = False) -> ExecutionGraph:
    """One to three ranks with one to three threads, written down in one order that is possible, so without deadlock.

    ``shared``: threads use the same streams and events, so that the order of their calls in time matters (and a
    deadlock becomes possible); otherwise each has its own.
    """
    return _RandomGraph(random.Random(seed), shared).draw(steps)


class _RandomGraph:
    def __init__(self, source: random.Random, shared: bool) -> None:
        self._random, self._shared = source, shared
        self._ranks = [Drawing(rank) for rank in source.sample(range(9), source.randint(1, 3))]
        self._threads = source.randint(1, 3)
        self._flags: dict[int, list[int]] = {drawing.rank: [] for drawing in self._ranks}
        self._events: dict[tuple[int, int], list[int]] = {}
        self._sequence = 0
        self._numbers = iter(range(10**6))
        for drawing in self._ranks:
            for thread in range(self._threads):
                drawing.host(self._time(), thread=str(thread))

    def draw(self, steps: int) -> ExecutionGraph:
        choices = [self._host, self._kernel, self._kernel, self._record, self._wait, self._flag, self._synchronize,
                   self._collective]  # fmt: skip
        for _ in range(steps):
            drawing, thread = self._random.choice(self._ranks), self._random.randrange(self._threads)
            self._random.choice(choices)(drawing, thread)
        return together(*self._ranks)

    def _time(self) -> float:
        return self._random.uniform(0.1, 5.0)

    def _stream(self, thread: int) -> int:
        return self._random.randrange(2) + (0 if self._shared else 10 * thread)

    def _host(self, drawing: Drawing, thread: int) -> None:
        drawing.host(self._time(), thread=str(thread))

    def _kernel(self, drawing: Drawing, thread: int) -> None:
        drawing.kernel("k", 3 * self._time(), stream=self._stream(thread), launch=self._time(), thread=str(thread))

    def _known_events(self, drawing: Drawing, thread: int) -> list[int]:
        return self._events.setdefault((drawing.rank, 0 if self._shared else thread), [])

    def _record(self, drawing: Drawing, thread: int) -> None:
        known = self._known_events(drawing, thread)
        # Now and then an event is used again.
        event = self._random.choice(known) if known and self._random.random() < 0.3 else next(self._numbers)
        known.append(event)
        drawing.add(RecordEvent(event, self._stream(thread)), thread=str(thread))

    def _wait(self, drawing: Drawing, thread: int) -> None:
        known = self._known_events(drawing, thread)
        if known:
            drawing.add(StreamWait(self._random.choice(known), self._stream(thread)), thread=str(thread))

    def _flag(self, drawing: Drawing, thread: int) -> None:
        flags = self._flags[drawing.rank]
        if flags and self._random.random() < 0.6:
            drawing.add(Await(self._random.choice(flags)), thread=str(thread))
        else:
            flags.append(next(self._numbers))
            drawing.add(Signal(flags[-1]), thread=str(thread))

    def _synchronize(self, drawing: Drawing, thread: int) -> None:
        known = self._known_events(drawing, thread)
        kind = self._random.choice(["stream", "event", "device"])
        if kind == "event" and known:
            drawing.synchronize(event=self._random.choice(known), cost=self._time(), thread=str(thread))
        elif kind == "stream" or not self._shared:
            # Without shared streams the device is not synchronised either: that would look at those of other threads.
            drawing.synchronize(stream=self._stream(thread), cost=self._time(), thread=str(thread))
        else:
            drawing.synchronize(cost=self._time(), thread=str(thread))

    def _collective(self, _: Drawing, thread: int) -> None:
        members = self._random.sample(self._ranks, self._random.randint(1, len(self._ranks)))
        ranks = tuple(sorted(drawing.rank for drawing in members))
        self._sequence += 1
        for drawing in members:
            drawing.collective(
                "nccl", 2 * self._time(), self._sequence, ranks=ranks, stream=self._stream(thread), launch=self._time(),
                thread=str(thread),
            )  # fmt: skip


def scaled(graph: ExecutionGraph, factor: float) -> ExecutionGraph:
    """Every duration times ``factor``."""
    return changed(graph, lambda value: value * factor)


def changed(graph: ExecutionGraph, change) -> ExecutionGraph:
    """Every duration as ``change`` gives it, called in a fixed order."""

    def again(item):
        duration = getattr(item, "duration", None)
        return item if duration is None else replace(item, duration=seconds(change(duration.seconds), duration.bound))

    ranks = tuple(
        replace(
            rank,
            threads={name: tuple(again(action) for action in actions) for name, actions in rank.threads.items()},
            tasks=tuple(again(task) for task in rank.tasks),
        )
        for rank in graph.ranks
    )
    return replace(graph, ranks=ranks)


def durations(graph: ExecutionGraph) -> list[float]:
    found: list[float] = []
    changed(graph, lambda value: found.append(value) or value)
    return found
