"""Writer of a pipeline stage's captured parts, its communication groups, and the kernels around its collectives.

Ranks are numbered as in Megatron-LM, tensor-parallel neighbours first.

    rank = ((stage * replicas + replica) * cp + part) * tp + place,   replica = outer (dp) * fsdp + inner

Experts that are not split over ``tp`` (``etp=1``) are on neighbours too: ``ep`` of them hold all experts. All ranks of
a stage do the same: the graph has the first of each stage, which represents ``replicas * cp * tp`` of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.device_work import Elementwise, Rearrangement, Reduction
from e2e.parallelism.pieces import Called, Item, LayerCollective, Ready, Work
from e2e.parallelism.spec import ParallelSpec
from e2e.step.collective_names import ACROSS_NODES, EAGER_CALLS, INSIDE_NODES
from e2e.step.execution_graph import AUTOGRAD, MAIN, Collective, RankWriter, Task, TaskKind
from e2e.step.operator_trace import Phase


@dataclass(frozen=True)
class ParameterFamily:
    """Parameters of a stage whose gradients are summed over the same ranks: all but experts, or experts divided among
    ranks.
    """

    experts: bool
    # Ranks that hold the same parameters.
    data: Sequence[int]
    # Ranks that shard them.
    sharded: Sequence[int]
    # First ranks of such sets.
    replicated: Sequence[int]

    @property
    def label(self) -> str:
        """Suffix in names of groups."""
        return " of experts" if self.experts else ""

    def share(self, size: int) -> int:
        """Return a rank's share of ``size`` bytes."""
        return -(-size // len(self.sharded))


@dataclass(frozen=True)
class StageGroups:
    """Communication groups of the first rank of ``stage``."""

    spec: ParallelSpec
    stage: int

    @cached_property
    def rank(self) -> int:
        """Rank that represents the stage."""
        return self.rank_of(self.stage)

    def rank_of(self, stage: int) -> int:
        """Return the rank that represents ``stage``."""
        return stage * self.spec.contributors * self.spec.tp

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Ranks of all stages of the same replica, including this one."""
        return tuple(self.rank_of(stage) for stage in range(self.spec.pp))

    @cached_property
    def tensor(self) -> tuple[int, ...]:
        """Ranks that split the layers."""
        return tuple(range(self.rank, self.rank + self.spec.tp))

    @cached_property
    def context(self) -> tuple[int, ...]:
        """Ranks that split the sequences."""
        return tuple(self.rank + part * self.spec.tp for part in range(self.spec.cp))

    @cached_property
    def expert(self) -> tuple[int, ...]:
        """Ranks that divide the experts."""
        return tuple(self.rank + place * self.spec.expert_tensor for place in range(self.spec.ep))

    def expert_inside(self, node_ranks: int | None) -> tuple[int, ...]:
        """Return the expert-parallel ranks in the first rank's node, which holds ``node_ranks``."""
        return self.expert[: node_ranks or len(self.expert)]

    def expert_across(self, node_ranks: int | None) -> tuple[int, ...]:
        """Return the expert-parallel ranks at the first rank's place in every node."""
        return self.expert[:: node_ranks or len(self.expert)]

    @cached_property
    def families(self) -> tuple[ParameterFamily, ...]:
        """Parameter families of a stage; the second, of experts, is left out if experts are not held by other ranks."""
        return tuple(self._family(experts) for experts in ((False, True) if self.spec.experts_apart else (False,)))

    def _family(self, experts: bool) -> ParameterFamily:
        spec = self.spec
        apart = spec.expert_set if experts else spec.tp
        shards = spec.expert_shards if experts else spec.shards
        alike = spec.contributors * spec.tp // apart
        return ParameterFamily(
            experts,
            range(self.rank, self.rank + alike * apart, apart),
            range(self.rank, self.rank + shards * apart, apart),
            [self.rank + outer * spec.shards * spec.tp for outer in range(spec.copies)],
        )

    def pair(self, other: int) -> tuple[int, int]:
        """Return the ranks of this stage and of stage ``other``, the lower rank first."""
        low, high = sorted((self.rank, self.rank_of(other)))
        return low, high


SIZES = {2: "bfloat16", 4: "float32"}
MASTER = "float32"
MASTER_BYTES = 4


@dataclass(frozen=True)
class StageKernels:
    """Kernels around collectives. Sizes are bytes of parameters or gradients in the model's type, of ``element_bytes``
    each.
    """

    spec: ParallelSpec
    element_bytes: int

    @property
    def dtype(self) -> str:
        """Type of parameters and gradients in the passes."""
        return SIZES[self.element_bytes]

    @property
    def reduced_dtype(self) -> str:
        """Type of gradients that are summed over ranks."""
        return MASTER if self.spec.reduce_dtype == "float32" else self.dtype

    @property
    def share_dtype(self) -> str:
        """Type of the share of summed gradients that a rank keeps: FSDP uses the type of its shards."""
        return MASTER if self.spec.sharded_masters else self.reduced_dtype

    def shard_bytes(self, size: int) -> int:
        """Return the bytes of a share in the type of the ``zero=3`` optimizer, of parameters or summed gradients."""
        wide = self.spec.sharded_masters and self.dtype != MASTER
        return size * MASTER_BYTES // self.element_bytes if wide else size

    def on_the_way(self, size: int) -> int:
        """Return the bytes of gradients of ``size`` bytes as sent between ranks."""
        return size * MASTER_BYTES // self.element_bytes if self.reduced_dtype == MASTER else size

    def move(self, kind: str, size: int) -> Rearrangement:
        """Return a copy of parameters or gradients."""
        elements = self._elements(size)
        return Rearrangement(kind, elements, elements, self.dtype)

    def shards_in(self, size: int) -> Rearrangement | Elementwise:
        """Return the copy of shards of ``size`` bytes into the gather buffer; FP32 masters are cast to the type of the
        passes.
        """
        if self.spec.sharded_masters and self.dtype != MASTER:
            return self._cast(size, MASTER, self.dtype)
        return self.move("concat", size)

    def gradients_in(self, kind: str, size: int) -> Rearrangement | Elementwise:
        """Return the copy of gradients into the reduction buffer: moved (``concat``) or divided by the number of ranks
        (``mul``).
        """
        if kind == "concat" and self.reduced_dtype == self.dtype:
            return self.move(kind, size)
        return self._cast(size, self.dtype, self.reduced_dtype, "mul" if kind == "mul" else "to")

    def gradients_out(self, size: int) -> Rearrangement | Elementwise:
        """Return the copy of summed gradients out of the buffer."""
        if self.reduced_dtype == self.dtype:
            return self.move("copy", size)
        return self._cast(size, self.reduced_dtype, self.dtype)

    def share_to_master(self, size: int) -> Elementwise | None:
        """Return the cast of a share of gradients to the type of the FP32 shard, or None if it was summed in that
        type.
        """
        return (
            None if self.share_dtype == self.reduced_dtype else self._cast(size, self.reduced_dtype, self.share_dtype)
        )

    def norm(self, size: int) -> Reduction:
        """Return the norm of shares of summed gradients of ``size`` bytes: one number per 64k of them, then one."""
        return Reduction("norm", self._elements(size), 1, self.share_dtype)

    def scaled(self, size: int) -> Elementwise:
        """Return the in-place scaling of shares of summed gradients."""
        return Elementwise("mul", self._elements(size), 1, 1, 0, self.share_dtype)

    def add(self, size: int) -> Elementwise:
        """Return the addition of a share of gradients to that of earlier passes."""
        return Elementwise("add", self._elements(size), 2, 1, 0, self.share_dtype)

    def _cast(self, size: int, dtype: str, output: str, kind: str = "to") -> Elementwise:
        output = "" if output == dtype else output
        return Elementwise(kind, self._elements(size), 1, 1, 0, dtype, output)

    def _elements(self, size: int) -> int:
        return max(size // self.element_bytes, 1)


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
