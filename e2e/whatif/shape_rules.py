"""Rules for the sizes of results given those of arguments, by operator, for :mod:`e2e.whatif.other_batch`.

Only operators that permute, split, join or contract dimensions have a rule; results of all others are aligned with
their arguments as in broadcasting. Argument positions are those of PyTorch's schemas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

from e2e.lowering.families.embeddings import FORWARD as LOOKUPS
from e2e.lowering.families.embeddings import batch_arguments
from e2e.lowering.families.work import UnforeseenCall
from e2e.step.operator_trace import OperatorCall, Tensor, Value, tensors
from e2e.whatif.extents import Extent, Extents, Part, fixed, grows, joined, proportional, reshaped, share


@dataclass(frozen=True)
class ShapedCall:
    """Call with the extents of its tensors; ``of`` returns those of an argument."""

    call: OperatorCall
    of: Callable[[Tensor], Extents]
    batch: int

    def argument(self, place: int) -> Value:
        """Return the argument at ``place``, ``None`` if there is none."""
        return self.call.inputs[place] if place < len(self.call.inputs) else None

    def tensor(self, place: int) -> Extents:
        """Return the extents of the tensor at ``place``; raises :class:`LookupError` if there is no tensor."""
        value = self.argument(place)
        if not isinstance(value, Tensor):
            raise LookupError(f"argument {place} is no tensor")
        return self.of(value)

    def whole(self, place: int, default: int) -> int:
        """Return the integer at ``place``, or ``default``."""
        value = self.argument(place)
        return value if isinstance(value, int) and not isinstance(value, bool) else default

    def numbers(self, place: int) -> tuple[int, ...]:
        """Return the integers at ``place``, given as a list or as a single number."""
        value = self.argument(place)
        if isinstance(value, tuple):
            return tuple(each for each in value if isinstance(each, int) and not isinstance(each, bool))
        return (value,) if isinstance(value, int) and not isinstance(value, bool) else ()


Rule = Callable[[ShapedCall, Tensor], Extents]


def _like(place: int) -> Rule:
    return lambda call, output: call.tensor(place)


def _view(call: ShapedCall, output: Tensor) -> Extents:
    return reshaped(call.tensor(0), output.shape, call.batch)


def _swapped(extents: Extents, first: int, second: int) -> Extents:
    order = list(range(len(extents)))
    order[first], order[second] = order[second], order[first]
    return tuple(extents[place] for place in order)


def _transpose(call: ShapedCall, output: Tensor) -> Extents:
    data = call.tensor(0)
    first, second = call.whole(1, -2), call.whole(2, -1)
    return _swapped(data, first, second) if len(data) > 1 else data


def _turned(call: ShapedCall, output: Tensor) -> Extents:
    data = call.tensor(0)
    return data[::-1]


def _permute(call: ShapedCall, output: Tensor) -> Extents:
    data, order = call.tensor(0), call.numbers(1)
    return tuple(data[place] for place in order)


def _unsqueeze(call: ShapedCall, output: Tensor) -> Extents:
    data = list(call.tensor(0))
    place = call.whole(1, 0)
    data.insert(place + len(data) + 1 if place < 0 else place, (Part(1),))
    return tuple(data)


def _squeeze(call: ShapedCall, output: Tensor) -> Extents:
    return _reduced(call.tensor(0), output)


def _reduced(data: Extents, output: Tensor) -> Extents:
    """Match the dimensions of ``output`` in order with those of ``data``, of which some have been reduced."""
    found: list[Extent] = []
    left = list(data)
    for position, size in enumerate(output.shape):
        room = len(left) - (len(output.shape) - position)
        fitting = [place for place in range(room + 1) if prod(part.size for part in left[place]) == size]
        # Prefer one that grows: a batch of 1 is not squeezed away before another dimension of 1.
        place = next((each for each in fitting if grows(left[each])), fitting[0] if fitting else None)
        if place is None:
            found.append((Part(size),))
        else:
            found.append(left[place])
            del left[: place + 1]
    return tuple(found)


def _reduction(dims: int, keep: int) -> Rule:
    """Make the rule of ``sum(x, dims, keepdim)`` and similar; argument ``dims`` lists the reduced dimensions."""

    def rule(call: ShapedCall, output: Tensor) -> Extents:
        data = call.tensor(0)
        gone = {place % len(data) for place in call.numbers(dims)} if data else set()
        if not gone or not output.shape:
            gone = set(range(len(data)))
        if len(output.shape) == len(data):
            return tuple((Part(1),) if place in gone else extent for place, extent in enumerate(data))
        rest = tuple(extent for place, extent in enumerate(data) if place not in gone)
        return rest if len(rest) == len(output.shape) else _reduced(data, output)

    return rule


def _product(left: int, right: int) -> Rule:
    """Make the rule of ``mm``, ``bmm``, ``matmul``.

    Rows of the left, columns of the right, aligned leading dimensions.
    """

    def rule(call: ShapedCall, output: Tensor) -> Extents:
        first, second = call.tensor(left), call.tensor(right)
        if len(first) < 2 or len(second) < 2:
            rest = first[:-1] if len(first) > 1 else (*second[:-2], second[-1])
            return rest if len(rest) == len(output.shape) else fixed(output.shape)
        front = aligned([first[:-2], second[:-2]], output.shape[:-2])
        return (*front, first[-2], second[-1])

    return rule


def _linear(call: ShapedCall, output: Tensor) -> Extents:
    return (*call.tensor(0)[:-1], (Part(output.shape[-1]),))


def _convolution(call: ShapedCall, output: Tensor) -> Extents:
    return (call.tensor(0)[0], *fixed(output.shape[1:]))


def _leading(call: ShapedCall, output: Tensor) -> Extents:
    """Rule for window operators: samples of the first tensor; other sizes depend on window, output size etc."""
    data = call.tensor(0)
    front = len(output.shape) - 2 if len(data) == len(output.shape) else 1
    return (*data[:front], *fixed(output.shape[front:]))


def _embedding(call: ShapedCall, output: Tensor) -> Extents:
    return (*call.tensor(1), (Part(output.shape[-1]),))


def _bags(call: ShapedCall, output: Tensor) -> Extents:
    """Rule of ``embedding_bag``: one row per bag; one less than offsets if these include the end of the last bag."""
    offsets = call.tensor(2)
    if len(output.shape) == 2:
        return (proportional(output.shape[0], call.batch) if grows(offsets[0]) else (Part(output.shape[0]),),
                (Part(output.shape[1]),))  # fmt: skip
    indices = call.tensor(1)
    if output.shape == tuple(prod(part.size for part in extent) for extent in indices):
        return indices
    if len(output.shape) == 1 and output.shape[0] and grows(offsets[0]) and output.shape[0] % call.batch == 0:
        return (proportional(output.shape[0], call.batch),)
    return fixed(output.shape)


def _tables(call: ShapedCall, output: Tensor) -> Extents:
    """Rule for lookups in several tables at once: one row per sample."""
    return (proportional(output.shape[0], call.batch), *fixed(output.shape[1:]))


def _permuted_lookups(call: ShapedCall, output: Tensor) -> Extents:
    """Rule of ``permute_2D_sparse_data(permutation, lengths, values, ...)``: (features, samples), and flat values."""
    lengths = call.tensor(1)
    if not grows(lengths[-1]):
        return fixed(output.shape)
    return (
        *fixed(output.shape[:-1]),
        lengths[-1] if len(output.shape) > 1 else proportional(output.shape[0], call.batch),
    )


def _ends(call: ShapedCall, output: Tensor) -> Extents:
    """Rule for cumulative sums of lengths with a leading zero."""
    return (proportional(output.shape[0], call.batch),) if grows(call.tensor(0)[0]) else fixed(output.shape)


def _cat(call: ShapedCall, output: Tensor) -> Extents:
    parts = [call.of(each) for each in tensors(call.call.inputs[:1]) if each.shape != (0,)]
    parts = [each for each in parts if len(each) == len(output.shape)]
    if not parts:
        return fixed(output.shape)
    dim = call.whole(1, 0) % len(output.shape)
    found = list(aligned(parts, output.shape))
    found[dim] = joined([each[dim] for each in parts])
    return tuple(found)


def _stack(call: ShapedCall, output: Tensor) -> Extents:
    parts = [call.of(each) for each in tensors(call.call.inputs[:1])]
    dim = call.whole(1, 0) % len(output.shape)
    one = list(aligned(parts, output.shape[:dim] + output.shape[dim + 1 :]))
    one.insert(dim, (Part(len(parts)),))
    return tuple(one)


def _piece(call: ShapedCall, output: Tensor) -> Extents:
    """Rule of ``slice``, ``narrow``, ``split``, ``chunk``: a part along one dimension."""
    data = call.tensor(0)
    return tuple(share(extent, size) for extent, size in zip(data, output.shape, strict=True))


def _select(call: ShapedCall, output: Tensor) -> Extents:
    data = list(call.tensor(0))
    del data[call.whole(1, 0)]
    return tuple(data)


def _expand(call: ShapedCall, output: Tensor) -> Extents:
    data = call.tensor(0)
    found = []
    for place, size in enumerate(output.shape):
        before = place - (len(output.shape) - len(data))
        if before >= 0 and prod(part.size for part in data[before]) == size:
            found.append(data[before])
        else:
            found.append(_made(place, size, call.batch))
    return tuple(found)


def _made(place: int, size: int, batch: int) -> Extent:
    """Extent of a size given by a script: the batch if it is a leading size and equals a batch above 1."""
    return proportional(size, batch) if place == 0 and size == batch > 1 else (Part(size),)


def _factory(call: ShapedCall, output: Tensor) -> Extents:
    return tuple(_made(place, size, call.batch) for place, size in enumerate(output.shape))


def _of_select(call: ShapedCall, output: Tensor) -> Extents:
    """Rule of ``select_backward(gradient, sizes, dim, place)``: one dimension more than the gradient."""
    found = list(call.tensor(0))
    dim = call.whole(2, 0) % len(output.shape)
    found.insert(dim, (Part(output.shape[dim]),))
    return tuple(found)


def _of_slice(call: ShapedCall, output: Tensor) -> Extents:
    """Rule of ``slice_backward(gradient, sizes, dim, ...)`` and padding: longer along some dimensions."""
    gradient = call.tensor(0)
    pairs = zip(gradient, output.shape, strict=True)
    return tuple(extent if prod(part.size for part in extent) == size else (Part(size),) for extent, size in pairs)


def _repeat(call: ShapedCall, output: Tensor) -> Extents:
    data, times = call.tensor(0), call.numbers(1)
    data = (*(((Part(1),),) * (len(times) - len(data))), *data)
    found = []
    for place, (extent, count) in enumerate(zip(data, times, strict=True)):
        found.append(extent if count == 1 else (*_made(place, count, call.batch), *extent))
    return tuple(found)


def _index_select(call: ShapedCall, output: Tensor) -> Extents:
    data, found = call.tensor(0), call.tensor(2)
    dim = call.whole(1, 0) % len(data)
    return (*data[:dim], found[0] if found else (Part(1),), *data[dim + 1 :])


def _gather(call: ShapedCall, output: Tensor) -> Extents:
    return call.tensor(2)


def _index(call: ShapedCall, output: Tensor) -> Extents:
    """Rule of ``x[i, j]``, ``x[:, i, j]``: dimensions of the index tensors replace the first indexed dimension."""
    data, places = call.tensor(0), call.argument(1)
    if not isinstance(places, tuple):
        raise LookupError("no indices")
    given = [place for place, each in enumerate(places) if isinstance(each, Tensor)]
    picked = [call.of(each) for each in places if isinstance(each, Tensor)]
    if not given or any(
        isinstance(each, Tensor) and each.dtype in ("bool", "uint8") for each in places
    ):  # as many rows as the mask has true values
        raise LookupError("a mask")
    kept = [extent for place, extent in enumerate(data) if place not in given]
    broadcast = len(output.shape) - len(kept)
    together = given == list(range(given[0], given[-1] + 1))
    front = given[0] if together else 0
    middle = aligned(picked, output.shape[front : front + broadcast])
    return (*kept[:front], *middle, *kept[front:])


def _group_norm(call: ShapedCall, output: Tensor) -> Extents:
    data = call.tensor(0)
    return data if len(output.shape) == len(data) else (data[0], *fixed(output.shape[1:]))


def _batch_norm(call: ShapedCall, output: Tensor) -> Extents:
    data = call.tensor(0)
    return data if len(output.shape) == len(data) and len(data) > 1 else fixed(output.shape)


def _front_of_first(call: ShapedCall, output: Tensor) -> Extents:
    """Rule for results that agree with the first tensor in leading dimensions, as far as sizes match."""
    data = call.tensor(0)
    agree = [
        extent if prod(part.size for part in extent) == size else (Part(size),)
        for extent, size in zip(data, output.shape, strict=False)
    ]
    return (*agree, *fixed(output.shape[len(agree) :]))


def _same_shape(*places: int) -> Rule:
    """Make the rule for results with the extents of the first argument among ``places`` that has the same shape."""

    def rule(call: ShapedCall, output: Tensor) -> Extents:
        for place in places:
            value = call.argument(place)
            if isinstance(value, Tensor) and value.shape == output.shape:
                return call.of(value)
        return fixed(output.shape)

    return rule


def _gradients_of_convolution(call: ShapedCall, output: Tensor) -> Extents:
    """Rule for the gradients of data, weights and bias, in this order: two of them may have the same shape."""
    place = [id(each) for each in tensors(call.call.outputs)].index(id(output))
    given = [each for each in call.call.outputs if isinstance(each, Tensor)]
    data = call.argument(1)
    first = isinstance(data, Tensor) and given and given[0].shape == data.shape and place == 0
    mask = call.call.inputs[-1] if isinstance(call.call.inputs[-1], tuple) else ()
    skipped = bool(mask) and mask[0] is False
    return call.tensor(1) if first and not skipped else fixed(output.shape)


def _fixed(call: ShapedCall, output: Tensor) -> Extents:
    return fixed(output.shape)


def _loss(call: ShapedCall, output: Tensor) -> Extents:
    """Rule for losses: one per sample, or a single one."""
    target = call.tensor(1)
    sizes = tuple(prod(part.size for part in extent) for extent in target)
    return target if output.shape and sizes == output.shape else fixed(output.shape)


def aligned(arguments: Sequence[Extents], shape: Sequence[int]) -> Extents:
    """Align like broadcasting, from the right; among matching dimensions one that grows is preferred."""
    found: list[Extent] = []
    for place, size in enumerate(shape):
        fitting = []
        for extents in arguments:
            mine = place - (len(shape) - len(extents))
            if mine >= 0 and prod(part.size for part in extents[mine]) == size:
                fitting.append(extents[mine])
        best = next((extent for extent in fitting if grows(extent)), fitting[0] if fitting else (Part(size),))
        found.append(best)
    return tuple(found)


RULES: dict[str, Rule] = {
    **dict.fromkeys(
        ("view", "_unsafe_view", "reshape", "flatten", "unflatten", "_reshape_alias", "view_as", "_reshape_copy"), _view
    ),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), _transpose),
    **dict.fromkeys(("t", "numpy_T"), _turned),
    "permute": _permute,
    "unsqueeze": _unsqueeze,
    "squeeze": _squeeze,
    **dict.fromkeys(
        ("sum", "mean", "amax", "amin", "argmax", "argmin", "logsumexp", "prod", "any", "all", "nansum"),
        _reduction(1, 2),
    ),
    **dict.fromkeys(("norm", "linalg_vector_norm"), _reduction(2, 3)),
    **dict.fromkeys(("var", "std", "var_mean", "std_mean"), _reduction(1, 3)),
    **dict.fromkeys(("mm", "bmm", "matmul", "mv", "dot", "_scaled_mm"), _product(0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addmv", "_addmm_activation"), _product(1, 2)),
    "linear": _linear,
    **dict.fromkeys(
        ("convolution", "_convolution", "cudnn_convolution", "conv2d", "conv1d", "conv3d", "miopen_convolution",
         "cudnn_convolution_relu", "_conv_depthwise2d", "thnn_conv2d"), _convolution
    ),
    **dict.fromkeys(("convolution_backward", "cudnn_convolution_backward"), _gradients_of_convolution),
    **dict.fromkeys(
        ("max_pool2d", "max_pool2d_with_indices", "avg_pool2d", "adaptive_avg_pool2d", "_adaptive_avg_pool2d",
         "adaptive_max_pool2d", "upsample_nearest2d", "upsample_bilinear2d", "pixel_shuffle"),
        _leading,
    ),
    **dict.fromkeys(
        ("max_pool2d_with_indices_backward", "avg_pool2d_backward", "_adaptive_avg_pool2d_backward"), _like(1)
    ),
    "embedding": _embedding,
    **dict.fromkeys(("_embedding_bag", "_embedding_bag_forward_only", "embedding_bag"), _bags),
    **dict.fromkeys(
        ("embedding_dense_backward", "embedding_backward", "_embedding_bag_dense_backward", "_embedding_bag_backward"),
        _fixed,
    ),
    **dict.fromkeys(("cat", "concat", "_cat"), _cat),
    "permute_2D_sparse_data": _permuted_lookups,
    "asynchronous_complete_cumsum": _ends,
    "stack": _stack,
    **dict.fromkeys(("slice", "narrow", "split", "split_with_sizes", "chunk", "tensor_split", "unsafe_split"), _piece),
    "select": _select,
    "unbind": _select,
    **dict.fromkeys(("expand", "expand_as", "broadcast_to"), _expand),
    **dict.fromkeys(
        ("zeros", "ones", "full", "empty", "empty_strided", "empty_memory_format", "rand", "randn", "randint", "arange",
         "new_zeros", "new_ones", "new_full", "new_empty", "new_empty_strided", "tensor", "scalar_tensor",
         "resize_"), _factory
    ),
    **dict.fromkeys(("repeat", "tile"), _repeat),
    "index_select": _index_select,
    "gather": _gather,
    "index": _index,
    "native_group_norm": _group_norm,
    **dict.fromkeys(
        ("native_batch_norm", "cudnn_batch_norm", "batch_norm", "_batch_norm_impl_index", "_native_batch_norm_legit"),
        _batch_norm,
    ),
    **dict.fromkeys(("native_batch_norm_backward", "cudnn_batch_norm_backward"), _same_shape(0, 1)),
    **dict.fromkeys(("native_layer_norm", "layer_norm", "_fused_rms_norm", "rms_norm"), _front_of_first),
    "native_layer_norm_backward": _same_shape(1, 5, 6),
    "native_group_norm_backward": _same_shape(1),
    **dict.fromkeys(("nll_loss_forward", "nll_loss", "cross_entropy_loss", "nll_loss2d_forward"), _loss),
    **dict.fromkeys(("nll_loss_backward", "nll_loss2d_backward", "_log_softmax_backward_data"), _like(1)),
    "_softmax_backward_data": _like(1),
    "select_backward": _of_select,
    **dict.fromkeys(("slice_backward", "constant_pad_nd", "pad", "reflection_pad2d"), _of_slice),
}  # fmt: skip


def is_factory(name: str) -> bool:
    """True if the operator makes tensors from sizes alone."""
    return rule_of(name) is _factory


# Positions of indices, offsets and lengths of pooled lookups, whose size is the number of samples times the lookups of
# each.
_INDICES = {
    **dict.fromkeys(("embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"), (1, 2)),
    "table_batched_embedding": (1,),
    "permute_2D_sparse_data": (1, 2),
    "asynchronous_complete_cumsum": (0,),
}


def indices_of(call: OperatorCall) -> list[Tensor]:
    """Return the index tensors of ``call`` if it is a pooled lookup or prepares one."""
    if call.name in LOOKUPS:
        try:
            return list(batch_arguments(call)[1:3])
        except UnforeseenCall:
            return []
    places = _INDICES.get(call.name.rpartition("::")[2], ())
    values = (call.inputs[place] for place in places if place < len(call.inputs))
    return [value for value in values if isinstance(value, Tensor)]


def rule_of(name: str) -> Rule | None:
    """Return the rule of the operator ``name``, ``None`` if broadcasting applies."""
    short = name.rpartition("::")[2]
    if name in LOOKUPS or name == "e2e::table_batched_embedding":
        return _tables
    return RULES.get(short) or RULES.get(short.rstrip("_"))
