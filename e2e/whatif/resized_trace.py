"""Operators of a step with another batch size.

The batch is identified in the input tensors of a step and propagated from call to call through their results; then
every tensor that depends on it is resized.

Input tensors are those that no call made and that are not weights (no optimizer updates them, no operator uses them as
weights, statistics or tables). The batch is the most frequent leading size of those with several dimensions, or of all
if there are none; for a step with another batch the user gives it (``batch=32:512``). Results follow from arguments by
the rules of :mod:`e2e.whatif.shape_rules`; those of operators without a rule, from the results of nested calls. Values
that depend on the batch without being computed from inputs (sizes written in a script) are taken for the batch if they
are leading sizes and equal to it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from math import prod

from costmodel.base.errors import InputError
from e2e.step.collective_names import OUTPUT_FIRST, kind_of
from e2e.step.operator_trace import OperatorCall, OperatorTrace, Tensor, Value, tensors
from e2e.whatif.extents import (
    Extents,
    SplitError,
    any_grows,
    fixed,
    grows,
    proportional,
    reshaped,
    size_at,
    stride_at,
)
from e2e.whatif.shape_rules import ShapedCall, aligned, indices_of, is_factory, rule_of

# Positions of arguments that are weights, tables or statistics, whatever their sizes.
_WEIGHTS: dict[str, tuple[int, ...]] = {
    "linear": (1, 2),
    "addmm": (0, 2),
    "mm": (1,),
    "embedding": (0,),
    "embedding_bag": (0,),
    "_embedding_bag": (0,),
    "_embedding_bag_forward_only": (0,),
    "table_batched_embedding": (0,),
    **dict.fromkeys(("convolution", "_convolution", "cudnn_convolution", "conv2d", "conv1d", "conv3d"), (1, 2)),
    **dict.fromkeys(("native_batch_norm", "cudnn_batch_norm", "batch_norm", "_batch_norm_impl_index"), (1, 2, 3, 4)),
    **dict.fromkeys(("layer_norm", "native_layer_norm", "rms_norm", "_fused_rms_norm"), (1, 2, 3)),
    **dict.fromkeys(("group_norm", "native_group_norm"), (1, 2, 3)),
}
# Operators with arguments that are sizes of the result.
_SIZED = frozenset(
    f"aten::{name}"
    for name in (
        "view", "_unsafe_view", "reshape", "expand", "zeros", "ones", "full", "empty", "rand", "randn", "new_zeros",
        "new_ones", "new_full", "new_empty", "empty_strided", "new_empty_strided", "select_backward", "slice_backward",
        "_reshape_alias", "broadcast_to", "arange",
    )
)  # fmt: skip
# Batched lookups: position of the argument with the number of samples.
_TABLES = {"e2e::table_batched_embedding": 4, "e2e::table_batched_embedding_backward": 5}


def recorded_batch(trace: OperatorTrace) -> int:
    """Return the number of samples of a recorded step; raises ``InputError`` naming the tensors if these disagree."""
    begins = _begins(trace)
    tables = [(call, tensor) for call, tensor in begins if len(tensor.shape) > 1 and tensor.shape[0] > 1]
    begins = tables or begins
    votes = Counter(tensor.shape[0] for _, tensor in begins if tensor.shape[0] > 1)
    if not votes:
        if begins and any(len(tensor.shape) > 1 for _, tensor in begins):
            return 1
        raise InputError(
            f"{trace.source}: no tensor that the step begins with tells its batch; say it, such as batch=32:512"
        )
    (best, count), *others = votes.most_common(2)
    if others and others[0][1] == count:
        names = [next(_told(call, tensor) for call, tensor in begins if tensor.shape[0] == size)
                 for size in (best, others[0][0])]  # fmt: skip
        raise InputError(
            f"{trace.source}: the batch may be {best} ({names[0]}) or {others[0][0]} ({names[1]}); say which, such as "
            f"batch={best}:{2 * best}"
        )
    return best


def resized(trace: OperatorTrace, samples: int, recorded: int | None = None) -> OperatorTrace:
    """Return ``trace`` of a step with ``samples`` instead of ``recorded`` samples (``None``: :func:`recorded_batch`).

    Raises ``InputError`` naming the call and the tensor if a size may depend on the batch in several ways, and if
    nothing depends on it.
    """
    batch = recorded_batch(trace) if recorded is None else recorded
    sizes = _Sizes(trace, batch)
    if not sizes.any_grew:
        raise InputError(
            f"{trace.source}: no tensor that the step begins with has {batch} samples in front; "
            "give the batch that was recorded"
        )
    more = samples - batch
    return replace(trace, calls=tuple(_resized_call(call, sizes, more) for call in trace.calls))


def _told(call: OperatorCall, tensor: Tensor) -> str:
    return f"{tensor.dtype} {list(tensor.shape)} of {call.name}"


def _weights(trace: OperatorTrace) -> set[int]:
    """Storages that are not step inputs: weight arguments, and everything that the optimizer uses.

    Views of a weight (``t``) are included.
    """
    found = {
        tensor.storage
        for call in trace.calls
        if call.phase == "optimizer"
        for tensor in tensors((*call.inputs, *call.outputs))
    }
    made: set[int] = set()
    for call in trace.calls:
        short = call.name.rpartition("::")[2]
        forward = call.phase not in ("backward", "optimizer")
        for place in _WEIGHTS.get(short, ()) if forward else ():
            value = call.inputs[place] if place < len(call.inputs) else None
            if isinstance(value, Tensor) and value.storage not in made:
                found.add(value.storage)
        read = {tensor.storage for tensor in tensors(call.inputs)}
        made |= {tensor.storage for tensor in tensors(call.outputs)} - read
    return found


def _begins(trace: OperatorTrace) -> list[tuple[OperatorCall, Tensor]]:
    """Return each tensor with dimensions that the forward pass reads, that no call made and that is no weight."""
    weights = _weights(trace)
    made: set[int] = set()
    seen: set[int] = set()
    found = []
    for call in trace.calls:
        for tensor in tensors(call.inputs):
            new = tensor.storage not in made and tensor.storage not in weights and tensor.storage not in seen
            if new and tensor.shape and call.phase not in ("backward", "optimizer"):
                seen.add(tensor.storage)
                if 0 not in tensor.shape:
                    found.append((call, tensor))
        made |= {tensor.storage for tensor in tensors(call.outputs)}
    return found


@dataclass
class _Sizes:
    """Extents of every tensor of ``trace`` at every call, visited in the order in which calls end."""

    trace: OperatorTrace
    batch: int
    any_grew: bool = False
    of_call: dict[int, dict[int, Extents]] = field(default_factory=dict)  # call -> id of the value -> extents

    def __post_init__(self) -> None:
        self._known: dict[int, Extents] = {}  # tensor -> extents
        self._by_storage: dict[int, tuple[tuple[int, ...], Extents]] = {}
        self._empty: set[int] = set()  # tensors made from sizes alone
        self._made_by: dict[int, int] = {}  # tensor -> place of the call that made it
        self._begins = {tensor.storage for _, tensor in _begins(self.trace)}
        self._places = {call.id: place for place, call in enumerate(self.trace.calls)}
        self._lookups = _index_storages(self.trace)
        for call in _by_end(self.trace.calls):
            self._visit(call)

    def _visit(self, call: OperatorCall) -> None:
        kept = self.of_call.setdefault(call.id, {})
        if call.phase == "optimizer":
            return
        for tensor in tensors(call.inputs):
            kept[id(tensor)] = self._of(tensor)
        if call.name in OUTPUT_FIRST:
            self._receive(call)
        shaped = ShapedCall(call, self._of, self.batch)
        for tensor in tensors(call.outputs):
            extents = self._made(shaped, tensor)
            if tuple(size_at(extent, 0) for extent in extents) != tensor.shape:
                extents = fixed(tensor.shape)
            kept[id(tensor)] = extents
            self._known[tensor.id] = extents
            self._by_storage[tensor.storage] = (tensor.shape, extents)
            (self._empty.add if is_factory(call.name) else self._empty.discard)(tensor.id)
            self._made_by[tensor.id] = max(self._places[call.id], self._made_by.get(tensor.id, 0))

    def _of(self, tensor: Tensor) -> Extents:
        """Return the extents of a tensor; if it is a step input, infer them from its shape."""
        known = self._known.get(tensor.id)
        if known is not None and _sizes(known) == tensor.shape:
            return known
        shape, extents = self._by_storage.get(tensor.storage, (None, ()))
        if shape is not None and prod(shape) == prod(tensor.shape):
            try:
                found = extents if shape == tensor.shape else reshaped(extents, tensor.shape, self.batch)
            except SplitError:
                found = fixed(tensor.shape)
        else:
            found = self._begun(tensor)
        self._known[tensor.id] = found
        return found

    def _begun(self, tensor: Tensor) -> Extents:
        shape = tensor.shape
        if tensor.storage not in self._begins or not shape:
            return fixed(shape)
        # With a batch of 1, any size 1 may be the batch; masks are broadcast along theirs.
        if shape[0] == self.batch and (self.batch > 1 or (len(shape) > 1 and tensor.dtype != "bool")):
            found: Extents = (proportional(shape[0], self.batch), *fixed(shape[1:]))
        elif tensor.storage in self._lookups:
            found = self._indices(tensor)
        else:
            return fixed(shape)
        self.any_grew = True
        return found

    def _indices(self, tensor: Tensor) -> Extents:
        """Extents of the indices of a lookup: proportional to the batch along the only dimension that can be."""
        if len(tensor.shape) == 1:
            return (proportional(tensor.shape[0], self.batch),)
        fitting = [
            place
            for place, size in enumerate(tensor.shape)
            if size >= self.batch and (size % self.batch == 0 or (size - 1) % self.batch == 0)
        ]
        if len(fitting) > 1:
            fitting = [place for place in fitting if tensor.shape[place] == self._lookups[tensor.storage]] or fitting
        if len(fitting) != 1:
            if not fitting:
                return fixed(tensor.shape)
            raise InputError(
                f"{self.trace.source}: {tensor.dtype} {list(tensor.shape)} are indices of a lookup, and which of "
                f"their dimensions the batch of {self.batch} is in is not told; capture or record another batch"
            )
        sizes = list(fixed(tensor.shape))
        sizes[fitting[0]] = proportional(tensor.shape[fitting[0]], self.batch)
        return tuple(sizes)

    def _made(self, shaped: ShapedCall, tensor: Tensor) -> Extents:
        call = shaped.call
        arguments = [each for each in tensors(call.inputs) if each.shape or not tensor.shape]
        if any(each.id == tensor.id and each.shape == tensor.shape for each in arguments):
            return aligned([self._of(each) for each in arguments if each.shape == tensor.shape], tensor.shape)
        if kind_of(call.name):
            return self._exchanged(call, tensor)
        # Nested calls begin after this one. Their results count if this one has no rule, except for empty memory.
        inside = tensor.id in self._known and self._made_by.get(tensor.id, -1) > self._places[call.id]
        try:
            rule = rule_of(call.name)
            if rule is not None:
                return rule(shaped, tensor)
        except SplitError as error:
            raise InputError(
                f"{self.trace.source}: {call.name} makes {tensor.dtype} {list(tensor.shape)}: {error}; "
                "this step cannot be resized; capture or record another batch"
            ) from None
        except (LookupError, ValueError, TypeError):
            pass
        if inside and tensor.id not in self._empty:
            return self._of(tensor)
        return self._aligned(call, arguments, tensor)

    def _aligned(self, call: OperatorCall, arguments: Sequence[Tensor], tensor: Tensor) -> Extents:
        """Align like broadcasting; else match dimensions from the left, else by size where that is unambiguous."""
        known = [self._of(each) for each in arguments]
        if not any(any_grows(each) for each in known):
            return fixed(tensor.shape)
        same = [each for each in known if _sizes(each) == tensor.shape]
        if same:
            return aligned(same, tensor.shape)
        if any(len(each) == len(tensor.shape) for each in known):
            return aligned(known, tensor.shape)
        growing = [each for each in known if any_grows(each)]
        if len(tensor.shape) == 1 and tensor.dtype in ("int32", "int64") and tensor.shape[0] >= self.batch:
            return (proportional(tensor.shape[0], self.batch),)
        found = list(fixed(tensor.shape))
        for place, size in enumerate(tensor.shape):
            left = [each[place] for each in growing if place < len(each) and size_at(each[place], 0) == size]
            if left:
                found[place] = next((each for each in left if grows(each)), left[0])
        return tuple(found)

    def _receive(self, call: OperatorCall) -> None:
        """Set the extents of buffers that a collective fills in proportion to its input."""
        if not any(any_grows(self._of(each)) for each in tensors(call.inputs[1:2])):
            return
        for tensor in tensors(call.inputs[:1]):
            if tensor.shape and tensor.shape[0] % self.batch == 0 and not any_grows(self._of(tensor)):
                extents = (proportional(tensor.shape[0], self.batch), *fixed(tensor.shape[1:]))
                self.of_call[call.id][id(tensor)] = self._known[tensor.id] = extents
                self._by_storage[tensor.storage] = (tensor.shape, extents)

    def _exchanged(self, call: OperatorCall, tensor: Tensor) -> Extents:
        """Return the extents of a collective's output, which depends on the batch as its input does."""
        put = [self._of(each) for each in tensors(call.inputs)]
        same = [each for each in put if _sizes(each) == tensor.shape]
        if same or not tensor.shape:
            return aligned(same, tensor.shape)
        if any(any_grows(each) for each in put) and tensor.shape[0] % self.batch == 0:
            return (proportional(tensor.shape[0], self.batch), *fixed(tensor.shape[1:]))
        return fixed(tensor.shape)


