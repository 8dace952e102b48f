"""Peak memory of a step by role: from the lifetimes of its tensors, or by a replay of its allocations through PyTorch's
caching allocator.

Lifetimes (:func:`peak_memory`) are counted per storage, since views share one. A storage lives from the call in which
it first appears (from the start of the step, if it existed before) until it is freed. Captures record when it is
freed; for other traces the last use is taken, which is too early if Python still holds a reference. Each storage takes
whole blocks of the caching allocator. Recorded traces get no more than this: fragmentation, the CUDA context and
library workspaces are not counted.

A captured step is replayed through PyTorch's allocator, step after step (:func:`replayed_memory`). A capture records
for every storage the call that makes it and the call before which it is freed. Weights and inputs exist before the
first step; the optimizer's state is allocated where its first step begins, in memory left by activations, and stays;
gradients stay until ``zero_grad`` of the next step (at the place recorded by the capture, or at the beginning of the
step if nobody calls it), or throughout if ``zero_grad`` only fills them with zeros. Every thread and stream with matrix
products has a cuBLAS workspace, convolutions their copies in another layout. Steps are replayed until the allocator
reserves no more memory. Not counted: the CUDA context and loaded kernels (0.3 to 1.5 GB of the ``nvidia-smi`` figure),
other workspaces of cuDNN, scratch memory inside single operators.

The allocator (:class:`CachingAllocator`) follows c10/cuda/CUDACachingAllocator.cpp with its default settings. Sizes are
rounded up to 512 bytes. Blocks of at most 1 MiB come from segments of 2 MiB, larger ones from segments of 20 MiB or,
from 10 MiB on, from a segment of their own size rounded up to 2 MiB. Each stream has its own blocks. The smallest free
block that is large enough is used, at the lowest address if several match, and split if the remainder is large enough.
Freed blocks are merged with their free neighbours; no segment is returned while the driver has free memory. With
``expandable_segments:True`` each stream has one segment for small and one for large blocks, which grows at its end;
every remainder of 512 bytes is split off, and the free end counts as large as it can grow, so that an earlier free
block is preferred (``should_split``, ``get_free_block``).

Elsewhere: ``--parallel`` models are replayed in ``e2e/parallelism/stage_memory.py`` (also by :class:`AllocationReplay`,
whose caller decides the order), tables placed by ``--sharding`` summed in ``e2e/sharding/sharded_step.py``;
``e2e/explain/rank_figures.py`` checks whether a rank's memory suffices.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Container, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, Literal, get_args

from costmodel.operators.layers import DTYPE_BYTES
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor, tensors

# Smallest unit (kMinBlockSize).
BLOCK_BYTES = 512
SMALL_BYTES = 1 << 20  # kSmallSize
SMALL_SEGMENT = 2 << 20  # kSmallBuffer
LARGE_SEGMENT = 20 << 20  # kLargeBuffer
OWN_SEGMENT_FROM = 10 << 20  # kMinLargeAlloc
ROUNDED_TO = 2 << 20  # kRoundLarge


def whole_blocks(size: int) -> int:
    """Round ``size`` in bytes up to the allocator's unit."""
    return -(-size // BLOCK_BYTES) * BLOCK_BYTES


@dataclass(eq=False, slots=True)
class _Block:
    """Block of a segment, linked with its neighbours in the segment."""

    address: int
    size: int
    pool: tuple[int, bool]
    free: bool = False
    before: _Block | None = None
    behind: _Block | None = None


class CachingAllocator:
    """Simulated allocator.

    ``allocated`` and ``reserved``: current bytes; ``most_reserved``: peak of ``reserved``. ``expandable``: the
    allocator setting ``expandable_segments``.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.expandable = expandable
        self._ends: dict[tuple[int, bool], _Block] = {}  # last block of each expandable segment
        self.allocated = self.reserved = self.most_reserved = 0
        self._next = 0
        self._free: dict[tuple[int, bool], list[tuple[int, int]]] = {}
        self._blocks: dict[int, _Block] = {}  # free blocks by address

    def allocate(self, size: int, stream: int = 0) -> _Block:
        """Return a block for ``size`` bytes on ``stream``, to be freed by :meth:`release`."""
        size = max(whole_blocks(size), BLOCK_BYTES)
        pool = (stream, size <= SMALL_BYTES)
        block = self._best(pool, size) or self._segment(pool, size)
        rest = block.size - size
        if rest >= BLOCK_BYTES if pool[1] or self.expandable else rest > SMALL_BYTES:
            self._split(block, size)
        self.allocated += block.size
        return block

    def release(self, block: _Block) -> None:
        """Free ``block`` and merge it with its free neighbours."""
        self.allocated -= block.size
        before, behind = block.before, block.behind
        if before is not None and before.free:
            self._take(before)
            before.size += block.size
            before.behind = behind
            if behind is not None:
                behind.before = before
            if self._ends.get(block.pool) is block:
                self._ends[block.pool] = before
            block = before
        if behind is not None and behind.free:
            self._take(behind)
            if self._ends.get(block.pool) is behind:
                self._ends[block.pool] = block
            block.size += behind.size
            block.behind = behind.behind
            if block.behind is not None:
                block.behind.before = block
        self._give(block)

    def _best(self, pool: tuple[int, bool], size: int) -> _Block | None:
        free = self._free.setdefault(pool, [])
        place = bisect_left(free, (size, -1))
        if place == len(free):
            return None
        block = self._blocks[free[place][1]]
        if block is self._ends.get(pool) and place + 1 < len(free):
            block = self._blocks[free[place + 1][1]]
        self._take(block)
        return block

    def _segment(self, pool: tuple[int, bool], size: int) -> _Block:
        if self.expandable:
            return self._grown(pool, size)
        if pool[1]:
            whole = SMALL_SEGMENT
        elif size < OWN_SEGMENT_FROM:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // ROUNDED_TO) * ROUNDED_TO
        block = _Block(self._next, whole, pool)
        self._next += whole
        self.reserved += whole
        self.most_reserved = max(self.most_reserved, self.reserved)
        return block

    def _grown(self, pool: tuple[int, bool], size: int) -> _Block:
        """Return a free block at the end of the stream's segment, grown by as many pages as ``size`` needs."""
        page = SMALL_SEGMENT if pool[1] else LARGE_SEGMENT
        end = self._ends.get(pool)
        free = end if end is not None and end.free else None
        missing = -(-(size - (free.size if free is not None else 0)) // page) * page
        self.reserved += missing
        self.most_reserved = max(self.most_reserved, self.reserved)
        if free is not None:
            self._take(free)
            free.size += missing
            return free
        address = end.address + end.size if end is not None else len(self._ends) << 50
        block = _Block(address, missing, pool, before=end)
        if end is not None:
            end.behind = block
        self._ends[pool] = block
        return block

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.size - size, block.pool, before=block, behind=block.behind)
        if block.behind is not None:
            block.behind.before = rest
        if self._ends.get(block.pool) is block:
            self._ends[block.pool] = rest
        block.behind, block.size = rest, size
        self._give(rest)

    def _give(self, block: _Block) -> None:
        block.free = True
        self._blocks[block.address] = block
        insort(self._free.setdefault(block.pool, []), (block.size, block.address))

    def _take(self, block: _Block) -> None:
        block.free = False
        del self._blocks[block.address]
        free = self._free[block.pool]
        del free[bisect_left(free, (block.size, block.address))]


ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
# Dimensions of the weights of a layer's experts, which are one parameter; no other transformer parameter has as many.
EXPERT_DIMENSIONS = 3
OTHER_BYTES = {"int16": 2, "uint16": 2, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1}

# Operators that write into existing memory.
_COPY = "aten::copy_"
_WRITES = frozenset((_COPY, "aten::index_copy_", "aten::index_put_", "aten::_index_put_impl_"))
# Operators by which ``zero_grad`` clears gradients that stay, perhaps before the forward pass.
_CLEARS = frozenset(("aten::zero_", "aten::_foreach_zero_", "aten::fill_", "aten::detach_"))
Role = Literal[
    "parameters", "gradients", "optimizer_state", "inputs", "activations", "temporary", "buffers", "cache", "reserve"
]  # fmt: skip
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """Memory in use after the host has made ``call``: ``levels`` in bytes, in the order of :data:`ROLES`."""

    call: int
    levels: tuple[int, ...]


@dataclass(frozen=True)
class MemoryUsage:
    """Peak memory of a step in bytes, with its breakdown by role.

    Roles: ``parameters``: held throughout and read by the model (weights, buffers); ``optimizer_state``: held
    throughout and read by the optimizer alone; ``inputs``: integer data held throughout; ``activations``: made in the
    forward pass and alive after it; ``buffers``: of communication and libraries; ``cache``: keys and values of earlier
    tokens, extended by a step without backward pass; ``reserve``: most memory reserved by the caching allocator beyond
    the memory in use at the peak (0 if it is not simulated); ``temporary``: everything else.
    """

    peak_bytes: int
    breakdown: dict[Role, int]
    # Operator call at the peak; -1 for an empty trace.
    call: int
    operator: str
    # Memory in use over the step, if known.
    course: tuple[MemoryMoment, ...] = field(default=(), repr=False, compare=False)

    @property
    def allocated_bytes(self) -> int:
        """Peak without the allocator's reserve: the least memory that the step can run in."""
        return self.peak_bytes - self.breakdown.get("reserve", 0)

    def within(self, capacity: int) -> MemoryUsage:
        """Return the usage on a GPU of ``capacity`` bytes, where the allocator returns unused memory before it
        fails.
        """
        peak = min(self.peak_bytes, max(capacity, self.allocated_bytes))
        if peak == self.peak_bytes:
            return self
        return replace(self, peak_bytes=peak, breakdown={**self.breakdown, "reserve": peak - self.allocated_bytes})


@dataclass
class Lifetime:
    """Lifetime of a storage of a trace."""

    # Bytes, in whole blocks.
    size: int = 0
    # Indices of the first and last call of its life, and of the last call that uses it.
    first: int = 0
    last: int = 0
    used: int = 0
    # True if it exists before the trace.
    existed: bool = False
    integer: bool = False
    # Phases in which it is used.
    phases: set[str] = field(default_factory=set)
    first_phase: str = ""
    # True if it is the ``.grad`` of a parameter.
    gradient: bool = False
    # Number of experts in a gradient of expert weights.
    alike: int = 1
    # True if a forward pass writes a part of it.
    added_to: bool = False
    # True if it is state of an optimizer that updates each parameter in the backward pass.
    state: bool = False


@dataclass(frozen=True)
class KeptStorages:
    """Storages of a compiled step: those of the eager step that it never makes, and storage -> index of the last call
    that reads it.
    """

    never_made: frozenset[int] = frozenset()
    read_last: Mapping[int, int] = field(default_factory=dict)

    def lifetimes(self, trace: OperatorTrace) -> dict[int, Lifetime]:
        """Return the lifetimes in the compiled step of an eager ``trace``."""
        found = {key: each for key, each in lifetimes(trace).items() if key not in self.never_made}
        for storage, place in self.read_last.items():
            if storage in found:
                found[storage].last = max(found[storage].last, place)
                found[storage].phases.add(trace.calls[place].phase)
        return found


AS_EAGER = KeptStorages()


def peak_memory(trace: OperatorTrace) -> MemoryUsage:
    """Return the peak memory of ``trace`` on its GPU, with the bytes of each role at the peak."""
    storages = lifetimes(trace)
    if not storages:
        return MemoryUsage(0, _empty(), -1, "")
    change = [0] * (len(trace.calls) + 1)
    for storage in storages.values():
        change[storage.first] += storage.size
        change[storage.last + 1] -= storage.size
    level = peak = place = 0
    for position, step in enumerate(change[:-1]):
        level += step
        if level > peak:
            peak, place = level, position
    alive = [storage for storage in storages.values() if storage.first <= place <= storage.last]
    breakdown = _empty()
    for storage in alive:
        breakdown[role_of(storage)] += storage.size
    call = trace.calls[place]
    return MemoryUsage(peak, breakdown, call.id, call.name, _course(trace, storages.values()))


def _course(trace: OperatorTrace, storages: Iterable[Lifetime]) -> tuple[MemoryMoment, ...]:
    """Return the memory levels after every call that changes one."""
    changes: dict[int, list[int]] = {}
    for storage in storages:
        role = ROLES.index(role_of(storage))
        changes.setdefault(storage.first, [0] * len(ROLES))[role] += storage.size
        changes.setdefault(storage.last + 1, [0] * len(ROLES))[role] -= storage.size
    levels, found = [0] * len(ROLES), []
    for place in sorted(changes.keys() - {len(trace.calls)}):
        levels = [level + change for level, change in zip(levels, changes[place], strict=True)]
        found.append(MemoryMoment(trace.calls[place].id, tuple(levels)))
    return tuple(found)


def _empty() -> dict[Role, int]:
    return dict.fromkeys(ROLES, 0)


def lifetimes(trace: OperatorTrace) -> dict[int, Lifetime]:
    """Return storage -> size and lifetime, as indices into ``trace.calls``."""
    found: dict[int, Lifetime] = {}
    names = {call.id: call.name for call in trace.calls}
    parents = {call.parent for call in trace.calls}
    end = len(trace.calls) - 1
    made: dict[int, int] = {}
    exact = any("freed" in call.attributes for call in trace.calls)
    latest = -1  # storage
    parts: list[OperatorCall] = []
    read: set[int] = set()  # by forward passes
    nodes: dict[int | None, int] = {}  # node that accumulates a gradient -> its first call, before those of hooks
    taken: set[int] = set()  # by those first calls
    for position, call in enumerate(trace.calls):
        for storage in _listed(call, "freed"):
            if storage in found:
                found[storage].last = max(position - 1, found[storage].first)
        made.update((storage, position) for storage in _listed(call, "made"))
        gradient = call.parent is not None and names.get(call.parent) == ACCUMULATE_GRAD
        for tensor, is_input in _seen(call, call.id in parents):
            entry = found.get(tensor.storage)
            if entry is None:
                entry = found[tensor.storage] = Lifetime(first=made.get(tensor.storage, position))
                entry.first_phase = call.phase
                # Captures number storages in the order of their first use, also before the trace: DDP's buckets.
                known = is_input or (exact and tensor.storage < latest)
                entry.existed = known and tensor.storage not in made
                latest = max(latest, tensor.storage)
                entry.integer = tensor.dtype.startswith(("int", "uint"))
                if entry.existed:
                    entry.first = 0
            entry.last = end if exact or entry.existed else position
            entry.used = position
            entry.size = max(entry.size, _bytes(tensor))
            entry.phases.add(call.phase)
            if is_input and call.phase == "forward" and call.name not in _CLEARS:
                read.add(tensor.storage)
            if gradient:
                if nodes.setdefault(call.parent, call.id) == call.id:
                    taken.add(tensor.storage)
                entry.gradient = True
                entry.alike = tensor.shape[0] if len(tensor.shape) == EXPERT_DIMENSIONS else 1
        if call.name in _WRITES:
            parts.append(call)
    if not {"backward", "optimizer"} & {call.phase for call in trace.calls}:
        _note_additions(parts, found)
    _note_updates(found, read, taken)
    for entry in found.values():
        if entry.existed or (entry.gradient and not exact):
            entry.last = end
    for storage in found.keys() & trace.storage_bytes.keys():
        found[storage].size = max(found[storage].size, whole_blocks(trace.storage_bytes[storage]))
    return found


def _note_updates(found: Mapping[int, Lifetime], read: Container[int], taken: Container[int]) -> None:
    """If hooks of gradients update parameters: tell these, which forward passes ``read``, the states and what the hooks
    make from gradients, which the nodes themselves have ``taken``.
    """
    touched = {storage: each for storage, each in found.items() if each.gradient}
    updated = {storage for storage, each in touched.items() if each.existed and storage in read}
    for storage, each in touched.items() if updated else ():
        each.state = each.existed and storage not in updated and each.phases == {"backward"}
        each.gradient = storage in taken if not each.existed else not each.state and storage not in updated


def _note_additions(writes: Iterable[OperatorCall], found: dict[int, Lifetime]) -> None:
    """Mark storages that one of ``writes`` writes in part: rows of new tokens, after or among existing rows."""
    for call in writes:
        floats = [each for each in tensors(call.inputs) if _counts(each) and not each.dtype.startswith(("int", "uint"))]
        if floats and floats[0].storage in found:
            entry = found[floats[0].storage]
            # Copies take a view of the written part; writes by index take the whole tensor and the written values.
            written = floats[0] if call.name == _COPY else floats[-1]
            entry.added_to |= prod(written.shape) * _item_bytes(floats[0].dtype) < entry.size - BLOCK_BYTES


def _listed(call: OperatorCall, name: str) -> Iterable[int]:
    """Return the storages freed, or allocated by no operator, right before ``call``."""
    found = call.attributes.get(name, ())
    return [item for item in found if isinstance(item, int)] if isinstance(found, tuple) else ()


def _seen(call: OperatorCall, around_others: bool) -> Iterator[tuple[Tensor, bool]]:
    """Iterate over the GPU tensors of a call, each with True for inputs."""
    for tensor in tensors(call.inputs):
        if _counts(tensor):
            yield tensor, True
    for value in call.attributes.values():
        for tensor in tensors((value,)):
            if _counts(tensor):
                yield tensor, True
    # The outputs of a call with nested calls are made by one of these, later.
    for tensor in () if around_others else tensors(call.outputs):
        if _counts(tensor):
            yield tensor, False


def _counts(tensor: Tensor) -> bool:
    return tensor.device not in ("cpu", "") and tensor.storage >= 0


def _bytes(tensor: Tensor) -> int:
    """Return the bytes of the memory that the tensor spans, in whole blocks."""
    elements = 1
    if 0 in tensor.shape:
        return 0
    if tensor.stride is not None and len(tensor.stride) == len(tensor.shape):
        elements += sum((extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride, strict=True))
    else:
        for extent in tensor.shape:
            elements *= extent
    return whole_blocks(elements * _item_bytes(tensor.dtype))


def _item_bytes(dtype: str) -> int:
    return DTYPE_BYTES.get(dtype, OTHER_BYTES.get(dtype, 4))


def role_of(storage: Lifetime) -> Role:
    """Return the role of a storage, by the phases that make and use it."""
    if storage.gradient:
        return "gradients"
    if storage.existed:
        if storage.state or storage.phases == {"optimizer"}:
            return "optimizer_state"
        return "inputs" if storage.integer else "cache" if storage.added_to else "parameters"
    if storage.first_phase == "forward" and "backward" in storage.phases:
        return "activations"
    return "temporary"


# cuBLAS workspace per handle and stream that runs matrix products (aten/src/ATen/cuda/CublasHandlePool.cpp): on Hopper
# and datacenter Blackwell, and on other GPUs (two pieces of 4 MiB, eight of 16 KiB).
_LARGE_WORKSPACE, _WORKSPACE = 32 << 20, 2 * (4 << 20) + 8 * (16 << 10)


def workspace_bytes(architecture: str) -> int:
    """Size of a cuBLAS workspace in bytes on GPUs of ``architecture``."""
    return _LARGE_WORKSPACE if architecture in ("hopper", "blackwell") else _WORKSPACE


class AllocationReplay:
    """Allocated blocks by key, each with its role.

    ``expandable``: the allocator setting ``expandable_segments``. ``moment``: current call number and name, recorded as
    ``fullest`` when a new peak is reached.
    """

    def __init__(self, expandable: bool = False) -> None:
        self.allocator = CachingAllocator(expandable)
        self.blocks: dict[Hashable, tuple[Any, Role]] = {}
        self.levels: dict[Role, int] = dict.fromkeys(ROLES, 0)
        self.moment = self.fullest = (-1, "")
        self.peak, self.at_peak = 0, dict(self.levels)
        self.course: list[MemoryMoment] = []

    def take(self, key: Hashable, size: float, role: Role, stream: int = 0) -> None:
        """Allocate ``size`` bytes; do nothing if the size is zero or ``key`` is already allocated."""
        if size < 1 or key in self.blocks:
            return
        block = self.allocator.allocate(int(size), stream)
        self.blocks[key] = block, role
        self.levels[role] += block.size
        if self.allocator.allocated > self.peak:
            self.peak, self.at_peak, self.fullest = self.allocator.allocated, dict(self.levels), self.moment

    def drop(self, key: Hashable) -> None:
        """Free the block of ``key``, if there is one."""
        held = self.blocks.pop(key, None)
        if held is not None:
            self.levels[held[1]] -= held[0].size
            self.allocator.release(held[0])

    def rename(self, key: Hashable, name: Hashable) -> None:
        """Keep the block of ``key``, if there is one, as ``name``."""
        if key in self.blocks:
            self.blocks[name] = self.blocks.pop(key)

    def note(self) -> None:
        """Append the current memory levels to the course of the step."""
        self.course.append(MemoryMoment(self.moment[0], tuple(self.levels.values())))

    def usage(self) -> MemoryUsage:
        """Return the peak with its breakdown and the most memory the allocator reserved."""
        most = max(self.allocator.most_reserved, self.peak)
        breakdown = {**self.at_peak, "reserve": most - self.peak}
        return MemoryUsage(most, breakdown, *self.fullest, course=tuple(self.course))


_MOST_PAIRS = 1 << 24  # of storages, of which the time of a comparison is a few seconds
# The first step begins without optimizer state, the second with it; after a third all blocks exist.
_STEPS = 4
# Operators computed by cuBLAS.
_PRODUCTS = frozenset(
    f"aten::{name}" for name in ("mm", "bmm", "addmm", "baddbmm", "addmm_", "baddbmm_", "_addmm_activation", "addmv")
)


def tells_frees(trace: OperatorTrace) -> bool:
    """True if ``trace`` records when memory is freed, as captures do and recordings do not."""
    return any("freed" in call.attributes for call in trace.calls)


def replayed_memory(
    trace: OperatorTrace, workspace: int, kept: KeptStorages = AS_EAGER, scratch: Mapping[int, int] | None = None
) -> MemoryUsage:
    """Return the peak of steady steps of the captured ``trace``, with the memory reserved by the allocator.

    ``workspace``: bytes of one cuBLAS workspace (:func:`e2e.step.memory.workspace_bytes`). ``kept``: what a compiled
    step keeps. ``scratch``: place of a call -> bytes that it allocates for itself.
    """
    return _CapturedReplay(trace, workspace, kept, scratch or {}).run()


class _CapturedReplay:
    def __init__(self, trace: OperatorTrace, workspace: int, kept: KeptStorages, scratch: Mapping[int, int]) -> None:
        self.trace = trace
        self.scratch = scratch
        self.workspace = workspace
        self.replay = AllocationReplay()
        self.storages = kept.lifetimes(trace)
        end = len(trace.calls) - 1
        self.made: dict[int, list[int]] = {}
        self.freed: dict[int, list[int]] = {}
        self.left: list[int] = []  # alive at the end of a step; freed at the beginning of the next one
        self.gradients: list[int] = []  # alive at the end of a step; freed by the next call of zero_grad
        for storage, life in self.storages.items():
            if life.existed or not life.size:
                continue
            self.made.setdefault(life.first, []).append(storage)
            if life.last < end:
                self.freed.setdefault(life.last + 1, []).append(storage)
            else:
                (self.gradients if life.gradient else self.left).append(storage)
        self.carried: dict[int, list[int]] = {}  # place -> storages of the step before that are freed there
        self._carry_over(min((each for each, life in lifetimes(trace).items() if not life.existed), default=0))
        self.cleared_at = self._cleared_at()
        self.streams = self._streams()
        self.users = self._users()
        self.update = next((place for place, call in enumerate(trace.calls) if call.phase == "optimizer"), None)
        places = {*self.made, *self.freed, *self.carried, *self.users, *scratch, self.cleared_at, self.update}
        self.places = sorted(place for place in places if place is not None)

    def run(self) -> MemoryUsage:
        for storage, life in self._existing():
            if role_of(life) != "optimizer_state" or self.update is None:
                self.replay.take(storage, life.size, role_of(life))
        before = -1
        for _ in range(_STEPS):
            self._step()
            if self.replay.allocator.most_reserved == before:
                break
            before = self.replay.allocator.most_reserved
        return self.replay.usage()

    def _step(self) -> None:
        self.replay.course.clear()  # only the course of the last step is kept
        for storage in self.left:
            self.replay.drop(storage)
        for storages in self.carried.values():
            for storage in storages:
                self.replay.rename(storage, ("before", storage))
        for place in self.places:
            call = self.trace.calls[place]
            self.replay.moment = (call.id, call.name)
            if place == self.cleared_at:
                for storage in self.gradients:
                    self.replay.drop(storage)
            for storage in self.freed.get(place, ()):
                self.replay.drop(storage)
            for storage in self.carried.get(place, ()):
                self.replay.drop(("before", storage))
            if place == self.update:  # existing state stays
                for storage, life in self._existing():
                    self.replay.take(storage, life.size, role_of(life))
            for storage in self.made.get(place, ()):
                life = self.storages[storage]
                self.replay.take(storage, life.size, role_of(life), self.streams.get(storage, 0))
            user = self.users.get(place)
            if user is not None:
                self.replay.take(("workspace", user), self.workspace, "buffers", user[1])
            if place in self.scratch:
                self.replay.take("scratch", self.scratch[place], "buffers")
                self.replay.drop("scratch")
            self.replay.note()

    def _carry_over(self, first: int) -> None:
        """Find where a step frees what the step before has left: outputs until their names are given to new ones, and
        activations of a backward pass that comes in the next step.

        Storages are numbered in the order in which they are made, those of this step from ``first`` on, so that those
        of the step before have the same numbers less a constant. It is the one that explains most of the storages that
        are freed here and made before.
        """
        alive = {*self.left, *self.gradients}
        freed: dict[int, int] = {}
        for place, call in enumerate(self.trace.calls):
            freed |= {storage: place for storage in _listed(call, "freed") if storage < first}

        def are_alike(storage: int, later: int) -> bool:
            known = self.storages.get(storage)
            return known is None or known.size == self.storages[later].size

        if not alive or not freed or len(alive) * len(freed) > _MOST_PAIRS:
            return
        shifts = Counter(later - each for later in alive for each in freed if later > each and are_alike(each, later))
        if not shifts:
            return
        ((shift, _),) = shifts.most_common(1)
        for storage, place in freed.items():
            later = storage + shift
            if later in alive and are_alike(storage, later):
                self.carried.setdefault(place, []).append(later)
                self.storages.pop(storage, None)
        known = {each for storages in self.carried.values() for each in storages}
        self.left = [each for each in self.left if each not in known]
        self.gradients = [each for each in self.gradients if each not in known]

    def _cleared_at(self) -> int | None:
        """Index of the call before which the gradients of the previous step are freed; None if they stay.

        A step may clear some gradients in its middle: gradients alive at its end are cleared after it, or by the first
        clearing call of the next step.
        """
        told = [(place, call.attributes.get("gradients")) for place, call in enumerate(self.trace.calls)]
        cleared = [place for place, what in told if what == "cleared"]
        if any(what == "cleared behind" for _, what in told):
            return 0
        if cleared:
            return cleared[0]
        return None if any(what is not None for _, what in told) else 0

    def _existing(self) -> Iterator[tuple[int, Lifetime]]:
        return ((storage, life) for storage, life in self.storages.items() if life.existed)

    def _streams(self) -> dict[int, int]:
        """Return storage -> stream of the call that makes it, for other streams than the default one."""
        found: dict[int, int] = {}
        for place, storages in self.made.items():
            stream = self.trace.calls[place].attributes.get("stream")
            if isinstance(stream, int) and not isinstance(stream, bool):
                found.update(dict.fromkeys(storages, stream))
        return found

    def _users(self) -> dict[int, tuple[int, int]]:
        """Return index of the first product of each thread and stream -> (thread, stream). Each thread has its own
        handle.
        """
        found: dict[tuple[int, int], int] = {}
        for place, call in enumerate(self.trace.calls):
            if call.name in _PRODUCTS and any(each.device not in ("", "cpu") for each in tensors(call.inputs)):
                stream = call.attributes.get("stream")
                found.setdefault((call.thread, stream if isinstance(stream, int) else 0), place)
        return {place: user for user, place in found.items()}
