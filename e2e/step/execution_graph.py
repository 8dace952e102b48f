"""What the simulator runs: host threads that launch device work, ranks that meet in collectives.

The graph says what happens and in which order; dependencies come from program order on a thread, order on a stream,
events, synchronising calls and rendezvous, never from names. Durations are ``None`` until a model or a measurement
fills them in; the simulator refuses a graph that is not priced.

Host overheads carry the names of the papers (Lin et al., HiPC 2022): ``T1`` gap between top-level operators, ``T2``
operator start to its first launch, ``T3`` last launch to operator end, ``T4`` the launch call, ``T5`` between launches
or the whole of an operator that launches nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from costmodel.model.cost_model import PriceSource
from costmodel.operators.any_operator import AnyOperator
from e2e.step.named_ranges import NamedRanges
from e2e.step.operator_trace import Phase

OverheadKind = Literal["T1", "T2", "T3", "T4", "T5", "host"]
# What reports say of each kind.
OVERHEAD_MEANINGS: Mapping[OverheadKind, str] = {
    "T1": "between operators",
    "T2": "in an operator before its first launch",
    "T3": "in an operator after its last launch",
    "T4": "launch calls",
    "T5": "between two launches of an operator, or the whole of one that launches nothing",
    "host": "other work of the host",
}
TaskKind = Literal["kernel", "copy", "memset", "collective", "graph"]


@dataclass(frozen=True, slots=True)
class Duration:
    """Seconds with their interval ``lower <= seconds <= upper``, what limits them and where they come from.

    ``power``: what a kernel draws above rest meanwhile, in shares of (limit of the board - rest); ``None`` where no
    model says (:mod:`costmodel.gpu.power`).
    """

    seconds: float
    lower: float
    upper: float
    bound: str = ""
    source: PriceSource = "measured"
    power: float | None = None

    @staticmethod
    def measured(seconds: float) -> Duration:
        """A measured time, taken for exact."""
        return Duration(seconds, seconds, seconds)


# --- device ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Collective:
    """A rendezvous: all ``ranks`` of ``group`` take part with the same ``sequence`` number in that group.

    ``kind``: ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``reduce``, ``send``,
    ``recv``, ``barrier``. ``size_bytes``: what this rank puts in (``all_gather``: its shard; ``reduce_scatter``,
    ``all_to_all``: the whole buffer; ``recv``: what it takes, or 0). ``received_bytes``: what this rank takes out of an
    uneven ``all_to_all``, where that differs. ``pieces``: it is one of so many of this size that start as one.

    A point-to-point pair is a group of two; what NCCL runs as one group of sends and receives goes on streams of its
    own, one per peer and direction.
    """

    kind: str
    group: str
    ranks: tuple[int, ...]
    sequence: int
    size_bytes: int
    received_bytes: int | None = None
    pieces: int = 1


@dataclass(frozen=True, slots=True)
class GpuLoad:
    """What a task takes of its GPU while it runs alone, as shares of the whole: of the ``memory``'s bandwidth, and of
    the multiprocessors those that it keeps others from (``held``: of a collective, whose blocks stay to its end).

    Tasks that have none (recorded ones, whose times contain what ran beside them) neither slow others nor are slowed.
    """

    memory: float
    held: float = 0.0


@dataclass(frozen=True, slots=True)
class Kernel:
    """One of the launches that a task stands for; the fields are those of :class:`Task`."""

    name: str
    kind: TaskKind
    operators: tuple[AnyOperator, ...]
    call: int | None = None
    duration: Duration | None = None


@dataclass(frozen=True, slots=True)
class Task:
    """Device work on one stream of one rank. ``id`` is its place in :attr:`RankGraph.tasks`.

    ``operators``: descriptions of :mod:`costmodel` that together price it (none: unknown to every model).
    ``kernels``: what a task that stands for several launches consists of, instead of ``operators``.
    ``duration`` of a collective is its transfer time, without waiting for other ranks and with all links to itself;
    ``links``: what it uses of them on this rank's side, as (name, share of the link's rate that it then takes).
    ``load``: what it takes of its GPU, which slows what runs beside it.
    """

    id: int
    name: str
    kind: TaskKind
    stream: int
    operators: tuple[AnyOperator, ...] = ()
    duration: Duration | None = None
    collective: Collective | None = None
    call: int | None = None
    links: tuple[tuple[str, float], ...] = ()
    kernels: tuple[Kernel, ...] = ()
    load: GpuLoad | None = None


# --- host ------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class HostWork:
    """Time that a host thread spends for the operator call ``call``.

    ``records``: how many operators inside the call begin and end in this piece, half of one for each; ``None``: not
    told.
    """

    kind: OverheadKind
    call: int | None = None
    duration: Duration | None = None
    records: float | None = None


@dataclass(frozen=True, slots=True)
class Launch:
    """The call (T4) that puts ``task`` on its stream; the task may start when the call ends."""

    task: int
    duration: Duration | None = None


@dataclass(frozen=True, slots=True)
class RecordEvent:
    """Puts a mark on ``stream``: ``event`` is reached when everything before it there has ended."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class StreamWait:
    """What is put on ``stream`` from here on starts after ``event``. The host does not wait."""

    event: int
    stream: int