def _sizes(extents: Extents) -> tuple[int, ...]:
    return tuple(size_at(extent, 0) for extent in extents)


def _by_end(calls: Sequence[OperatorCall]) -> Iterator[OperatorCall]:
    """Yield calls, given in order of their begin, in order of their end: enclosing calls after nested ones."""
    waiting: list[OperatorCall] = []
    for call in calls:
        while waiting and waiting[-1].id != call.parent:
            yield waiting.pop()
        waiting.append(call)
    while waiting:
        yield waiting.pop()


def _index_storages(trace: OperatorTrace) -> dict[int, int]:
    """Map storages of indices and offsets of pooled lookups to the number of lookups."""
    found: dict[int, int] = {}
    for call in trace.calls:
        if call.phase in ("backward", "optimizer"):
            continue
        for tensor in indices_of(call):
            if tensor.shape:
                found.setdefault(tensor.storage, tensor.shape[-1])
    return found


def _resized_call(call: OperatorCall, sizes: _Sizes, more: int) -> OperatorCall:
    known = sizes.of_call.get(call.id, {})
    if not any(any_grows(extents) for extents in known.values()):
        return call
    outputs = tuple(_value(value, known, more) for value in call.outputs)
    inputs = tuple(_value(value, known, more) for value in call.inputs)
    if call.name in _SIZED:
        before = next(tensors(call.outputs), None)
        after = next(tensors(outputs), None)
        if before is not None and after is not None:
            inputs = tuple(_size_list(value, before.shape, after.shape) for value in inputs)
    if call.name in _TABLES:
        place = _TABLES[call.name]
        batch = inputs[place]
        assert isinstance(batch, int)
        inputs = (*inputs[:place], batch + batch // sizes.batch * more, *inputs[place + 1 :])
    attributes = {
        name: _value(value, known, more) if isinstance(value, Tensor | tuple) else value
        for name, value in call.attributes.items()
    }
    return replace(call, inputs=inputs, outputs=outputs, attributes=attributes)


def _size_list(value: Value, before: tuple[int, ...], after: tuple[int, ...]) -> Value:
    """Replace a list of the result's old sizes by the new ones; ``-1`` stays."""
    if not isinstance(value, tuple) or len(value) != len(before):
        return value
    fits = all(
        isinstance(each, int) and each in (-1, size) for each, size in zip(value, before, strict=True)
    )  # fmt: skip
    return tuple(each if each == -1 else size for each, size in zip(value, after, strict=True)) if fits else value


def _value(value: Value, known: dict[int, Extents], more: int) -> Value:
    if isinstance(value, Tensor):
        extents = known.get(id(value))
        if extents is None or not any_grows(extents):
            return value
        shape = tuple(size_at(extent, more) for extent in extents)
        stride = None if value.stride is None else stride_at(value.shape, value.stride, shape)
        return replace(value, shape=shape, stride=stride)
    return tuple(_value(each, known, more) for each in value) if isinstance(value, tuple) else value
