"""Peak memory of a step from the lifetimes of its tensors.

Storages count, not tensors: views share one. A storage lives from the call that first shows it (from before the step,
if that call only reads it) until it is freed. Captures say when that was; for other traces it is the last use, which
is early where Python still holds a result. Each storage takes whole blocks of the caching allocator.

Of recorded traces that is all there is: fragmentation, the CUDA context and workspaces of libraries are not counted. A
captured step is replayed through the allocator (``e2e/step/replayed_memory.py``), a model spread by ``--parallel`` too
(``e2e/parallelism/stage_memory.py``), tables placed by ``--sharding`` are summed in ``e2e/sharding/sharded_step.py``;
whether a rank's memory suffices is said in ``e2e/explain/rank_figures.py``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal, get_args

from costmodel.operators.layers import DTYPE_BYTES
from e2e.step.caching_allocator import BLOCK_BYTES, whole_blocks
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor, tensors

ACCUMULATE_GRAD = "torch::autograd::AccumulateGrad"
# Of the weights of a layer's experts, which are one parameter; no other parameter of a transformer has as many.
EXPERT_DIMENSIONS = 3
OTHER_BYTES = {"int16": 2, "uint16": 2, "complex64": 8, "complex128": 16, "float8_e4m3fn": 1, "float8_e5m2": 1}

# Writes into memory that is there.
_COPY = "aten::copy_"
_WRITES = frozenset((_COPY, "aten::index_copy_", "aten::index_put_", "aten::_index_put_impl_"))
Role = Literal[
    "parameters", "gradients", "optimizer_state", "inputs", "activations", "temporary", "buffers", "cache", "reserve"
]  # fmt: skip
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True, slots=True)
class MemoryMoment:
    """What is in use once the host has made ``call``: ``levels`` in bytes, in the order of :data:`ROLES`."""

    call: int
    levels: tuple[int, ...]


@dataclass(frozen=True)
class MemoryUsage:
    """Bytes at the fullest moment of a step and what they are.

    ``parameters``: held throughout and read by the model (weights, buffers); ``optimizer_state``: held throughout and
    read by the optimizer alone; ``inputs``: integer data held throughout; ``activations``: made in the forward pass
    and alive after it; ``buffers``: of communication and libraries; ``cache``: keys and values of earlier tokens, which
    a step without backward pass adds to; ``temporary``: everything else. ``reserve``: what
    the caching allocator has taken from the driver at most beyond what is in use at the peak (0 where it is not
    simulated). ``call``: the operator at the peak; -1 for an empty trace. ``course``: what is in use over the step,
    where that is known.
    """

    peak_bytes: int
    breakdown: dict[Role, int]
    call: int
    operator: str
    course: tuple[MemoryMoment, ...] = field(default=(), repr=False, compare=False)

    @property
    def allocated_bytes(self) -> int:
        """Without the allocator's reserve: the least memory that such a step runs in."""
        return self.peak_bytes - self.breakdown.get("reserve", 0)

    def within(self, capacity: int) -> MemoryUsage:
        """The same on a GPU of ``capacity`` bytes: there the allocator gives back what is in no use before it fails."""
        peak = min(self.peak_bytes, max(capacity, self.allocated_bytes))
        if peak == self.peak_bytes:
            return self
        return replace(self, peak_bytes=peak, breakdown={**self.breakdown, "reserve": peak - self.allocated_bytes})


@dataclass
class Lifetime:
    """A storage of a trace: its ``size`` in whole blocks, the places of the ``first`` and ``last`` call of its life and
    of the last that ``used`` it.

    ``existed``: before the trace; ``phases``: in which it is used, ``first_phase`` the first of them; ``gradient``: it
    is the ``.grad`` of a parameter, of so many alike things as ``alike`` says (experts); ``added_to``: a forward pass
    writes a part of it.
    """

    size: int = 0
    first: int = 0
    last: int = 0
    used: int = 0
    existed: bool = False
    integer: bool = False
    phases: set[str] = field(default_factory=set)
    first_phase: str = ""
    gradient: bool = False
    alike: int = 1
    added_to: bool = False


def peak_memory(trace: OperatorTrace) -> MemoryUsage:
    """The fullest moment of ``trace`` on its GPU, with the bytes of each role then."""
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
    """The levels after every call that changes one."""
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
    """Storage -> size and life, in positions of ``trace.calls``."""
    found: dict[int, Lifetime] = {}
    names = {call.id: call.name for call in trace.calls}
    parents = {call.parent for call in trace.calls}
    end = len(trace.calls) - 1
    made: dict[int, int] = {}
    exact = any("freed" in call.attributes for call in trace.calls)
    parts: list[OperatorCall] = []
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
                entry.existed = is_input and tensor.storage not in made
                entry.integer = tensor.dtype.startswith(("int", "uint"))
                if entry.existed:
                    entry.first = 0
            entry.last = end if exact or entry.existed else position
            entry.used = position
            entry.size = max(entry.size, _bytes(tensor))
            entry.phases.add(call.phase)
            if gradient:
                entry.gradient = True
                entry.alike = tensor.shape[0] if len(tensor.shape) == EXPERT_DIMENSIONS else 1
        if call.name in _WRITES:
            parts.append(call)
    if not {"backward", "optimizer"} & {call.phase for call in trace.calls}:
        _note_additions(parts, found)
    for entry in found.values():
        if entry.existed or (entry.gradient and not exact):
            entry.last = end
    return found


def _note_additions(writes: Iterable[OperatorCall], found: dict[int, Lifetime]) -> None:
    """Marks what each of ``writes`` puts a part into: rows of new tokens, behind or among those that are there."""
    for call in writes:
        floats = [each for each in tensors(call.inputs) if _counts(each) and not each.dtype.startswith(("int", "uint"))]
        if floats and floats[0].storage in found:
            entry = found[floats[0].storage]
            # Copies name the part that they write, writes by index name all and what is written.
            written = floats[0] if call.name == _COPY else floats[-1]
            entry.added_to |= prod(written.shape) * _item_bytes(floats[0].dtype) < entry.size - BLOCK_BYTES


def _listed(call: OperatorCall, name: str) -> Iterable[int]:
    """Storages that were freed, or allocated by no operator, right before ``call``."""
    found = call.attributes.get(name, ())
    return [item for item in found if isinstance(item, int)] if isinstance(found, tuple) else ()


def _seen(call: OperatorCall, around_others: bool) -> Iterator[tuple[Tensor, bool]]:
    """GPU tensors of a call with whether they go in; those of a call around others come first."""
    for tensor in tensors(call.inputs):
        if _counts(tensor):
            yield tensor, True
    for value in call.attributes.values():
        for tensor in tensors((value,)):
            if _counts(tensor):
                yield tensor, True
    # What a call around others returns is made by one of them, later.
    for tensor in () if around_others else tensors(call.outputs):
        if _counts(tensor):
            yield tensor, False


def _counts(tensor: Tensor) -> bool:
    return tensor.device not in ("cpu", "") and tensor.storage >= 0


def _bytes(tensor: Tensor) -> int:
    """Of the memory that the tensor spans, in whole blocks."""
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
    """What a storage is for, by who makes and who uses it."""
    if storage.gradient:
        return "gradients"
    if storage.existed:
        if storage.phases == {"optimizer"}:
            return "optimizer_state"
        return "inputs" if storage.integer else "cache" if storage.added_to else "parameters"
    if storage.first_phase == "forward" and "backward" in storage.phases:
        return "activations"
    return "temporary"
