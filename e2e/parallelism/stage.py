"""One pipeline stage of a step, written from captured parts: passes, messages, gradients, optimizer.

Data parallelism as in PyTorch's DistributedDataParallel (gradients copied into buckets, all-reduced while the backward
pass goes on) or after the backward pass, as DeepSpeed's engine does without ZeRO. Sharded data parallelism as FSDP2:
every layer is gathered before it runs (the next one while it runs) and its gradients are reduce-scattered after it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from costmodel.device_operators import Elementwise, Rearrangement
from e2e.graph import RankGraph
from e2e.parallelism.groups import Groups
from e2e.parallelism.pieces import Item, Name, Pieces
from e2e.parallelism.pipeline import Command
from e2e.parallelism.spec import ParallelSpec
from e2e.parallelism.writer import (
    COMPUTE,
    GATHER,
    RECEIVE_NEXT,
    RECEIVE_PREVIOUS,
    REDUCE,
    SEND_NEXT,
    SEND_PREVIOUS,
    RankWriter,
)

FIRST_BUCKET_BYTES = 2**20  # kDefaultFirstBucketBytes of torch/csrc/distributed/c10d/reducer.hpp
SIZES = {2: "bfloat16", 4: "float32"}


@dataclass(frozen=True)
class Style:
    """How a framework does it. ``schedule``: the program of a stage. ``blocking_messages``: computation waits for them.

    ``flatten``: gradients are copied into one buffer after the backward pass, reduced there and copied back.
    """

    schedule: Callable[[ParallelSpec, int], Sequence[Command]]
    blocking_messages: bool = False
    flatten: bool = False


@dataclass(frozen=True)
class StagePlan:
    """What a stage is made of.

    ``chunks``: for each of its parts of the model the names of what it holds, in order. ``parameter_bytes``: of one
    rank, before sharding, by name and parameter. ``boundary_bytes``: the activations between two parts on one rank.
    ``tied_bytes``: of the word embedding that the first and the last stage share. ``optimizer_bytes``: what the
    optimizer needs for a while besides parameters, gradients and state.
    """

    spec: ParallelSpec
    stage: int
    layers: int
    pieces: Pieces
    chunks: tuple[tuple[Name, ...], ...]
    parameter_bytes: Mapping[Name, Sequence[int]]
    element_bytes: int
    boundary_bytes: int
    tied_bytes: int
    optimizer: tuple[Item, ...]
    style: Style
    optimizer_bytes: int = 0

    def captured(self, name: Name) -> Name:
        """Name of the captured part that stands for part ``name`` of the model."""
        return self.pieces.captured(name, self.layers)

    def size(self, name: Name) -> int:
        """Bytes of the parameters of part ``name``."""
        return sum(self.parameter_bytes[self.captured(name)])

    @property
    def names(self) -> tuple[Name, ...]:
        return tuple(name for chunk in self.chunks for name in chunk)


def write_stage(plan: StagePlan) -> RankGraph:
    """The rank that stands for the stage, unpriced."""
    return _Stage(plan).write()


class _Stage:
    def __init__(self, plan: StagePlan) -> None:
        self.plan, self.spec = plan, plan.spec
        self.groups = Groups(plan.spec, plan.stage)
        inside = {"tp": self.groups.tensor, "cp": self.groups.context}
        self.writer = RankWriter(self.groups.rank, plan.pieces.calls, inside)
        self.sharded = plan.spec.sharing == 3
        self.gradients_sharded = plan.spec.sharing >= 2
        self.reduced_early = plan.spec.overlap and not plan.style.flatten
        self.bucket = 0
        self.first_bucket = True
        self.pending: list[int] = []  # gradients copied into buckets, for the copies back
        # Layers that are whole at present: the event of their all-gather, ``None`` once it has been copied out.
        self.gathered: dict[Name, int | None] = {}
        self.done = 0

    def write(self) -> RankGraph:
        commands = self.plan.style.schedule(self.spec, self.plan.stage)
        last = {each.chunk: place for place, each in enumerate(commands) if each.action == "backward"}
        for place, command in enumerate(commands):
            if command.action == "forward":
                self._forward(command)
            elif command.action == "backward":
                self._backward(command, place == last[command.chunk])
            else:
                self._message(command)
        self._reduce_rest()
        self._share_tied()
        self._optimize()
        return self.writer.finish()

    # --- passes --------------------------------------------------------------------------------------

    def _forward(self, command: Command) -> None:
        names = self.plan.chunks[command.chunk]
        for place, name in enumerate(names):
            self._gather(name)
            self._use_gathered(name)
            if place + 1 < len(names):
                self._gather(names[place + 1])
            self._play(self.plan.pieces.forward[self.plan.captured(name)].items)
            if place + 1 < len(names):
                self.gathered.pop(name, None)

    def _backward(self, command: Command, final: bool) -> None:
        """``final``: the last one of this part of the model.

        Sharded gradients are summed over the ranks in every pass, so that whole ones are never added to earlier ones.
        """
        names = tuple(reversed(self.plan.chunks[command.chunk]))
        fresh = command.micro_batch == 0
        parts = self.plan.pieces.backward if fresh or self.gradients_sharded else self.plan.pieces.accumulate
        with self.writer.backward():
            for place, name in enumerate(names):
                captured = self.plan.captured(name)
                self._gather(name)
                self._use_gathered(name)
                if place + 1 < len(names):
                    self._gather(names[place + 1])
                self._play(self._recomputed(name))
                self._play(parts[captured].items, bucketed=(final or self.gradients_sharded) and not self.sharded)
                self.gathered.pop(name, None)
                self._scatter(name, fresh, final)
            if self.gradients_sharded and not self.sharded:
                self._end_of_pass(names, fresh, final)

    def _recomputed(self, name: Name) -> tuple[Item, ...]:
        """What of the forward pass runs again; the parts before and after the layers keep their activations."""
        if not isinstance(name, int) or self.spec.recompute == "none":
            return ()
        pieces, captured = self.plan.pieces, self.plan.captured(name)
        return (pieces.forward if self.spec.recompute == "full" else pieces.core)[captured].items

    def _play(self, items: Iterable[Item], bucketed: bool = False) -> None:
        for gradient in self.writer.play(items):
            if bucketed and self.reduced_early:
                self._into_bucket(gradient.size_bytes)

    # --- messages between stages ---------------------------------------------------------------------

    def _message(self, command: Command) -> None:
        """Along the pipeline: activations to the next part, their gradients back; the parts of a stage go round."""
        forward = command.action.endswith("forward")
        part = command.chunk * self.spec.pp + self.plan.stage
        sending = command.action.startswith("send")
        ahead = forward == sending
        other = (part + (1 if ahead else -1)) % self.spec.pp
        edge = part if ahead else part - 1
        group = f"{'activations' if forward else 'gradients'} {edge}-{edge + 1}"
        stream = {(True, True): SEND_NEXT, (True, False): SEND_PREVIOUS}.get((sending, ahead))
        stream = stream if stream is not None else (RECEIVE_NEXT if ahead else RECEIVE_PREVIOUS)
        if sending or self.plan.style.blocking_messages:
            self.writer.after(stream, COMPUTE)
        kind = "send" if sending else "recv"
        ranks = self.groups.pair(other)
        self.writer.collective(kind, group, ranks, self.plan.boundary_bytes, stream, command.micro_batch)
        if not sending or self.plan.style.blocking_messages:
            self.writer.after(COMPUTE, stream)

    # --- sharded parameters --------------------------------------------------------------------------

    def _gather(self, name: Name) -> None:
        """All ranks of the group put together the parameters of ``name``, on a stream of their own."""
        if not self.sharded or name in self.gathered or self.plan.size(name) == 0:
            return
        share = -(-self.plan.size(name) // self.spec.shards)
        self.writer.kernel("fsdp::all_gather_copy_in", (self._move("concat", share),), GATHER)
        group = f"shards of stage {self.plan.stage}"
        self.writer.collective("all_gather", group, self.groups.sharded, share, GATHER)
        self.gathered[name] = self.writer.mark(GATHER)

    def _use_gathered(self, name: Name) -> None:
        event = self.gathered.get(name)
        if event is None:
            return
        self.gathered[name] = None
        self.writer.await_mark(event, COMPUTE)
        self.writer.kernel("fsdp::split_with_sizes_copy", (self._move("split", self.plan.size(name)),))
        # The next gather may reuse the buffer once this one has been copied out.
        self.writer.after(GATHER, COMPUTE)

    def _scatter(self, name: Name, fresh: bool, final: bool) -> None:
        """Sums the gradients of ``name`` over the group; each rank keeps its share."""
        if not self.sharded or self.plan.size(name) == 0:
            return
        size = self.plan.size(name)
        self.writer.after(REDUCE, COMPUTE)
        self.writer.kernel("fsdp::chunk_cat", (self._move("concat", size),), REDUCE)
        self._scatter_bytes(size)
        self._keep_share(size, fresh, final)

    def _scatter_bytes(self, size: int) -> None:
        group = f"gradients of stage {self.plan.stage}"
        self.writer.collective("reduce_scatter", group, self.groups.sharded, size, REDUCE)

    def _keep_share(self, size: int, fresh: bool, final: bool) -> None:
        """Of gradients of ``size`` bytes: added to the share of earlier passes, and over the replicas at the end."""
        share = -(-size // self.spec.shards)
        if not fresh:
            self.writer.kernel("aten::add_", (self._add(share),), REDUCE)
        if final and self.spec.copies > 1:
            self.writer.collective("all_reduce", f"replicas {self.plan.stage}", self.groups.replicated, share, REDUCE)

    def _end_of_pass(self, names: Sequence[Name], fresh: bool, final: bool) -> None:
        """ZeRO 2: what the buckets of this pass still hold, then the shares. Tied weights come with the last part."""
        size = sum(self.plan.size(name) for name in names)
        self.bucket += max(size - self.done - self.bucket, 0)
        self._reduce_bucket()
        self._keep_share(size, fresh, final)
        self.done = 0

    # --- gradients of replicas -----------------------------------------------------------------------

    def _into_bucket(self, size: int) -> None:
        """A ready gradient is copied into its bucket, divided by the number of ranks; a full bucket is reduced."""
        if self.spec.contributors == 1:
            return
        self.writer.kernel("aten::mul_out", (self._scale(size),))
        if not self.gradients_sharded:
            self.pending.append(size)
        self.bucket += size
        limit = FIRST_BUCKET_BYTES if self.first_bucket else self.spec.bucket_mb * 2**20
        if self.bucket >= limit:
            self._reduce_bucket()

    def _reduce_bucket(self) -> None:
        if self.bucket == 0:
            return
        self.writer.after(REDUCE, COMPUTE)
        self._sum_gradients(self.bucket)
        self.done += self.bucket
        self.bucket, self.first_bucket = 0, False

    def _sum_gradients(self, size: int) -> None:
        if self.gradients_sharded:
            self._scatter_bytes(size)
        else:
            self.writer.collective("all_reduce", f"data of stage {self.plan.stage}", self.groups.data, size, REDUCE)

    def _reduce_rest(self) -> None:
        """After the last backward pass: gradients not reduced yet, and copies from the buckets."""
        writer, total = self.writer, sum(self.plan.size(name) for name in self.plan.names)
        writer.phase = "backward"
        if self.spec.contributors > 1 and not self.gradients_sharded:
            if self.reduced_early:
                self.bucket += max(total - self.done - self.bucket, 0)
                self._reduce_bucket()
            else:
                self._reduce_all(total)
        writer.after(COMPUTE, REDUCE)
        for size in self.pending:
            writer.kernel("aten::copy_", (self._move("copy", size),))

    def _reduce_all(self, total: int) -> None:
        """One buffer of all gradients."""
        if self.plan.style.flatten:
            self.writer.kernel("aten::cat", (self._move("concat", total),))
        self.writer.after(REDUCE, COMPUTE)
        self._sum_gradients(total)
        self.writer.after(COMPUTE, REDUCE)
        if self.plan.style.flatten:
            self.writer.kernel("aten::div_", (self._scale(total),))
            self.pending += [size for name in self.plan.names for size in self._parameters(name)]

    def _parameters(self, name: Name) -> Sequence[int]:
        return self.plan.parameter_bytes[self.plan.captured(name)]

    def _share_tied(self) -> None:
        """First and last stage hold the word embedding both: their gradients are summed."""
        if self.plan.tied_bytes == 0 or self.spec.pp == 1 or self.plan.stage not in (0, self.spec.pp - 1):
            return
        other = self.spec.pp - 1 - self.plan.stage
        share = -(-self.plan.tied_bytes // self.spec.shards) if self.gradients_sharded else self.plan.tied_bytes
        self.writer.after(REDUCE, COMPUTE)
        self.writer.collective("all_reduce", "embedding", self.groups.pair(other), share, REDUCE)
        self.writer.after(COMPUTE, REDUCE)

    # --- optimizer -----------------------------------------------------------------------------------

    def _optimize(self) -> None:
        self.writer.phase = "optimizer"
        for _ in self.writer.play(self.plan.optimizer):
            pass
        if self.spec.sharing in (1, 2):
            total = sum(self.plan.size(name) for name in self.plan.names)
            self.writer.after(GATHER, COMPUTE)
            share = -(-total // self.spec.shards)
            self.writer.collective(
                "all_gather", f"shards of stage {self.plan.stage}", self.groups.sharded, share, GATHER
            )
            self.writer.after(COMPUTE, GATHER)

    # --- small kernels -------------------------------------------------------------------------------

    def _move(self, kind: str, size: int) -> Rearrangement:
        elements = max(size // self.plan.element_bytes, 1)
        return Rearrangement(kind, elements, elements, SIZES[self.plan.element_bytes])

    def _add(self, size: int) -> Elementwise:
        return Elementwise("add", max(size // self.plan.element_bytes, 1), 2, 1, 0, SIZES[self.plan.element_bytes])

    def _scale(self, size: int) -> Elementwise:
        return Elementwise("mul", max(size // self.plan.element_bytes, 1), 1, 1, 0, SIZES[self.plan.element_bytes])
