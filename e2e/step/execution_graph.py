"""Execution graph, the input of the simulator: host threads that launch device work, ranks that meet in collectives.
:class:`RankWriter` writes the graph of one rank.

The graph holds operations and their order; dependencies come from program order on a thread, order on a stream, events,
synchronising calls and rendezvous, never from names. Durations are ``None`` until a model or a measurement sets them;
the simulator refuses a graph without prices.

Host overheads are named as in Lin et al., HiPC 2022: ``T1`` gap between top-level operators, ``T2`` operator start to
its first launch, ``T3`` last launch to operator end, ``T4`` the launch call, ``T5`` between launches or the whole of an
operator that launches nothing. They belong to *units*, the outermost operator calls.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from costmodel.cost_model import PriceSource
from costmodel.operators.any_operator import AnyOperator
from e2e.step.operator_trace import NamedRanges, Phase

OverheadKind = Literal["T1", "T2", "T3", "T4", "T5", "host"]
# Description of each kind in reports.
OVERHEAD_MEANINGS: Mapping[OverheadKind, str] = {
    "T1": "between operators",
    "T2": "in an operator before its first launch",
    "T3": "in an operator after its last launch",
    "T4": "launch calls",
    "T5": "between two launches of an operator, or the whole of one that launches nothing",
    "host": "other work of the host",
}
TaskKind = Literal["kernel", "copy", "memset", "collective", "graph"]
# Kind of the element-wise record of a kernel in Triton that multiplies matrices of unknown extents.
UNKNOWN_PRODUCT = "unknown product"


@dataclass(frozen=True, slots=True)
class Duration:
    """Duration in seconds with its interval ``lower <= seconds <= upper``, limiting resource and source."""

    seconds: float
    lower: float
    upper: float
    bound: str = ""
    source: PriceSource = "measured"
    # Power above idle during a kernel, as a fraction of (board limit - idle power); None if no model gives it
    # (:mod:`costmodel.gpu.power`).
    power: float | None = None

    @staticmethod
    def measured(seconds: float) -> Duration:
        """Return the duration of a measured time, which is taken as exact."""
        return Duration(seconds, seconds, seconds)


# --- device ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective: all ``ranks`` of ``group`` take part with the same ``sequence`` number in that group.

    A point-to-point pair is a group of two; sends and receives that NCCL runs as one group go on separate streams, one
    per peer and direction.
    """

    # ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``reduce``, ``send``, ``recv``
    # or ``barrier``.
    kind: str
    group: str
    ranks: tuple[int, ...]
    sequence: int
    # Input of this rank (``all_gather``: its shard; ``reduce_scatter``, ``all_to_all``: the whole buffer; ``recv``: the
    # output, or 0).
    size_bytes: int
    # Output of this rank in an uneven ``all_to_all``, if it differs from the input.
    received_bytes: int | None = None
    # Number of transfers of this size that are started as one.
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """Load of a task on its GPU while it runs alone, as fractions of the whole GPU.

    Tasks without a load (recorded ones, whose times include the effect of concurrent work) neither slow others nor are
    slowed.
    """

    # Fraction of the memory bandwidth.
    memory: float
    # Fraction of the multiprocessors kept from other tasks (by a collective, whose blocks stay until its end).
    held: float = 0.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """One of several launches that a task combines; fields as in :class:`Task`."""

    name: str
    kind: TaskKind
    operators: tuple[AnyOperator, ...]
    call: int | None = None
    duration: Duration | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """Device work on one stream of one rank."""

    # Index in :attr:`RankGraph.tasks`.
    id: int
    name: str
    kind: TaskKind
    stream: int
    # Descriptions of :mod:`costmodel` that together price the task (empty: unknown to every model).
    operators: tuple[AnyOperator, ...] = ()
    # For a collective: transfer time, without waiting for other ranks and with exclusive use of all links.
    duration: Duration | None = None
    collective: Collective | None = None
    call: int | None = None
    # Links used on this rank's side: (name, fraction of the link's rate).
    links: tuple[tuple[str, float], ...] = ()
    # Kernels of a task that combines several launches, instead of ``operators``.
    kernels: tuple[Kernel, ...] = ()
    # Load on the GPU, which slows concurrent tasks.
    load: GpuLoad | None = None