@dataclass(frozen=True, slots=True)
class Synchronize:
    """The host waits for a stream, for an event, or (neither given) for all streams of its rank.

    ``duration``: what the call costs once everything it waits for has ended.
    """

    stream: int | None = None
    event: int | None = None
    duration: Duration | None = None
    call: int | None = None


@dataclass(frozen=True, slots=True)
class Signal:
    """Lets the threads of this rank that await ``flag`` go on."""

    flag: int


@dataclass(frozen=True, slots=True)
class Await:
    """The thread waits until ``flag`` is signalled (as the main thread waits for autograd's)."""

    flag: int


Action = HostWork | Launch | RecordEvent | StreamWait | Synchronize | Signal | Await


@dataclass(frozen=True, slots=True)
class CallInfo:
    """The operator call behind host and device work, for breakdowns.

    ``tensors``: of its lists, where it takes lists (foreach and fused optimizers); ``gathered``: those that the
    optimizer collected before it, if it is the first such call of its step. ``recomputed``: it is part of a forward
    pass that runs again inside the backward pass (activation checkpointing of a script).
    """

    id: int
    name: str
    phase: Phase = "other"
    parent: int | None = None
    module: str = ""
    tensors: int = 0
    gathered: int = 0
    recomputed: bool = False


@dataclass(frozen=True)
class RankGraph:
    """One rank. ``threads``: name -> actions in program order; every task is launched exactly once.

    ``operator_calls``: how many operators the host calls in one iteration, where ``calls`` are not these: a part of a
    model that runs for every layer and micro-batch has its calls there once, compiled code calls few of its operators.
    ``ranges``: those that a script named.
    """

    rank: int
    threads: Mapping[str, tuple[Action, ...]]
    tasks: tuple[Task, ...]
    calls: Mapping[int, CallInfo] = field(default_factory=dict)
    operator_calls: int | None = None
    ranges: NamedRanges = field(default_factory=NamedRanges)

    def __post_init__(self) -> None:
        launched = [action.task for action in self.actions() if isinstance(action, Launch)]
        if sorted(launched) != list(range(len(self.tasks))):
            raise ValueError(f"rank {self.rank}: every task needs exactly one launch, in order of their ids")
        if any(task.id != place for place, task in enumerate(self.tasks)):
            raise ValueError(f"rank {self.rank}: a task's id is its place")

    def actions(self) -> Iterator[Action]:
        """All actions of the host, those of one thread after those of another, each thread's in its order."""
        for actions in self.threads.values():
            yield from actions


@dataclass(frozen=True)
class ExecutionGraph:
    """One iteration of one or more ranks. ``multiplicity``: how many alike ranks each entry of ``ranks`` stands for.

    The ranks of the graph must be able to meet each other: a collective between ranks that stand for others (the two
    ends of a pipeline's transfer) names those of the graph, not the ones that they stand for.
    """

    ranks: tuple[RankGraph, ...]
    multiplicity: Mapping[int, int] = field(default_factory=dict)
    source: str = ""


def operator_counts(graph: ExecutionGraph) -> Mapping[AnyOperator, int]:
    """Count how often each operator runs in ``graph``."""
    return Counter(record for rank in graph.ranks for task in rank.tasks for record in task.operators)
