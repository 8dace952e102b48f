"""Writes the program of one rank: host actions, tasks on streams, events between streams."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from costmodel.any_operator import AnyOperator
from e2e.graph import (
    Action,
    Await,
    CallInfo,
    Collective,
    HostWork,
    Launch,
    RankGraph,
    RecordEvent,
    Signal,
    StreamWait,
    Task,
    TaskKind,
)
from e2e.operators import Phase
from e2e.parallelism.pieces import Item, Meeting, Ready, Work

# Streams of a rank. Every direction of point-to-point messages has its own: a message that waits for its peer must not
# hold up others, as in batched NCCL calls.
COMPUTE, TENSOR, REDUCE, GATHER = 0, 1, 2, 3
SEND_NEXT, SEND_PREVIOUS, RECEIVE_PREVIOUS, RECEIVE_NEXT = 4, 5, 6, 7


@dataclass
class RankWriter:
    """``calls``: of the captured operators; calls of communication are added. ``groups``: the ranks that meet inside
    layers, by the names of :mod:`e2e.parallelism.markers`.
    """

    rank: int
    calls: Mapping[int, CallInfo]
    groups: Mapping[str, tuple[int, ...]]
    threads: dict[str, list[Action]] = field(default_factory=lambda: {"main": []})
    tasks: list[Task] = field(default_factory=list)
    phase: Phase = "forward"
    _thread: str = "main"
    _events: int = 0
    _flags: int = 0
    _sequences: dict[str, int] = field(default_factory=dict)
    _added: dict[tuple[str, Phase], CallInfo] = field(default_factory=dict)
    _awaited: int | None = None  # event of a collective that the kernel after the next waits for
    _next_call: int = field(init=False)

    def __post_init__(self) -> None:
        self._next_call = max(self.calls, default=-1) + 1

    def play(self, items: Iterable[Item]) -> Iterator[Ready]:
        """Writes captured ``items``; gives back gradients as they become ready, for the caller to act on."""
        append = self.threads[self._thread].append
        for item in items:
            if isinstance(item, Work):
                self._play_work(item)
            elif isinstance(item, Ready):
                yield item
            elif isinstance(item, Meeting):
                self._meet(item)
            else:
                append(item)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """The autograd thread works inside; the main one waits for it."""
        go, back = self._flags, self._flags + 1
        self._flags += 2
        self.threads["main"] += [Signal(go), Await(back)]
        self.threads.setdefault("autograd", []).append(Await(go))
        self._thread, self.phase = "autograd", "backward"
        try:
            yield
        finally:
            self.threads["autograd"].append(Signal(back))
            self._thread, self.phase = "main", "forward"

    def kernel(self, name: str, operators: tuple[AnyOperator, ...], stream: int = COMPUTE) -> None:
        """A kernel that no capture has, with the host's time around it."""
        call = self._call(name)
        self._host("T1", call)
        self._host("T2", call)
        self._launch(name, "kernel", operators, stream, call)
        self._host("T3", call)

    def collective(
        self, kind: str, group: str, ranks: tuple[int, ...], size_bytes: int, stream: int, sequence: int | None = None
    ) -> None:
        """A collective on ``stream``, which it may enter as soon as that is free; see :meth:`after`."""
        call = self._call(NAMES[kind])
        if sequence is None:
            sequence = self._sequences[group] = self._sequences.get(group, -1) + 1
        self._host("T1", call)
        self._host("T2", call)
        self._launch(NAMES[kind], "collective", (), stream, call, Collective(kind, group, ranks, sequence, size_bytes))
        self._host("T3", call)

    def mark(self, stream: int) -> int:
        """An event at the present end of ``stream``."""
        self._events += 1
        self.threads[self._thread].append(RecordEvent(self._events, stream))
        return self._events

    def await_mark(self, event: int, stream: int) -> None:
        """What comes on ``stream`` waits for ``event``."""
        self.threads[self._thread].append(StreamWait(event, stream))

    def after(self, stream: int, other: int) -> None:
        """What comes on ``stream`` waits for what is on ``other`` so far."""
        self.await_mark(self.mark(other), stream)

    def finish(self) -> RankGraph:
        calls = {**self.calls, **{info.id: info for info in self._added.values()}}
        threads = {name: tuple(actions) for name, actions in self.threads.items()}
        return RankGraph(self.rank, threads, tuple(self.tasks), calls)

    def _meet(self, item: Meeting) -> None:
        """A collective between two operators: both wait, but for an early one."""
        group = f"{item.group} of rank {self.rank}"
        sequence = self._sequences[group] = self._sequences.get(group, -1) + 1
        self.after(TENSOR, COMPUTE)
        collective = Collective(item.kind, group, self.groups[item.group], sequence, item.size_bytes)
        self._launch(NAMES[item.kind], "collective", (), TENSOR, item.call, collective)
        if item.early:
            self._awaited = self.mark(TENSOR)
        else:
            self.after(COMPUTE, TENSOR)

    def _play_work(self, item: Work) -> None:
        place = len(self.tasks)
        task = Task(place, item.name, item.kind, COMPUTE, item.operators, item.duration, None, item.call)
        self.tasks.append(replace(task, kernels=item.kernels) if item.kernels else task)
        self.threads[self._thread].append(Launch(place, item.launch))
        if self._awaited is not None:
            self.await_mark(self._awaited, COMPUTE)
            self._awaited = None

    def _launch(
        self,
        name: str,
        kind: TaskKind,
        operators: tuple[AnyOperator, ...],
        stream: int,
        call: int | None,
        collective: Collective | None = None,
    ) -> None:
        place = len(self.tasks)
        self.tasks.append(Task(place, name, kind, stream, operators, None, collective, call))
        self.threads[self._thread].append(Launch(place))

    def _host(self, kind: str, call: int) -> None:
        self.threads[self._thread].append(HostWork(kind, call))  # type: ignore[arg-type]

    def _call(self, name: str) -> int:
        key = (name, self.phase)
        if key not in self._added:
            self._added[key] = CallInfo(self._next_call, name, self.phase)
            self._next_call += 1
        return self._added[key].id


# Names under which profiles show the calls, so that tables of host overheads know them.
NAMES = {
    "all_reduce": "c10d::allreduce_",
    "all_gather": "c10d::_allgather_base_",
    "reduce_scatter": "c10d::_reduce_scatter_base_",
    "all_to_all": "c10d::alltoall_base_",
    "send": "c10d::send",
    "recv": "c10d::recv_",
}