# --- host ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostWork:
    """Host time spent by a thread for the operator call ``call``."""

    kind: OverheadKind
    call: int | None = None
    duration: Duration | None = None
    # Number of operators that begin and end inside the call in this piece, half for each begin and each end; None: not
    # known.
    records: float | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """Launch call (T4) that enqueues ``task`` on its stream; the task may start when the call ends."""

    task: int
    duration: Duration | None = None


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Record ``event`` on ``stream``: it is reached when all earlier work on the stream has ended."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class StreamWait:
    """Make later work on ``stream`` wait for ``event``. The host does not wait."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class Synchronize:
    """Make the host wait for a stream, an event or (if neither is given) all streams of its rank."""

    stream: int | None = None
    event: int | None = None
    # Cost of the call once the awaited work has ended.
    duration: Duration | None = None
    call: int | None = None


@dataclass(frozen=True, slots=True)
class Signal:
    """Resume the threads of this rank that wait for ``flag``."""

    flag: int


@dataclass(frozen=True, slots=True)
class Await:
    """Make the thread wait until ``flag`` is signalled (as the main thread waits for autograd's)."""

    flag: int


Action = HostWork | Launch | RecordEvent | StreamWait | Synchronize | Signal | Await


@dataclass(frozen=True, slots=True)
class CallInfo:
    """Operator call that host and device work belong to, for breakdowns."""

    id: int
    name: str
    phase: Phase = "other"
    parent: int | None = None
    module: str = ""
    # Number of tensors in its lists, if it takes lists (foreach and fused optimizers).
    tensors: int = 0
    # Number of tensors the optimizer collected before this call, if it is the first of a parameter group.
    gathered: int = 0
    # True in a forward pass that runs again inside the backward pass (activation checkpointing of a script).
    recomputed: bool = False
    # Line of the script (``model.py:73``), if known.
    line: str = ""
    # Number of numbers in the list of the script that it makes a tensor of.
    numbers: int = 0
    # Number of Python functions called before it and, for an operator of the top level, inside it.
    functions: int = 0


@dataclass(frozen=True)
class RankGraph:
    """Graph of one rank. Every task is launched exactly once."""

    rank: int
    # Thread name -> actions in program order.
    threads: Mapping[str, tuple[Action, ...]]
    tasks: tuple[Task, ...]
    calls: Mapping[int, CallInfo] = field(default_factory=dict)
    # Number of operators the host calls in one iteration, if it differs from the number of ``calls``: a part of a model
    # that runs for every layer and micro-batch has its calls there once, compiled code calls few of its operators.
    operator_calls: int | None = None
    # Ranges named by a script.
    ranges: NamedRanges = field(default_factory=NamedRanges)
    # Call -> CUDA graph that replays it.
    graphs: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        launched = [action.task for action in self.actions() if isinstance(action, Launch)]
        if sorted(launched) != list(range(len(self.tasks))):
            raise ValueError(f"rank {self.rank}: every task needs exactly one launch, in order of their ids")
        if any(task.id != place for place, task in enumerate(self.tasks)):
            raise ValueError(f"rank {self.rank}: a task's id is its place")

    def actions(self) -> Iterator[Action]:
        """Iterate over all actions of the host, thread after thread, each thread's in program order."""
        for actions in self.threads.values():
            yield from actions


@dataclass(frozen=True)
class ExecutionGraph:
    """One iteration of one or more ranks.

    The ranks of the graph must be able to meet each other: a collective between ranks that represent others (the two
    ends of a pipeline's transfer) names the ranks of the graph, not the represented ones.
    """

    ranks: tuple[RankGraph, ...]
    # Rank of the graph -> number of identical ranks that it represents.
    multiplicity: Mapping[int, int] = field(default_factory=dict)
    source: str = ""


def operator_counts(graph: ExecutionGraph) -> Mapping[AnyOperator, int]:
    """Count how often each operator runs in ``graph``."""
    return Counter(record for rank in graph.ranks for task in rank.tasks for record in task.operators)


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
