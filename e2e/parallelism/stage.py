"""One pipeline stage of a step, written from captured parts: passes, messages, gradients, optimizer.

Data parallelism as in PyTorch's DistributedDataParallel (gradients copied into buckets, all-reduced during the backward
pass) or after the backward pass, as in DeepSpeed's engine without ZeRO. Sharded data parallelism as in FSDP2: every
layer is gathered before it runs (the next one while it runs) and its gradients are reduce-scattered after it. Sharded
optimizer state as in Megatron-LM's distributed optimizer: buckets are reduce-scattered, parameters gathered after the
step or, layer by layer, during the next forward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from e2e.parallelism.host_offload import HostAdam, HostSeconds, HostShards
from e2e.parallelism.pieces import Item, Name, Pieces, Ready
from e2e.parallelism.pipeline import Command, commands, part_of, stage_of
from e2e.parallelism.spec import ParallelSpec
from e2e.parallelism.stage_writer import (
    COMPUTE,
    GATHER,
    RECEIVE_NEXT,
    RECEIVE_PREVIOUS,
    REDUCE,
    RELOAD,
    SEND_NEXT,
    SEND_PREVIOUS,
    SHARDS,
    ParameterFamily,
    StageGroups,
    StageKernels,
    StageWriter,
)
from e2e.step.execution_graph import RankGraph, RankWriter

NORM_BYTES = 4  # a number in FP32
FIRST_BUCKET_BYTES = 2**20  # kDefaultFirstBucketBytes of torch/csrc/distributed/c10d/reducer.hpp


@dataclass(frozen=True)
class StagePlan:
    """Contents of a stage."""

    spec: ParallelSpec
    stage: int
    layers: int
    pieces: Pieces
    # For each of its parts of the model the names of its contents, in order.
    chunks: tuple[tuple[Name, ...], ...]
    # Bytes of one rank, before sharding, by name and parameter.
    parameter_bytes: Mapping[Name, Sequence[int]]
    element_bytes: int
    # Activations between two parts on one rank.
    boundary_bytes: int
    # Word embedding shared by the first and the last stage.
    tied_bytes: int
    optimizer: tuple[Item, ...]
    # Temporary tensors of the optimizer.
    optimizer_bytes: int = 0
    # Experts among the parameters of a part, if divided among ranks.
    expert_bytes: Mapping[Name, int] = field(default_factory=dict)
    # Parameters of a part that are not trained.
    frozen_bytes: Mapping[Name, int] = field(default_factory=dict)
    # Expert-parallel ranks in one node (None: all).
    node_ranks: int | None = None
    # Speed of updates on the host.
    host: HostSeconds = field(default_factory=HostSeconds)
    # See :class:`e2e.capture.models.stacks.Stack`, also for the next two fields.
    keeps_last: bool = False
    accumulates: bool = False
    shards_stay: bool = False

    def captured(self, name: Name) -> Name:
        """Return the name of the captured part that represents part ``name`` of the model."""
        return self.pieces.captured(name, self.layers)

    def runs_again(self, name: Name) -> bool:
        """True if part ``name`` is recomputed: never the ends, and one in ``recompute_every`` layers."""
        every = self.spec.recompute_every
        return isinstance(name, int) and self.spec.recompute != "none" and name % every == every - 1

    def sizes(self, name: Name) -> Sequence[int]:
        """Return the bytes of each parameter of part ``name``."""
        return self.parameter_bytes[self.captured(name)]

    def size(self, name: Name) -> int:
        """Return the bytes of the parameters of part ``name``."""
        return sum(self.sizes(name))

    def trained(self, name: Name) -> int:
        """Return the bytes of the trained parameters of part ``name``."""
        return self.size(name) - self.frozen_bytes.get(self.captured(name), 0)

    def size_of(self, family: ParameterFamily, names: Iterable[Name], frozen: bool = False) -> int:
        """Return the bytes of the trained parameters of one family in the parts ``names``; with ``frozen`` of all
        parameters.
        """
        names = list(names)
        experts = sum(self.expert_bytes.get(self.captured(name), 0) for name in names)
        size = self.size if frozen else self.trained
        return experts if family.experts else sum(size(name) for name in names) - experts

    def shares(self, families: Sequence[ParameterFamily], name: Name, frozen: bool = False) -> list[int]:
        """Return the bytes of a rank's shares of the trained parameters of part ``name``.

        One share per parameter if all ranks share them in the same way and all are trained, otherwise one per family.
        With ``frozen`` also of parameters that are not trained.
        """
        if len(families) == 1 and (frozen or not self.frozen_bytes):
            return [families[0].share(size) for size in self.sizes(name)]
        return [family.share(self.size_of(family, [name], frozen)) for family in families]

    def stays_whole(self, names: Sequence[Name], place: int) -> bool:
        """True if ``zero=3`` keeps the part at ``place`` of ``names`` gathered after its forward pass: the last part,
        which begins the backward pass, and the last layer if the stack keeps it.
        """
        return place + 1 == len(names) or (self.keeps_last and names[place] == self.layers - 1)

    @property
    def names(self) -> tuple[Name, ...]:
        """Names of the parts of the model on this stage, in order."""
        return tuple(name for chunk in self.chunks for name in chunk)


def write_stage(plan: StagePlan) -> RankGraph:
    """Write the rank that represents the stage, without prices."""
    return _Stage(plan).write()


@dataclass
class _Bucket:
    """Bucket of gradients of a family: bytes ``held`` and already reduced (``done``); the ``first`` bucket is
    smaller.
    """

    family: ParameterFamily
    held: int = 0
    done: int = 0
    first: bool = True


class _Stage:
    def __init__(self, plan: StagePlan) -> None:
        self.plan, self.spec = plan, plan.spec
        self.groups = StageGroups(plan.spec, plan.stage)
        inside = {
            "tp": self.groups.tensor,
            "cp": self.groups.context,
            "ep": self.groups.expert,
            "ep inside nodes": self.groups.expert_inside(plan.node_ranks),
            "ep across nodes": self.groups.expert_across(plan.node_ranks),
        }
        self.rank = RankWriter(self.groups.rank, dict(plan.pieces.calls))
        self.writer = StageWriter(self.rank, inside, overlapped=plan.spec.overlap_experts)
        self.sharded = plan.spec.sharing == 3
        self.gradients_sharded = plan.spec.sharing >= 2
        self.kernels = StageKernels(plan.spec, plan.element_bytes)
        # Parts whose parameters are still in shares after the optimizer of the previous step.
        self.ungathered: set[Name] = set(plan.names) if plan.spec.overlap_gather else set()
        self.buckets = {family.experts: _Bucket(family) for family in self.groups.families}
        self.pending: list[int] = []  # gradients copied into buckets, to be copied back
        # Layers that are whole now -> event of their all-gather, None after the copy out of its buffer.
        self.gathered: dict[Name, int | None] = {}
        on_host = self.sharded and self.spec.offloaded_state > 0
        self.host_shards = HostShards(self.writer, self.kernels, plan.host, plan.shards_stay) if on_host else None

    def write(self) -> RankGraph:
        program = commands(self.spec, self.plan.stage)
        passes = [(place, each) for place, each in enumerate(program) if each.message is None]
        last = {each.chunk: place for place, each in passes if each.direction == "backward"}
        if self.ungathered:
            self.rank.after(GATHER, COMPUTE)  # work of the previous step on that stream
        for place, command in enumerate(program):
            if command.message is not None:
                self._message(command)
            elif command.direction == "forward":
                self._forward(command)
            else:
                self._backward(command, place == last[command.chunk])
        if self.spec.inference:
            return self.rank.finish()
        self._reduce_rest()
        self._share_tied()
        self._optimize()
        return self.rank.finish()

    # --- passes --------------------------------------------------------------------------------------

    def _forward(self, command: Command) -> None:
        names = self.plan.chunks[command.chunk]
        for place, name in enumerate(names):
            ahead = names[place : place + 2]
            for each in ahead:
                self._put_together(each)
            self._await_together(name)
            self._whole(names, place)
            self._play(self.plan.pieces.forward[self.plan.captured(name)].items)
            if not self.plan.stays_whole(names, place):
                self.gathered.pop(name, None)

    def _backward(self, command: Command, final: bool) -> None:
        """Write a backward pass; ``final``: the last one of this part of the model.

        Sharded gradients are summed over the ranks in every pass, so that whole ones are never added to earlier ones.
        """
        names = tuple(reversed(self.plan.chunks[command.chunk]))
        fresh = command.micro_batch == 0
        parts = self.plan.pieces.backward if fresh or self.gradients_sharded else self.plan.pieces.accumulate
        with self.writer.backward():
            for place, name in enumerate(names):
                captured = self.plan.captured(name)
                self._whole(names, place)
                self._play(self._recomputed(name))
                self._play(parts[captured].items, bucketed=(final or self.gradients_sharded) and not self.sharded)
                self.gathered.pop(name, None)
                self._scatter(name, fresh, final)
            self._end_of_pass(names, fresh, final)

    def _recomputed(self, name: Name) -> tuple[Item, ...]:
        """Return the recomputed items; the parts before and after the layers keep their activations."""
        if not isinstance(name, int) or not self.plan.runs_again(name):
            return ()
        return self.plan.pieces.again(self.spec.recompute)[self.plan.captured(name)].items

    def _play(self, items: Iterable[Item], bucketed: bool = False) -> None:
        for gradient in self.writer.play(items):
            if bucketed:
                self._into_bucket(gradient)

    # --- messages between stages ---------------------------------------------------------------------

    def _message(self, command: Command) -> None:
        """Write a message of the pipeline: activations to the next part, gradients back; parts of a stage form a
        ring.
        """
        forward = command.direction == "forward"
        part = part_of(self.spec, self.plan.stage, command.chunk)
        sending = command.message == "send"
        ahead = forward == sending
        other = stage_of(self.spec, part + (1 if ahead else -1))
        edge = part if ahead else part - 1
        group = f"{'activations' if forward else 'gradients'} {edge}-{edge + 1}"
        stream = {(True, True): SEND_NEXT, (True, False): SEND_PREVIOUS}.get((sending, ahead))
        stream = stream if stream is not None else (RECEIVE_NEXT if ahead else RECEIVE_PREVIOUS)
        if sending:
            self.rank.after(stream, COMPUTE)
        kind = "send" if sending else "recv"
        ranks = self.groups.pair(other)
        self.writer.collective(kind, group, ranks, self.plan.boundary_bytes, stream, command.micro_batch)
        if not sending:
            self.rank.after(COMPUTE, stream)

    # --- sharded parameters --------------------------------------------------------------------------

    def _whole(self, names: Sequence[Name], place: int) -> None:
        """Gather the part at ``place`` before it runs, and the following parts while it runs."""
        self._gather(names[place])
        self._use_gathered(names[place])
        for following in names[place + 1 : place + 1 + self.spec.prefetch]:
            self._gather(following)

    def _put_together(self, name: Name) -> None:
        """All-gather the parameters of ``name`` that the ranks updated in shares, in place, before their first use."""
        if name not in self.ungathered:
            return
        self.ungathered.discard(name)
        for family, size in self._sizes([name]):
            self._meet("all_gather", f"shards{family.label} of stage", family.sharded, family.share(size), GATHER)
            self.gathered[name] = self.rank.record_event(GATHER)

    def _await_together(self, name: Name) -> None:
        event = None if self.sharded else self.gathered.pop(name, None)
        if event is not None:
            self.rank.wait_event(event, COMPUTE)

    def _gather(self, name: Name) -> None:
        """All-gather the parameters of ``name`` among all ranks of the group, on a separate stream."""
        if not self.sharded or name in self.gathered or self.plan.size(name) == 0:
            return
        shares = [(family, family.share(size)) for family, size in self._sizes([name], frozen=True)]
        if self.host_shards is not None:
            self.host_shards.fetch(self.plan.shares(self.groups.families, name, frozen=True))
        size = sum(size for _, size in shares)
        stays = self.host_shards is not None and self.host_shards.stay
        copy_in = self.kernels.move("concat", size) if stays else self.kernels.shards_in(size)
        self.writer.kernel("fsdp::all_gather_copy_in", (copy_in,), GATHER)
        self.rank.after(SHARDS, GATHER)
        for family, share in shares:
            self._meet("all_gather", f"shards{family.label} of stage", family.sharded, share, SHARDS)
        self.gathered[name] = self.rank.record_event(SHARDS)

    def _use_gathered(self, name: Name) -> None:
        event = self.gathered.get(name)
        if event is None:
            return
        self.gathered[name] = None
        self.rank.wait_event(event, COMPUTE)
        self.writer.kernel("fsdp::split_with_sizes_copy", (self.kernels.move("split", self.plan.size(name)),))
        # The next gather may reuse the buffer after the copy out of it.
        self.rank.after(GATHER, COMPUTE)

    def _scatter(self, name: Name, fresh: bool, final: bool) -> None:
        """Sum the gradients of ``name`` over the group; each rank keeps its share."""
        if not self.sharded or self.plan.trained(name) == 0:
            return
        size = self.plan.trained(name)
        self.rank.after(REDUCE, COMPUTE)
        self.writer.kernel("fsdp::chunk_cat", (self.kernels.gradients_in("concat", size),), REDUCE)
        self.rank.after(SHARDS, REDUCE)
        for family, part in self._sizes([name]):
            self._sum_gradients(family, part, SHARDS)
        self.rank.after(REDUCE, SHARDS)
        for family, part in self._sizes([name]):
            cast = self.kernels.share_to_master(family.share(part))
            if cast is not None:
                self.writer.kernel("aten::_to_copy", (cast,), REDUCE)
            self._keep_share(family, part, fresh, final)
        if self.host_shards is not None:
            self.host_shards.put(self.plan.shares(self.groups.families, name), fresh)

    def _sizes(self, names: Sequence[Name], frozen: bool = False) -> Iterator[tuple[ParameterFamily, int]]:
        """Yield families with trained parameters in ``names`` (``frozen``: or others), with their bytes."""
        for family in self.groups.families:
            size = self.plan.size_of(family, names, frozen)
            if size:
                yield family, size

    def _meet(self, kind: str, group: str, ranks: Sequence[int], size: int, stream: int) -> None:
        if len(ranks) > 1:
            self.writer.collective(kind, f"{group} {self.plan.stage}", tuple(ranks), size, stream)

    def _keep_share(self, family: ParameterFamily, size: int, fresh: bool, final: bool) -> None:
        """Add the share of ``size`` bytes of gradients to that of earlier passes, and sum it over the replicas at the
        end; gradients for the host are summed over the replicas before.
        """
        share = family.share(size)
        if not fresh and self.host_shards is None:
            self.writer.kernel("aten::add_", (self.kernels.add(share),), REDUCE)
        if final or self.host_shards is not None:
            self._sum_replicas(family, share)

    def _sum_replicas(self, family: ParameterFamily, share: int) -> None:
        """Sum a share of gradients over the sets of sharding ranks (hybrid sharding)."""
        size = self.kernels.on_the_way(share)
        self._meet("all_reduce", f"replicas{family.label}", family.replicated, size, REDUCE)

    def _end_of_pass(self, names: Sequence[Name], fresh: bool, final: bool) -> None:
        """Reduce the rest of this pass's buckets (ZeRO 2), then add the shares. Tied weights are in the last part."""
        if self.sharded or not self.gradients_sharded:
            return
        for family, size in self._sizes(names):
            bucket = self.buckets[family.experts]
            self._reduce_rest_of(bucket, size)
            self._keep_share(family, size, fresh, final)
            bucket.done = 0

    # --- gradients of replicas -----------------------------------------------------------------------

    def _into_bucket(self, gradient: Ready) -> None:
        """Copy a complete gradient into its bucket, divided by the number of ranks; reduce a full bucket.

        If products accumulate gradients in the buffer, nothing is copied, and the collective averages
        (``average_in_collective`` of NVIDIA's recipes). Without overlap the copies are the same (DeepSpeed's
        ``allreduce_bucket`` flattens gradients and copies them back), and everything is reduced after the backward
        pass.
        """
        bucket = self.buckets.get(gradient.experts, self.buckets[False])
        if len(bucket.family.data) == 1:
            return
        if not self.plan.accumulates:
            self.writer.kernel("aten::mul_out", (self.kernels.gradients_in("mul", gradient.size_bytes),))
            if not self.spec.sharing:
                self.pending.append(gradient.size_bytes)
        if not self.spec.overlap:
            return
        bucket.held += gradient.size_bytes
        limit = FIRST_BUCKET_BYTES if bucket.first else self.spec.bucket_mb * 2**20
        if bucket.held >= limit:
            self._reduce_bucket(bucket)

    def _reduce_bucket(self, bucket: _Bucket) -> None:
        if bucket.held == 0:
            return
        self.rank.after(REDUCE, COMPUTE)
        self._sum_bucket(bucket.family, bucket.held)
        bucket.done += bucket.held
        bucket.held, bucket.first = 0, False

    def _reduce_rest_of(self, bucket: _Bucket, total: int) -> None:
        """Reduce the rest of ``total`` bytes."""
        bucket.held += max(total - bucket.done - bucket.held, 0)
        self._reduce_bucket(bucket)

    def _sum_bucket(self, family: ParameterFamily, size: int) -> None:
        self._sum_gradients(family, size)
        if self.spec.sharing == 1:
            self._sum_replicas(family, family.share(size))

    def _sum_gradients(self, family: ParameterFamily, size: int, stream: int = REDUCE) -> None:
        """Sum gradients; ``size``: bytes of the gradients as the backward pass makes them."""
        size = self.kernels.on_the_way(size)
        if self.spec.sharing:
            self._meet("reduce_scatter", f"gradients{family.label} of stage", family.sharded, size, stream)
        else:
            self._meet("all_reduce", f"data{family.label} of stage", family.data, size, stream)

    def _reduce_rest(self) -> None:
        """After the last backward pass, reduce the remaining gradients and copy from the buckets."""
        self.writer.phase = "backward"
        if self.spec.contributors > 1 and not self.gradients_sharded:
            if self.spec.overlap:
                for family, size in self._sizes(self.plan.names):
                    self._reduce_rest_of(self.buckets[family.experts], size)
            else:
                self._reduce_all()
        self.rank.after(COMPUTE, REDUCE)
        for size in self.pending:
            self.writer.kernel("aten::copy_", (self.kernels.gradients_out(size),))

    def _reduce_all(self) -> None:
        """Reduce all gradients of a family at once."""
        self.rank.after(REDUCE, COMPUTE)
        for family, size in self._sizes(self.plan.names):
            self._sum_bucket(family, size)
        self.rank.after(COMPUTE, REDUCE)

    def _share_tied(self) -> None:
        """Sum the gradients of the word embedding, which the first and last stage both hold."""
        if self.plan.tied_bytes == 0 or self.spec.pp == 1 or self.plan.stage not in (0, self.spec.pp - 1):
            return
        other = self.spec.pp - 1 - self.plan.stage
        share = -(-self.plan.tied_bytes // self.spec.shards) if self.spec.sharing else self.plan.tied_bytes
        self.rank.after(REDUCE, COMPUTE)
        self.writer.collective("all_reduce", "embedding", self.groups.pair(other), share, REDUCE)
        self.rank.after(COMPUTE, REDUCE)

    # --- optimizer -----------------------------------------------------------------------------------

    def _optimize(self) -> None:
        self.writer.phase = "optimizer"
        if self.spec.clip:
            self._clip()
        for _ in self.writer.play(self.plan.optimizer):
            pass
        if self.spec.offloaded_state:
            self._optimize_on_host()
            self.rank.after(COMPUTE, RELOAD)
        if self.spec.sharing in (1, 2) and not self.spec.overlap_gather:
            self.rank.after(GATHER, COMPUTE)
            for family, size in self._sizes(self.plan.names):
                share = family.share(size)
                self._meet("all_gather", f"shards{family.label} of stage", family.sharded, share, GATHER)
            self.rank.after(COMPUTE, GATHER)

    def _clip(self) -> None:
        """Clip gradients: the norm of the rank's gradients, summed over all ranks with other gradients, and a
        multiplication.

        As ``clip_grad_norm_`` of torch/nn/utils/clip_grad.py, ``clip_by_total_norm_fp32`` of Megatron-Core. Gradients
        of parameters updated on the host are clipped there.
        """
        sizes = (family.share(size) if self.spec.sharing else size for family, size in self._sizes(self.plan.names))
        owned = int(sum(sizes) * (1.0 - self.spec.offloaded_state))
        if owned:
            self.writer.kernel("aten::_foreach_norm", (self.kernels.norm(owned),))
        self.rank.after(REDUCE, COMPUTE)
        if self.spec.sharing:
            self._meet("all_reduce", "norm of stage", self.groups.families[0].sharded, NORM_BYTES, REDUCE)
        own = f"norm of layers of rank {self.rank.rank}"
        for group, ranks in ((own, self.groups.tensor), ("norm of model", self.groups.stages)):
            if len(ranks) > 1:
                self.writer.collective("all_reduce", group, ranks, NORM_BYTES, REDUCE)
        self.rank.after(COMPUTE, REDUCE)
        if owned:
            self.writer.kernel("aten::_foreach_mul_", (self.kernels.scaled(owned),))

    def _optimize_on_host(self) -> None:
        """Update the host's share of the parameters, part by part; with ``zero=3`` all of them."""
        if self.host_shards is not None:
            sizes = self._sizes(self.plan.names)
            self.host_shards.update(sum(family.share(size) for family, size in sizes))
            return
        adam = HostAdam(self.writer, self.kernels, self.plan.host.update)
        for name in self.plan.names:
            held = sum(family.share(size) if self.spec.sharing else size for family, size in self._sizes([name]))
            adam.update(int(held * self.spec.offloaded_state))
        adam.finish()
