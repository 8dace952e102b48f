"""Execution graph compiled for the simulator: a flat list of instructions per thread, streams and events as slots.

Compilation validates once that everything has a price, refers to no absent rank and is of a known kind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf

from costmodel.base.errors import SimulationError
from e2e.step.execution_graph import (
    Action,
    Await,
    CallInfo,
    Collective,
    Duration,
    ExecutionGraph,
    GpuLoad,
    HostWork,
    Launch,
    RankGraph,
    RecordEvent,
    Signal,
    StreamWait,
    Synchronize,
    Task,
)

# Operation codes. Those up to SHARED take effect after their host time, the others at once. SHARED launches tasks that
# others may slow down: collectives, and kernels that overlap with them.
HOST, LAUNCH, SHARED, RECORD, WAIT, SYNCHRONIZE_STREAM, SYNCHRONIZE_EVENT, SYNCHRONIZE_DEVICE, SIGNAL, AWAIT = range(10)
NO_SLOT = -1

# (operation code, host seconds, task or event slot or flag slot, stream slot, task seconds)
Instruction = tuple[int, float, int, int, float]


@dataclass(frozen=True, slots=True)
class CompiledThread:
    """Instructions of one host thread."""

    name: str
    # Place of the thread's first action among all actions of its rank.
    first: int
    code: list[Instruction]


@dataclass(frozen=True)
class CompiledRank:
    """Program of one rank."""

    rank: int
    threads: tuple[CompiledThread, ...]
    actions: int
    # Slot -> stream number in the graph.
    streams: tuple[int, ...]
    task_streams: list[int]
    # Task -> place of its launch among the actions.
    launches: list[int]
    # Task -> collective and its transfer seconds.
    collectives: dict[int, tuple[Collective, float]]
    # Task -> (link, share used) pairs.
    links: dict[int, tuple[tuple[str, float], ...]]
    # Task -> load on its GPU, for collectives and the kernels that overlap with some.
    loads: dict[int, GpuLoad]
    # Seconds of every task running alone.
    seconds: list[float]
    events: tuple[int, ...]
    flags: tuple[int, ...]
    # Threads share a stream, an event or a flag that is signalled twice, so the order of their calls in time matters;
    # otherwise threads may be run one after another.
    ordered: bool

    @property
    def tasks(self) -> int:
        """Number of tasks that the rank's streams run."""
        return len(self.task_streams)

    @property
    def nodes(self) -> int:
        """Number of nodes of one iteration of the rank in a timeline: its actions and its tasks."""
        return self.actions + self.tasks


def compile_graph(graph: ExecutionGraph) -> tuple[CompiledRank, ...]:
    """Compile one program per rank, in the graph's order; raise :class:`SimulationError` for work without a price."""
    if not graph.ranks:
        raise SimulationError(f"{error_prefix(graph)}the graph has no ranks; capture or read at least one")
    repeated = [rank for rank, count in Counter(entry.rank for entry in graph.ranks).items() if count > 1]
    if repeated:
        raise SimulationError(f"{error_prefix(graph)}rank {repeated[0]} appears twice; give every rank its own number")
    present = {entry.rank for entry in graph.ranks}
    for rank, count in graph.multiplicity.items():
        if rank not in present or count < 1:
            raise SimulationError(
                f"{error_prefix(graph)}multiplicity {count} of rank {rank} fits no rank of the graph; "
                "name a rank that is in it, and 1 or more"
            )
    return tuple(_Compiler(graph, entry).compile() for entry in graph.ranks)


def error_prefix(graph: ExecutionGraph) -> str:
    """Prefix of error messages: the graph's source, if it has one."""
    return f"{graph.source}: " if graph.source else ""


class _Slots(dict[int, int]):
    """Map from numbers of the graph to consecutive slots, in order of first use."""

    def __missing__(self, number: int) -> int:
        slot = self[number] = len(self)
        return slot


