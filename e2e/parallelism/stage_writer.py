"""Writer of the captured parts of a model on a rank: kernels, collectives inside layers, uncaptured operations."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from costmodel.operators.any_operator import AnyOperator
from e2e.parallelism.layers.pieces import Called, Item, LayerCollective, Ready, Work
from e2e.step.collective_names import ACROSS_NODES, EAGER_CALLS, INSIDE_NODES
from e2e.step.execution_graph import Collective, Task, TaskKind
from e2e.step.operator_trace import Phase
from e2e.step.rank_writer import AUTOGRAD, MAIN, RankWriter

# Streams of a rank. Every direction of point-to-point messages has its own stream: a message that waits for its peer
# must not delay others, as in batched NCCL calls.
COMPUTE, TENSOR, REDUCE, GATHER = 0, 1, 2, 3
SEND_NEXT, SEND_PREVIOUS, RECEIVE_PREVIOUS, RECEIVE_NEXT = 4, 5, 6, 7
# All-gathers and reduce-scatters of FSDP use one process group, whose collectives NCCL runs in sequence.
SHARDS = 8
# Hop inside a node of tokens that cross nodes: kernels forward data of the other hop piece by piece, or provide it
# (DeepEP's csrc/kernels/internode.cu).
IN_NODE = 9
# Copies to the host, and back.
OFFLOAD, RELOAD = 20, 21
# Offset of the message streams for micro-batches that enter a pipeline at its other end.
OTHER_WAY = 10


@dataclass
class StageWriter:
    """Writer of the parts of a rank."""

    rank: RankWriter
    # Ranks of collectives inside layers, by the names of :data:`e2e.step.collective_names.INSIDE_LAYERS`.
    groups: Mapping[str, tuple[int, ...]]
    phase: Phase = "forward"
    # True if the exchange of tokens with experts overlaps the computation of another micro-batch, so that only the next
    # exchange waits for it.
    overlapped: bool = False
    _calls: dict[tuple[str, Phase], int] = field(default_factory=dict)
    _in_flight: list[int] = field(default_factory=list)  # events of an exchange that the next exchange waits for
    _first_hop: tuple[str, int] | None = None  # group of the last collective, and the event it begins with
    _awaited: int | None = None  # event of a collective that the kernel after the next waits for

    def play(self, items: Iterable[Item]) -> Iterator[Ready]:
        """Write captured ``items``; yield gradients as they become complete."""
        for item in items:
            if isinstance(item, Work):
                self._work(item)
            elif isinstance(item, Ready):
                yield item
            elif isinstance(item, LayerCollective):
                self._inside_layer(item)
            elif isinstance(item, Called):
                self._count(item.operators)
            else:
                self.rank.append(item)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Context of the autograd thread; the main thread waits for it."""
        self.rank.switch(AUTOGRAD)
        self.phase = "backward"
        try:
            yield
            self._exchanged()
        finally:
            self.rank.switch(MAIN)
            self.phase = "forward"

    def kernel(
        self, name: str, operators: tuple[AnyOperator, ...], stream: int = COMPUTE, kind: TaskKind = "kernel"
    ) -> None:
        """Write a kernel or copy that is in no capture, with its host work."""
        self._count(1)
        self.rank.unit(Task(self.rank.next_task, name, kind, stream, operators, call=self.call(name)))

    def collective(
        self, kind: str, group: str, ranks: tuple[int, ...], size_bytes: int, stream: int, sequence: int | None = None
    ) -> None:
        """Write a collective on ``stream``, which it may enter as soon as the stream is free; see
        :meth:`RankWriter.after`.
        """
        number = self.rank.next_in(group) if sequence is None else sequence
        collective = Collective(kind, group, ranks, number, size_bytes)
        self._count(1)
        self.rank.unit(self._task(collective, stream, self.call(EAGER_CALLS[kind])))

    def _count(self, operators: int) -> None:
        """Count operators called by the host."""
        self.rank.operator_calls = (self.rank.operator_calls or 0) + operators

    def _inside_layer(self, item: LayerCollective) -> None:
        """Write a collective between two operators, which both wait, unless it is early."""
        group = f"{item.group} of rank {self.rank.rank}"
        ranks, number = self.groups[item.group], self.rank.next_in(group)
        collective = Collective(item.kind, group, ranks, number, item.size_bytes, pieces=item.pieces)
        stream = IN_NODE if item.group == INSIDE_NODES else TENSOR
        before, self._first_hop = self._first_hop, None
        second = before is not None and {before[0], item.group} == {INSIDE_NODES, ACROSS_NODES}
        begin = before[1] if before is not None and second else self.rank.record_event(COMPUTE)
        self.rank.wait_event(begin, stream)
        self.rank.enqueue(self._task(collective, stream, item.call))
        if not second:
            self._first_hop = (item.group, begin)
        if self.overlapped and item.group.startswith("ep"):
            if not second:
                self._exchanged()
            self._in_flight.append(self.rank.record_event(stream))
        elif item.early:
            self._awaited = self.rank.record_event(TENSOR)
        else:
            self.rank.after(COMPUTE, stream)

    def _exchanged(self) -> None:
        """Make the computation wait for the previous exchange, if any."""
        for event in self._in_flight:
            self.rank.wait_event(event, COMPUTE)
        self._in_flight.clear()

    def _work(self, item: Work) -> None:
        place = self.rank.next_task
        task = Task(place, item.name, item.kind, COMPUTE, item.operators, item.duration, None, item.call)
        self.rank.enqueue(replace(task, kernels=item.kernels) if item.kernels else task, item.launch)
        self._first_hop = None
        if self._awaited is not None:
            self.rank.wait_event(self._awaited, COMPUTE)
            self._awaited = None

    def _task(self, collective: Collective, stream: int, call: int) -> Task:
        name = EAGER_CALLS[collective.kind]
        return Task(self.rank.next_task, name, "collective", stream, (), None, collective, call)

    def call(self, name: str) -> int:
        """Return the call that represents all calls with this name and phase."""
        key = (name, self.phase)
        if key not in self._calls:
            self._calls[key] = self.rank.call(*key)
        return self._calls[key]
