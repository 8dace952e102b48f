"""Peak memory of a pipeline stage: its passes replayed, with every allocation, through PyTorch's caching allocator.

The parts of the stage allocate and free as in their captures (:mod:`e2e.parallelism.part_memory`), in the order
of the schedule, in addition to the permanent storages. Additions of each form of parallelism:

* FSDP (``zero=3``; torch/distributed/fsdp/_fully_shard): a layer is gathered into a buffer on a separate stream and
  copied out, while the buffer of the next layer exists already; the parts before and after the layers are one group,
  gathered until the backward pass ends; gradients are copied into a buffer in the type of the reduction, on the stream
  of the passes (``foreach_reduce``); its result, the share, is on the stream of the reduction.
* FSDP in stages of torch.distributed.pipelining (``zero=1``): parameters are gathered before the first micro-batch and
  stay whole, as do gradients in the type of the reduction, until the last micro-batch of a part of the model
  (``backward_maybe_with_nosync`` of stage.py). Every micro-batch has separate receive buffers for activations and their
  gradients, and the output of a part to the next is kept until the step ends (``output_chunks``).
* The distributed optimizer of Megatron-LM: parameters and FP32 gradients in one buffer each, FP32 masters and moments
  of the share. Products add weight gradients to that buffer and return an empty one to autograd, which Transformer
  Engine keeps for every shape (``get_dummy_wgrad``); those of embedding and head live until their part ends.
* DistributedDataParallel: buckets in addition to the gradients.
* ``zero=1|2`` without such a buffer (DeepSpeed's stages, which reduce in the same way): a gradient is copied into a
  bucket; with ``zero=2`` it is then freed, and only the rank's share stays.
* Inference: all storages of a part are freed after its forward pass.
* Offloading: the host's share of the optimizer's state is not on the GPU, with ``zero=3`` neither are gradients nor
  shards, except DeepSpeed's shards, in the type of the passes.
* Transformer Engine casts weights to 8 bits once per step: both copies, of the weight and of its transpose, are
  permanent, whatever micro-batches are in flight (``get_weight_workspace`` of its module/base.py). With Megatron's
  distributed optimizer and FP32 masters they are the parameters (``fp8_params`` of NeMo's, ``fp8_param_gather`` of
  Megatron-Bridge's recipes), without 16-bit copies. With ``zero=3`` weights are cast after they are gathered, and freed
  together with the gathered weights.
* Recomputation: at the end of a layer's forward pass only the kept storages remain; before its backward pass the
  forward pass is replayed.

The optimizer's state is allocated in the first step, in memory left by activations; steps are replayed until the effect
of that is over. Not counted are the CUDA context, NCCL's buffers and other memory outside PyTorch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace

from e2e.capture.models.stacks import Stack
from e2e.parallelism.part_memory import MemoryEvent, PartMemory
from e2e.parallelism.pieces import Name
from e2e.parallelism.pipeline import Command, part_of, passes
from e2e.parallelism.spec import ParallelSpec
from e2e.parallelism.stage import StagePlan
from e2e.parallelism.stage_writer import MASTER, MASTER_BYTES, StageGroups, StageKernels
from e2e.step.memory import AllocationReplay, MemoryUsage, Role, workspace_bytes

FP32_BYTES = 4
# Streams with separate blocks: passes, gathers, reductions.
PASSES, GATHERED, REDUCED = range(3)
# Workspace of PyTorch for cuBLAS, and of Transformer Engine, from Hopper on.
WORKSPACE_BYTES = workspace_bytes("hopper")
STEPS = 3
# Above this number of events replay takes seconds: temporary storages of a pass are merged into one.
MANY_EVENTS = 200_000


@dataclass(frozen=True)
class KeptWeights:
    """Bytes of stored weights, gradients and state per byte of a parameter in the type of the layers."""

    # Share that a rank keeps, if parameters are sharded.
    shard: float = 1.0
    # Gradient.
    gradient: float = 1.0
    # Optimizer state.
    state: float = 2.0
    # True if the shards are the optimizer's FP32 weights, cast when they are gathered.
    own_masters: bool = False
    # True if gradients are also copied into buckets.
    buckets: bool = True
    # True if products add weight gradients to one permanent buffer.
    accumulates: bool = False
    # True if the allocator's segments are expandable.
    expandable: bool = False
    # As in :class:`e2e.capture.models.stacks.Stack`, also for the next two fields.
    keeps_last: bool = False
    pipelining: bool = False
    shards_stay: bool = False


def kept_weights(spec: ParallelSpec, element_bytes: int, stack: Stack | None = None) -> KeptWeights:
    """Return the bytes for AdamW: two moments in the parameter's type or, with master weights, both and the weights in
    FP32.

    Gradients accumulated by ``stack`` are kept in the type of their sum over the ranks (``grad_reduce_in_fp32`` of
    Megatron-Core), FSDP's shards of master weights in FP32.
    """
    full = FP32_BYTES / element_bytes
    kept = KeptWeights()
    if stack is not None:
        kept = replace(
            kept, expandable=stack.expandable, keeps_last=stack.keeps_last, pipelining=stack.pipelining and spec.pp > 1,
            shards_stay=stack.shards_stay,
        )  # fmt: skip
    if spec.inference:
        return replace(kept, state=0.0, buckets=False)
    if spec.sharded_masters:
        shard = 1.0 if spec.offloaded_state and kept.shards_stay else full
        return replace(kept, shard=shard, gradient=full, state=2 * full, own_masters=True)
    state = 3 * full if spec.master_weights else 2.0
    if stack is not None and stack.accumulates:
        gradient = full if spec.reduce_dtype == "float32" else 1.0
        return replace(kept, gradient=gradient, state=state, buckets=False, accumulates=True)
    return replace(kept, state=state)


def stage_memory(plan: StagePlan, keeping: KeptWeights) -> MemoryUsage:
    """Return the peak memory of one rank of ``plan``."""
    spec = _shortened(plan.spec)
    memories = {name: plan.pieces.memory.get(plan.captured(name), PartMemory()) for name in plan.names}
    program = passes(spec, plan.stage)
    each = {name: len(memory.forward) * 2 + len(memory.backward) for name, memory in memories.items()}
    events = sum(each[name] for command in program for name in plan.chunks[command.chunk]) // 2
    if events * STEPS > MANY_EVENTS:
        known = {id(memory): memory.coarse() for memory in plan.pieces.memory.values()}
        memories = {name: known.get(id(memory), memory) for name, memory in memories.items()}
    replay = _Replay(plan, keeping, memories)
    for step in range(STEPS):
        replay.step(program, first=step == 0)
    return replay.usage()


def _shortened(spec: ParallelSpec) -> ParallelSpec:
    """Reduce the number of micro-batches if more change nothing: to the most in flight, and two more."""
    enough = {"1f1b": spec.pp + 2, "interleaved": 4 * spec.pp}
    count = min(spec.micro_batches, enough.get(spec.schedule, spec.micro_batches))
    return replace(spec, micro_batches=count)


@dataclass
class _Replay(AllocationReplay):
    """Replay of the allocations of the stage's rank."""

    plan: StagePlan
    keeping: KeptWeights
    memories: dict[Name, PartMemory]

    def __post_init__(self) -> None:
        super().__init__(self.keeping.expandable)
        self.spec = self.plan.spec
        self.kernels = StageKernels(self.spec, self.plan.element_bytes)
        wide = self.kernels.reduced_dtype == MASTER != self.kernels.dtype
        self.summed = MASTER_BYTES / self.plan.element_bytes if wide else 1.0
        self.families = StageGroups(self.spec, self.plan.stage).families
        self.storages: dict[Hashable, dict[int, None]] = {}  # live storages of each pass through a part
        self._begin("forward")
        # Products add gradients to a permanent buffer of full size, which ``zero=2|3`` do not have.
        self.accumulates = self.keeping.accumulates and self.spec.sharing < 2
        trained = sum(self.plan.trained(name) for name in self.plan.names)
        self.bucket_bytes = min(self.spec.bucket_mb * 2**20, trained)
        # Parameters are shares that are gathered: for every pass, or for all micro-batches of a pipeline.
        self.gathers = self.spec.sharing == 3 or (self.spec.sharing == 1 and self.keeping.pipelining)
        # The 8-bit copies are the parameters, counted as large as 16-bit parameters, which are not stored.
        self.eight_bit_parameters = self.keeping.accumulates and bool(self.spec.sharing) and self.spec.master_weights
        # Gradients of shards and all state are on the host, and shards unless they stay.
        self.on_host = self.spec.sharing == 3 and self.spec.offloaded_state > 0
        self.fetches = self.on_host and not self.keeping.shards_stay
        self.last_gathered: tuple[Name, ...] | None = None
        self.gathered: set[tuple[Name, ...]] = set()
        # Gather group of the parts before and after the layers; each pipeline stage has a group of its own parts only.
        self.root = tuple(name for name in self.plan.names if not isinstance(name, int))
        self._hold_throughout()

    def _begin(self, phase: str) -> None:
        self.moment = (-1, phase)

    # --- blocks --------------------------------------------------------------------------------------

    def _take_storage(self, key: Hashable, storage: int, size: int, role: Role) -> None:
        self.storages.setdefault(key, {})[storage] = None
        self.take((key, storage), size, role)

    def _drop_storage(self, key: Hashable, storage: int) -> None:
        self.storages.get(key, {}).pop(storage, None)
        self.drop((key, storage))

    # --- permanent storages --------------------------------------------------------------------------

    def _hold_throughout(self) -> None:
        plan, spec, keeping = self.plan, self.spec, self.keeping
        for which in range(2 if keeping.accumulates else 1):
            self.take(("workspace", which), WORKSPACE_BYTES, "buffers")
        if self.gathers:
            on_gpu = not self.fetches if spec.sharing == 3 else not spec.master_weights
            for name in plan.names if on_gpu else ():
                for place, size in enumerate(self._shares(name, frozen=True)):
                    self.take(("shard", name, place), size * keeping.shard, "parameters")
        else:
            for name in plan.names:
                for place, size in enumerate(plan.sizes(name)):
                    self.take(("parameter", name, place), size, "parameters")
        if keeping.accumulates:
            # Buffers of parameters and gradients; the original parameters of the layers are freed.
            whole = sum(plan.size(name) for name in plan.names)
            trained = sum(plan.trained(name) for name in plan.names)
            if self.accumulates:
                self.take("gradients", trained * keeping.gradient, "gradients")
            if spec.sharing:
                self.take("parameters", whole, "parameters")
                for key in [key for key in self.blocks if isinstance(key, tuple) and key[0] == "parameter"]:
                    self.drop(key)
        elif keeping.buckets and spec.contributors > 1 and not spec.sharing:
            self.take("buckets", sum(plan.trained(name) for name in plan.names) * self.summed, "buffers")
        if spec.master_weights and not keeping.own_masters:
            self._hold_state("masters", FP32_BYTES / plan.element_bytes)
        if keeping.pipelining:
            for chunk in range(len(plan.chunks)):
                ends = {"activations": self._receives(chunk), "gradients": self._sends(chunk)}
                for kind in (kind for kind, there in ends.items() if there):
                    for micro_batch in range(0 if spec.inference and kind == "gradients" else spec.micro_batches):
                        self.take(("received", kind, chunk, micro_batch), plan.boundary_bytes, "buffers")

    def _hold_state(self, kind: str, factor: float) -> None:
        """Allocate optimizer state for every parameter or this rank's share of it."""
        for name in self.plan.names:
            for place, size in enumerate(self._shares(name) if self.spec.sharing else self._whole(name)):
                # Megatron-Core also keeps its FP32 weights on the GPU (HybridDeviceOptimizer).
                stays = kind == "masters" and self.keeping.accumulates
                held = size if stays else size * (1.0 - self.spec.offloaded_state)
                self.take((kind, name, place), held * factor, "optimizer_state")

    def _receives(self, chunk: int) -> bool:
        """True if another part of the model precedes that of ``chunk``."""
        return part_of(self.spec, self.plan.stage, chunk) > 0

    def _sends(self, chunk: int) -> bool:
        """True if another part of the model follows that of ``chunk``."""
        return part_of(self.spec, self.plan.stage, chunk) + 1 < self.spec.stages

    def _whole(self, name: Name) -> list[int]:
        """Return the bytes of the trained parameters of a part."""
        plan = self.plan
        if not plan.frozen_bytes:
            return list(plan.sizes(name))
        return [plan.trained(name)]

    def _shares(self, name: Name, frozen: bool = False) -> list[int]:
        return self.plan.shares(self.families, name, frozen)

    # --- a step --------------------------------------------------------------------------------------

    def step(self, program: Sequence[Command], first: bool) -> None:
        """Replay all passes and the optimizer; ``first``: first step of the job."""
        last = {each.chunk: place for place, each in enumerate(program) if each.direction == "backward"}
        for old in [key for key in self.blocks if isinstance(key, tuple) and key[0] == "output"]:
            self.drop(old)
        for place, command in enumerate(program):
            names = self.plan.chunks[command.chunk]
            fresh = command.micro_batch == 0
            if command.direction == "forward":
                self._begin("forward")
                self._forward(command, names)
            else:
                self._begin("backward")
                self._backward(command, tuple(reversed(names)), fresh)
                if self.gathers and self.spec.sharing == 1 and place == last[command.chunk]:
                    self._shard_again(names)
        if self.spec.inference:
            return
        self._begin("optimizer")
        self.drop("reduced")
        if first:
            kinds = 2 if not self.spec.master_weights or self.keeping.own_masters else 3
            pieces = ("moments", "squares")
            for piece in pieces:
                self._hold_state(piece, self.keeping.state / kinds)
        if self.accumulates and self.spec.master_weights and self.keeping.gradient == 1.0:
            # FP32 copies of the rank's gradients (``_copy_model_grads_to_main_grads`` of Megatron-Core).
            sizes = (self._shares(name) if self.spec.sharing else self._whole(name) for name in self.plan.names)
            self.take("wide gradients", sum(map(sum, sizes)) * FP32_BYTES / self.plan.element_bytes, "temporary")
            self.drop("wide gradients")
        if not self.accumulates:
            self.take("optimizer", self.plan.optimizer_bytes, "temporary")
            self.drop("optimizer")
            for key in [key for key, (_, role) in self.blocks.items() if role == "gradients"]:
                self.drop(key)

    def _forward(self, command: Command, names: tuple[Name, ...]) -> None:
        for place, name in enumerate(names):
            self._gather(name)
            for following in names[place + 1 : place + self.spec.prefetch]:
                self._gather_ahead(following)
            memory = self.memories[name]
            key = command.micro_batch, command.chunk, name
            received = self._received(command, name)
            if self.plan.runs_again(name):
                kept = memory.kept(self.spec.recompute)
                self._play(memory.forward, key, kept=kept, elsewhere=received)
                for storage in list(self.storages.get(key, ())):
                    if storage not in kept:
                        self._drop_storage(key, storage)
            else:
                self._play(memory.forward, key, elsewhere=received)
            if self.spec.inference:
                for storage in list(self.storages.pop(key, ())):
                    self._drop_storage(key, storage)
            if not self.plan.stays_whole(names, place):
                self._reshard(name)
        self._gathered_last()
        if self.keeping.pipelining and self._sends(command.chunk):
            output = "output", command.chunk, command.micro_batch
            self.take(output, self.plan.boundary_bytes, "activations")

    def _backward(self, command: Command, names: tuple[Name, ...], fresh: bool) -> None:
        for place, name in enumerate(names):
            self._gather(name)
            for following in names[place + 1 : place + 1 + self.spec.prefetch]:
                self._gather_ahead(following)
            memory = self.memories[name]
            key = command.micro_batch, command.chunk, name
            received = self._received(command, name)
            if self.plan.runs_again(name):
                self._play(memory.forward, key, elsewhere=received)
            self._play(memory.backward, key, name=name, fresh=fresh, elsewhere=received)
            for storage in list(self.storages.pop(key, ())):
                self._drop_storage(key, storage)
            self._reshard(name)
            self._reduce(name, fresh)
        for name in self.root:
            if self.spec.sharing == 3 and name in names:
                self._let_go(name)
        if any(name in names for name in self.root):
            self._reduce_root(tuple(name for name in self.root if name in names), fresh)

    def _received(self, command: Command, name: Name) -> frozenset[int]:
        """Return the storages of part ``name`` that are message buffers: the input of the first part, the gradient of
        the output of the last part.
        """
        names, memory = self.plan.chunks[command.chunk], self.memories[name]
        if not self.keeping.pipelining:
            return frozenset()
        found: set[int] = set()
        if name == names[0] and self._receives(command.chunk):
            found |= _largest(event for event in memory.forward if event.storage in memory.given)
        if name == names[-1] and self._sends(command.chunk):
            found |= _largest(event for event in memory.backward if event.storage < 0)
        return frozenset(found)

    def _play(
        self,
        events: Iterable[MemoryEvent],
        key: tuple[int, int, Name],
        name: Name | None = None,
        fresh: bool = True,
        kept: frozenset[int] = frozenset(),
        elsewhere: frozenset[int] = frozenset(),
    ) -> None:
        """Replay the events of one pass through one part.

        ``name``: the part, in its backward pass; ``kept``: storages that are not freed; ``elsewhere``: storages in
        separate buffers.
        """
        role: Role = "temporary" if name is not None else "activations"
        for event in events:
            if event.gradient:
                self._gradient(event, key, name, fresh)
            elif event.storage in elsewhere:
                continue
            elif event.cast_weight and self.spec.sharing < 3:
                if event.size and not self.eight_bit_parameters:
                    self.take(("cast weight", key[1:], event.storage), event.size, "parameters")
            elif event.size:
                self._take_storage(key, event.storage, event.size, role)
            elif event.storage not in kept:
                self._drop_storage(key, event.storage)

    # --- gradients -----------------------------------------------------------------------------------

    def _gradient(self, event: MemoryEvent, key: Hashable, name: Name | None, fresh: bool) -> None:
        """Allocate the gradient of one parameter."""
        if self.accumulates:
            if isinstance(name, int):
                size = event.size // event.alike  # one for all experts of a layer
                self.take(("no gradient", size), size, "buffers")
            else:
                self._take_storage(key, event.storage, event.size, "temporary")
        elif self.spec.sharing >= 2:
            self.take(("gradient", name, event.storage), event.size, "temporary")
            if self.spec.sharing == 2:
                self._into_bucket(event.size)
                self.drop(("gradient", name, event.storage))
        elif fresh:
            factor = max(self.keeping.gradient, self.summed if self.spec.sharing else 1.0)
            self.take(("gradient", name, event.storage), event.size * factor, "gradients")
        else:
            self._take_storage(key, event.storage, event.size, "temporary")
        last = self.spec.micro_batches == 1 or not fresh
        if last and self.spec.sharing == 1 and not self.accumulates and not self.gathers:
            self._into_bucket(event.size)

    def _into_bucket(self, size: int) -> None:
        """Copy a gradient of ``size`` bytes into the reduction buffer."""
        self.drop("reduced")
        self.take("reduced", max(size, self.bucket_bytes) * self.summed, "buffers")

    def _reduce(self, name: Name, fresh: bool) -> None:
        """Sum the gradients of a layer over the sharing ranks, if done layer by layer."""
        if self.spec.sharing >= 2 and isinstance(name, int):
            self._reduce_group((name,), fresh)

    def _reduce_root(self, names: tuple[Name, ...], fresh: bool) -> None:
        if self.spec.sharing >= 2:
            self._reduce_group(names, fresh)

    def _reduce_group(self, names: tuple[Name, ...], fresh: bool) -> None:
        size = sum(self.plan.trained(name) for name in names)
        if not size:
            return
        if self.spec.sharing != 2:
            self.drop("reduced")
            self.take("reduced", size * self.summed, "buffers")
        for key in [key for key in self.blocks if isinstance(key, tuple) and key[0] == "gradient" and key[1] in names]:
            self.drop(key)
        factor = max(self.keeping.gradient, self.summed)
        # DeepSpeed's stage 2 copies the share out of the bucket on the stream of the passes.
        stream = PASSES if self.spec.sharing == 2 else REDUCED
        for name in names:
            for family in self.families:
                share = family.share(self.plan.size_of(family, [name]))
                self.take(("share of gradients", name, family.experts, fresh), share * factor, "gradients", stream)
                if not fresh or self.on_host:
                    self.drop(("share of gradients", name, family.experts, fresh))

    def _shard_again(self, names: tuple[Name, ...]) -> None:
        """Sum the gradients of a part after its last micro-batch, and return its parameters to shares."""
        groups: list[tuple[Name, ...]] = [tuple(name for name in self.root if name in names)]
        groups += [(name,) for name in names if isinstance(name, int)]
        for group in groups:
            if group:
                self._let_go(group[0])
                self._reduce_group(group, fresh=True)

    # --- parameters of FSDP --------------------------------------------------------------------------

    def _gather_ahead(self, name: Name) -> None:
        """Allocate the buffer for gathering the parameters of ``name``'s group."""
        group = self._group(name)
        if self.gathers and group not in self.gathered:
            if self.fetches:  # cast shards are collected before they are copied into the buffer
                for each in group:
                    for place, size in enumerate(self._shares(each, frozen=True)):
                        self.take(("fetched", each, place), size, "buffers", GATHERED)
            size = sum(self.plan.size(each) for each in group)
            self.take(("gathering", group), size, "buffers", GATHERED)
            for key in [key for key in self.blocks if isinstance(key, tuple) and key[0] == "fetched"]:
                self.drop(key)

    def _gather(self, name: Name) -> None:
        """Allocate the whole parameters of ``name``, copied out of the buffer; in the forward pass the buffer stays
        until the next copy.
        """
        group = self._group(name)
        if not self.gathers or group in self.gathered:
            return
        self._gather_ahead(name)
        for each in group:
            for place, size in enumerate(self.plan.sizes(each)):
                self.take(("whole", each, place), size, "buffers")
        self.gathered.add(group)
        self._gathered_last()
        self.last_gathered = group
        if self.moment[1] == "backward":
            self._gathered_last()

    def _gathered_last(self) -> None:
        """Free the buffer that was copied out last."""
        if self.last_gathered is not None:
            self.drop(("gathering", self.last_gathered))
        self.last_gathered = None

    def _group(self, name: Name) -> tuple[Name, ...]:
        return (name,) if isinstance(name, int) else self.root

    def _reshard(self, name: Name) -> None:
        """Free a layer's whole parameters; those of the root stay, and all of a pipeline that keeps them."""
        if isinstance(name, int) and self.spec.sharing == 3:
            self._let_go(name)

    def _let_go(self, name: Name) -> None:
        group = self._group(name)
        if group in self.gathered:
            self.gathered.discard(group)
            for each in group:
                for place in range(len(self.plan.sizes(each))):
                    self.drop(("whole", each, place))


def _largest(events: Iterable[MemoryEvent]) -> set[int]:
    """Return the largest storage that ``events`` allocate, if any."""
    found = max((event for event in events if event.size), key=lambda event: event.size, default=None)
    return set() if found is None else {found.storage}
