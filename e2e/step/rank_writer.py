"""Writer of the graph of one rank: host work around operators, launches, events between streams, alternating threads.

Overheads belong to *units*, the outermost operator calls: T1 before a unit, T2 before its first launch, T5 before each
other launch, T3 after the last, or T5 for the whole of a unit that launches nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from e2e.step.execution_graph import (
    Action,
    Await,
    CallInfo,
    Duration,
    HostWork,
    Launch,
    OverheadKind,
    RankGraph,
    RecordEvent,
    Signal,
    StreamWait,
    Synchronize,
    Task,
)
from e2e.step.named_ranges import NamedRanges
from e2e.step.operator_trace import Phase

MAIN, AUTOGRAD = "main", "autograd"


@dataclass
class RankWriter:
    """Graph of one rank while it is written. ``operator_calls`` and ``ranges``: as in
    :class:`e2e.step.execution_graph.RankGraph`.
    """

    rank: int
    # Calls known from the start; :meth:`call` adds others.
    calls: dict[int, CallInfo] = field(default_factory=dict)
    operator_calls: int | None = None
    ranges: NamedRanges = field(default_factory=NamedRanges)
    _tasks: list[Task] = field(default_factory=list)
    _threads: dict[str, list[Action]] = field(default_factory=lambda: defaultdict(list, {MAIN: []}))
    _thread: str = MAIN
    _events: int = 0
    _flags: int = 0
    _returning: int | None = None  # flag that the main thread awaits while autograd works
    _unit: int | None = None
    _launched: bool = False
    _records: float | None = None
    _gaps: dict[tuple[str, Phase], int] = field(default_factory=dict)
    _sequences: dict[str, int] = field(default_factory=dict)
    _next_call: int = field(init=False)

    def __post_init__(self) -> None:
        self._next_call = max(self.calls, default=-1) + 1

    # --- calls and units -----------------------------------------------------------------------------

    def call(self, name: str, phase: Phase = "other") -> int:
        """Add an operator call of that name and return its id."""
        number = self._next_call
        self._next_call += 1
        self.calls[number] = CallInfo(number, name, phase)
        return number

    def begin_unit(self, call: int, gap: Sequence[str] = ()) -> None:
        """Begin a unit and end the open one. ``gap``: names of the parts of the gap before it, instead of the unit's
        T1.
        """
        self.end_unit()
        self._unit, self._launched = call, False
        for name in gap:
            self.append(HostWork("T1", self._marked(name, self.calls[call].phase)))
        if not gap:
            self.append(HostWork("T1", call))

    def _marked(self, name: str, phase: Phase) -> int:
        """Return the call that represents gaps called ``name`` in ``phase``."""
        if (name, phase) not in self._gaps:
            self._gaps[name, phase] = self.call(name, phase)
        return self._gaps[name, phase]

    def end_unit(self) -> None:
        """End the open unit, if any."""
        if self._unit is not None:
            self._piece("T3" if self._launched else "T5")
        self._unit = None
        self._records = None

    def nested(self, records: float) -> None:
        """Count begins and ends of operators inside the open unit, half a record each."""
        self._records = (self._records or 0.0) + records

    def _piece(self, kind: OverheadKind) -> None:
        """Add the host work of the open unit since its last piece."""
        self.append(HostWork(kind, self._unit, records=self._records))
        self._records = None if self._records is None else 0.0

    def unit(self, task: Task, launches: int = 1) -> None:
        """Write the whole unit of the call of ``task``, its only task; ``launches``: number of host launches (for a
        pass of several kernels that are priced as one).
        """
        if task.call is None:
            raise ValueError(f"task {task.name!r} names no call")
        self.begin_unit(task.call)
        self.launch(task)
        for _ in range(launches - 1):
            self.append(HostWork("T5", task.call))
        self.end_unit()

    # --- launches ------------------------------------------------------------------------------------

    @property
    def next_task(self) -> int:
        """``id`` of the next task."""
        return len(self._tasks)

    def launch(self, task: Task) -> None:
        """Add the next launch of the open unit."""
        self._piece("T5" if self._launched else "T2")
        self.enqueue(task)
        self._launched = True

    def enqueue(self, task: Task, launch: Duration | None = None) -> None:
        """Add a launch without host work around it. ``launch``: duration of the launch call, if known."""
        self._tasks.append(task)
        self.append(Launch(task.id, launch))

    def next_in(self, group: str) -> int:
        """Return the sequence number of this rank's next collective in ``group``."""
        self._sequences[group] = self._sequences.get(group, -1) + 1
        return self._sequences[group]

    # --- streams -------------------------------------------------------------------------------------

    def record_event(self, stream: int) -> int:
        """Record an event at the current end of ``stream`` and return it."""
        self._events += 1
        self.append(RecordEvent(self._events, stream))
        return self._events

    def wait_event(self, event: int, stream: int) -> None:
        """Make later work on ``stream`` wait for ``event``."""
        self.append(StreamWait(event, stream))

    def after(self, stream: int, other: int) -> None:
        """Make later work on ``stream`` wait for the current end of ``other``."""
        self.wait_event(self.record_event(other), stream)

    def synchronize(self, call: int, stream: int | None = None, event: int | None = None) -> None:
        """Make the host wait for ``stream`` or ``event``, or for all streams if neither is given."""
        self.append(Synchronize(stream, event, call=call))

    # --- threads -------------------------------------------------------------------------------------

    def switch(self, thread: str) -> None:
        """Continue on ``thread``; end the open unit if the thread changes.

        ``backward()`` hands over to the autograd thread and waits for it; other threads run independently.
        """
        if thread == self._thread:
            return
        self.end_unit()
        if thread == AUTOGRAD and self._returning is None:
            self._hand_over()
        elif thread == MAIN and self._returning is not None:
            self._threads[AUTOGRAD].append(Signal(self._returning))
            self._returning = None
        self._thread = thread

    def append(self, action: Action) -> None:
        """Append an action to the current thread."""
        self._threads[self._thread].append(action)

    def finish(self) -> RankGraph:
        """Return the finished graph; the main thread waits for autograd first."""
        self.switch(MAIN)
        self.end_unit()
        threads = {name: tuple(actions) for name, actions in self._threads.items()}
        return RankGraph(self.rank, threads, tuple(self._tasks), self.calls, self.operator_calls, self.ranges)

    def _hand_over(self) -> None:
        go, self._returning = self._flags, self._flags + 1
        self._flags += 2
        self._threads[MAIN] += [Signal(go), Await(self._returning)]
        self._threads[AUTOGRAD].append(Await(go))