class _Compiler:
    def __init__(self, graph: ExecutionGraph, rank: RankGraph) -> None:
        self._graph = graph
        self._rank = rank
        self._streams, self._events, self._flags = _Slots(), _Slots(), _Slots()
        self._task_seconds = [self._price_task(task) for task in rank.tasks]
        self._task_streams = [self._streams[task.stream] for task in rank.tasks]
        self._collectives = {
            task.id: (task.collective, self._task_seconds[task.id])
            for task in rank.tasks
            if task.collective is not None
        }
        self._loads = _loads(rank.tasks)
        self._launches = [0] * len(rank.tasks)

    def compile(self) -> CompiledRank:
        threads: list[CompiledThread] = []
        first = 0
        for name, actions in self._rank.threads.items():
            threads.append(CompiledThread(name, first, self._thread(name, first, actions)))
            first += len(actions)
        return CompiledRank(
            rank=self._rank.rank,
            threads=tuple(threads),
            actions=first,
            streams=tuple(self._streams),
            task_streams=self._task_streams,
            launches=self._launches,
            collectives=self._collectives,
            links={task.id: task.links for task in self._rank.tasks if task.links},
            loads=self._loads,
            seconds=self._task_seconds,
            events=tuple(self._events),
            flags=tuple(self._flags),
            ordered=_meet([thread.code for thread in threads]),
        )

    def _thread(self, name: str, first: int, actions: tuple[Action, ...]) -> list[Instruction]:
        """Translate the actions of a thread. Host work and launches dominate, so they are translated inline."""
        code: list[Instruction] = []
        append = code.append
        streams, work, launches = self._task_streams, self._task_seconds, self._launches
        shared = self._collectives.keys() | self._loads.keys()
        place = first
        for action in actions:
            kind = type(action)
            if kind is HostWork or kind is Launch:
                duration: Duration | None = action.duration  # type: ignore[union-attr]
                if duration is None or not 0.0 <= duration.seconds < inf:
                    raise self._unpriced(
                        f"thread {name!r}, action {place - first} ({action_label(action, self._rank)})", duration
                    )
                if kind is HostWork:
                    append((HOST, duration.seconds, NO_SLOT, NO_SLOT, 0.0))
                else:
                    task: int = action.task  # type: ignore[union-attr]
                    launches[task] = place
                    code_ = SHARED if task in shared else LAUNCH
                    append((code_, duration.seconds, task, streams[task], work[task]))
            else:
                append(self._rare(name, place - first, action))
            place += 1
        return code

    def _rare(self, thread: str, place: int, action: Action) -> Instruction:
        match action:
            case RecordEvent(event, stream):
                return (RECORD, 0.0, self._events[event], self._streams[stream], 0.0)
            case StreamWait(event, stream):
                return (WAIT, 0.0, self._events[event], self._streams[stream], 0.0)
            case Synchronize(stream, event, duration):
                return self._synchronize(
                    f"thread {thread!r}, action {place} (synchronisation)", stream, event, duration
                )
            case Signal(flag):
                return (SIGNAL, 0.0, self._flags[flag], NO_SLOT, 0.0)
            case Await(flag):
                return (AWAIT, 0.0, self._flags[flag], NO_SLOT, 0.0)
        raise AssertionError(f"unknown action {action!r}")

    def _synchronize(self, what: str, stream: int | None, event: int | None, duration: Duration | None) -> Instruction:
        if duration is None or not 0.0 <= duration.seconds < inf:
            raise self._unpriced(what, duration)
        if stream is not None and event is not None:
            raise SimulationError(f"{self._prefix}{what} waits for a stream and an event; give one of them")
        if stream is not None:
            return (SYNCHRONIZE_STREAM, duration.seconds, NO_SLOT, self._streams[stream], 0.0)
        if event is not None:
            return (SYNCHRONIZE_EVENT, duration.seconds, self._events[event], NO_SLOT, 0.0)
        return (SYNCHRONIZE_DEVICE, duration.seconds, NO_SLOT, NO_SLOT, 0.0)

    def _price_task(self, task: Task) -> float:
        duration = task.duration
        if duration is None or not 0.0 <= duration.seconds < inf:
            raise self._unpriced(f"task {task.id} ({task.kind} {task.name!r} on stream {task.stream})", duration)
        return duration.seconds

    def _unpriced(self, what: str, duration: Duration | None) -> SimulationError:
        if duration is None:
            return SimulationError(f"{self._prefix}{what} has no duration; price the graph before it is simulated")
        return SimulationError(f"{self._prefix}{what} takes {duration.seconds} s; give a finite time of zero or more")

    @property
    def _prefix(self) -> str:
        return f"{error_prefix(self._graph)}rank {self._rank.rank}, "


def _loads(tasks: Sequence[Task]) -> dict[int, GpuLoad]:
    """Return the load of each task; empty if no kernel can overlap with a collective."""
    loads = {task.id: task.load for task in tasks if task.load is not None and task.load.memory > 0}
    of_collectives = sum(task.id in loads and task.collective is not None for task in tasks)
    return loads if 0 < of_collectives < len(loads) else {}


def action_label(action: Action, rank: RankGraph) -> str:
    """Short label of ``action`` for messages: overhead type or call, and its operator or task."""
    match action:
        case HostWork(kind, call):
            return f"{kind} of {_call_name(rank.calls.get(call))}" if call is not None else kind
        case Launch(task):
            return f"launch of {rank.tasks[task].name}"
        case Synchronize(stream, event):
            target = f"stream {stream}" if stream is not None else f"event {event}" if event is not None else "device"
            return f"synchronize {target}"
        case RecordEvent(event, stream):
            return f"record event {event} on stream {stream}"
        case StreamWait(event, stream):
            return f"stream {stream} waits for event {event}"
        case Signal(flag):
            return f"signal to another thread (flag {flag})"
        case Await(flag):
            return f"wait for another thread (flag {flag})"


def _call_name(call: CallInfo | None) -> str:
    return "an unknown call" if call is None else call.name


def _meet(threads: list[list[Instruction]]) -> bool:
    """True if the relative order of calls of different threads can matter."""
    if len(threads) < 2:
        return False
    signals = Counter(ins[2] for code in threads for ins in code if ins[0] == SIGNAL)
    streams = [{ins[3] for ins in code if ins[3] != NO_SLOT} for code in threads]
    events = [{ins[2] for ins in code if ins[0] in (RECORD, WAIT, SYNCHRONIZE_EVENT)} for code in threads]
    # A device synchronisation depends on the streams of all threads.
    whole = any(ins[0] == SYNCHRONIZE_DEVICE for code in threads for ins in code)
    return whole or any(count > 1 for count in signals.values()) or _overlap(streams) or _overlap(events)


def _overlap(sets: Iterable[set[int]]) -> bool:
    seen: set[int] = set()
    for members in sets:
        if seen & members:
            return True
        seen |= members
    return False
