"""Rules for operators that compute no values, or only from constants.

Without effect, an operator is removed; else it becomes one reshape. Cheap operators on constants are evaluated with
NumPy: no kernel is compiled to transpose a weight. Look-ups are bounded.

Channels-last images of exporters become NCHW by moving transpositions down until two meet. ``op(permute(x))`` becomes
``permute(op'(x))``, where ``op'`` works along axis 1 if ``op`` worked along the last axis; a product of the last axis
with a constant matrix is a 1x1 convolution. An operator without a rule still reads the transposed tensor. Operators
on a channels-last network input before the first transposition are moved after it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.rewriter import BINARY, UNARY, Definitions, RewriteRule, RuleTable, constant_of

# Operators between a framework's parameters and their use; TVM's FoldConstant evaluates all others.
_CONSTANT_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.divide": np.true_divide,
}
_CONSTANT_RESHAPES = ("relax.reshape", "relax.squeeze", "relax.expand_dims", "relax.flatten", "relax.nn.batch_flatten")


def transpose_constant(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    array = graph.constant(call.args[0])
    if array is None:
        return None
    axes = None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]
    return constant_of(np.ascontiguousarray(array.transpose(axes)))


def reshape_constant(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    array, shape = graph.constant(call.args[0]), static_shape(call)
    return None if array is None or shape is None else constant_of(array.reshape(shape))


def cast_constant(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    array = graph.constant(call.args[0])
    dtype = str(call.ty.dtype)
    known = dtype in ("float32", "float64", "float16", "int8", "int32", "int64", "uint8", "bool")
    return constant_of(array.astype(dtype)) if array is not None and known else None


def _constant_binary(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> RewriteRule:
    def evaluate(call: relax.Call, graph: Definitions) -> relax.Expr | None:
        left, right = graph.constant(call.args[0]), graph.constant(call.args[1])
        if left is None or right is None or left.dtype != right.dtype or left.dtype.kind != "f":
            return None
        return constant_of(np.asarray(function(left, right), left.dtype))

    return evaluate


CONSTANT_RULES: RuleTable = {
    "relax.permute_dims": (transpose_constant,),
    "relax.astype": (cast_constant,),
    **dict.fromkeys(_CONSTANT_RESHAPES, (reshape_constant,)),
    **{name: (_constant_binary(function),) for name, function in _CONSTANT_BINARY.items()},
}


def reshape(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite squeeze, expand_dims, flatten and reshape as ``reshape`` to a static shape; chains become one."""
    source, result = static_shape(call.args[0]), static_shape(call)
    if source is None or result is None:
        return None
    if source == result:
        return call.args[0]
    inner = graph.call(call.args[0], "relax.reshape")
    if inner is not None and _is_spread(inner, graph):
        inner = None
    data = call.args[0] if inner is None else inner.args[0]
    if call.op.name == "relax.reshape" and inner is None:
        return None
    return relax.op.reshape(data, result)


def _is_spread(call: relax.Call, graph: Definitions) -> bool:
    """True if ``call`` ends a depth-to-space, whose image must be kept: sequences made from it are views of it."""
    permuted, shape = graph.call(call.args[0], "relax.permute_dims"), static_shape(call)
    return permuted is not None and shape is not None and len(shape) == 4 and len(permuted.ty.shape) == 6


def permute_dims(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite a transposition that only moves axes of size one as a reshape."""
    shape = static_shape(call.args[0])
    if shape is None:
        return None
    axes = call.attrs.axes
    order = [int(axis) % len(shape) for axis in axes] if axes is not None else list(range(len(shape)))[::-1]
    real = [axis for axis in order if shape[axis] != 1]
    return relax.op.reshape(call.args[0], [shape[axis] for axis in order]) if real == sorted(real) else None


def drop_cast(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Remove a cast to the dtype that the tensor already has."""
    return call.args[0] if str(call.args[0].ty.dtype) == str(call.ty.dtype) else None


def drop_dropout(item: relax.TupleGetItem, graph: Definitions) -> relax.Expr | None:
    """Remove dropout, which does nothing in inference."""
    call = graph.call(item.tuple_value, "relax.nn.dropout")
    return call.args[0] if call is not None and item.index == 0 else None


def open_tuple(item: relax.TupleGetItem, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``(a, b)[0] -> a``."""
    value = graph.value(item.tuple_value)
    return value.fields[item.index] if isinstance(value, relax.Tuple) else None


def single_concat(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Remove a concatenation of one tensor."""
    fields = graph.value(call.args[0])
    return fields.fields[0] if isinstance(fields, relax.Tuple) and len(fields.fields) == 1 else None


def drop_broadcast(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Remove a broadcast of one operand to the shape of the other, which the operator does by itself."""
    for index, arg in enumerate(call.args):
        repeated, result = graph.call(arg, "relax.broadcast_to"), static_shape(call)
        source = None if repeated is None else static_shape(repeated.args[0])
        if repeated is None or source is None or result is None or static_shape(call.args[1 - index]) != result:
            continue
        aligned = (1,) * (len(result) - len(source)) + source
        operands = list(call.args)
        operands[index] = relax.op.reshape(repeated.args[0], aligned)
        return relax.Call(call.op, operands, call.attrs)
    return None


def bounded_take(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Clip the indices of a look-up to the table: with TVM's default, an index beyond it would crash."""
    if call.attrs.mode != "fast" or graph.constant(call.args[1]) is not None:
        return None
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    return relax.op.take(call.args[0], call.args[1], axis, mode="clip")


SHAPE_RULES: RuleTable = {
    "relax.reshape": (reshape,),
    "relax.squeeze": (reshape,),
    "relax.expand_dims": (reshape,),
    "relax.flatten": (reshape,),
    "relax.nn.batch_flatten": (reshape,),
    "relax.permute_dims": (permute_dims,),
    "relax.astype": (drop_cast,),
    "relax.concat": (single_concat,),
    "relax.take": (bounded_take,),
    **dict.fromkeys(BINARY, (drop_broadcast,)),
    "TupleGetItem": (drop_dropout, open_tuple),
}


_LAST = (0, 2, 3, 1)  # NCHW to NHWC
_FIRST = (0, 3, 1, 2)  # NHWC to NCHW
_REDUCTIONS = {
    "relax.mean": relax.op.mean,
    "relax.max": relax.op.max,
    "relax.min": relax.op.min,
    "relax.sum": relax.op.sum,
}


def _axes(call: relax.Call) -> tuple[int, ...] | None:
    rank, axes = len(call.ty.shape), call.attrs.axes
    return None if axes is None else tuple(int(axis) % rank for axis in axes)


def _image(expr: relax.Expr, graph: Definitions) -> relax.Expr | None:
    """Return ``x`` in NCHW if ``expr`` is its NHWC form: a transposition, or a reshape where both orders are the same
    in memory; else None.
    """
    call = graph.call(expr, "relax.permute_dims", "relax.reshape")
    shape = None if call is None else static_shape(call.args[0])
    if call is None or shape is None or len(shape) != 4 or static_shape(call) != _moved(shape, _LAST):
        return None
    if call.op.name == "relax.permute_dims":
        return call.args[0] if _axes(call) == _LAST else None
    return call.args[0] if shape[1] == 1 or shape[2] * shape[3] == 1 else None


def _moved(values: Sequence, order: Sequence[int]) -> tuple:
    return tuple(values[axis] for axis in order)


def _last(expr: relax.Expr) -> relax.Expr:
    return relax.op.permute_dims(expr, _LAST)


def _first(expr: relax.Expr) -> relax.Expr:
    return relax.op.permute_dims(expr, _FIRST)


def join_transpositions(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite two consecutive transpositions as one, or none if they cancel."""
    inner = graph.call(call.args[0], "relax.permute_dims")
    outer_axes, inner_axes = _axes(call), None if inner is None else _axes(inner)
    if inner is None or outer_axes is None or inner_axes is None:
        return None
    axes = tuple(inner_axes[axis] for axis in outer_axes)
    return inner.args[0] if axes == tuple(range(len(axes))) else relax.op.permute_dims(inner.args[0], axes)


def sink_unary(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Move a transposition after an element-wise operator of one operand."""
    image = _image(call.args[0], graph)
    if image is None:
        return None
    return _last(graph.named_here(relax.Call(call.op, [image, *call.args[1:]], call.attrs)))


def sink_binary(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Move transpositions after an operator on two transposed images, on one and a constant, or on one and a factor per
    channel of an image or per pixel.
    """
    shape = static_shape(call)
    sides = [_image(arg, graph) for arg in call.args]
    if shape is None or not any(side is not None and static_shape(arg) == shape for side, arg in _zip(sides, call)):
        return None
    operands = [_operand(arg, graph) if side is None else side for side, arg in _zip(sides, call)]
    if any(operand is None for operand in operands):
        return None
    return _last(graph.named_here(relax.Call(call.op, operands, call.attrs)))


def _zip(sides: Sequence[relax.Expr | None], call: relax.Call) -> list[tuple[relax.Expr | None, relax.Expr]]:
    return list(zip(sides, call.args, strict=True))


def _operand(expr: relax.Expr, graph: Definitions) -> relax.Expr | None:
    """Return an operand that broadcasts over NHWC in its form for NCHW; None if its values would have to be moved."""
    if graph.constant(expr) is not None:
        return _constant_first(expr, graph)
    shape = static_shape(expr)
    if shape is None or not shape or len(shape) > 4:
        return None
    aligned = (1,) * (4 - len(shape)) + shape
    if aligned[3] != 1 and aligned[1] * aligned[2] != 1:
        return None
    return relax.op.reshape(expr, _moved(aligned, _FIRST))


def _constant_first(expr: relax.Expr, graph: Definitions) -> relax.Expr | None:
    """Return a constant that broadcasts over NHWC in its form for NCHW, or None."""
    array = graph.constant(expr)
    if array is None or array.ndim > 4:
        return None
    if array.size == 1:
        return constant_of(array.reshape(()))
    aligned = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return constant_of(np.ascontiguousarray(aligned.transpose(_FIRST)))


def sink_slopes(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Move a transposition after a parametric ReLU along the channels."""
    image = _image(call.args[0], graph)
    if image is None or int(call.attrs.axis) % 4 != 3:
        return None
    return _last(graph.named_here(relax.op.nn.prelu(image, call.args[1], axis=1)))


def sink_norm(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Move a transposition after a layer norm along the channels."""
    image = _image(call.args[0], graph)
    if image is None or [int(axis) % 4 for axis in call.attrs.axes] != [3]:
        return None
    norm = relax.op.nn.layer_norm(image, *call.args[1:], axes=[1], epsilon=float(call.attrs.epsilon))
    return _last(graph.named_here(norm))


def sink_product(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Move a transposition after a product of the channels with a constant matrix, which becomes a 1x1 convolution."""
    image, weight = _image(call.args[0], graph), graph.constant(call.args[1])
    if image is None or weight is None or weight.ndim != 2 or weight.dtype != np.float32:
        return None
    kernel = relax.const(np.ascontiguousarray(weight.T)[:, :, None, None])
    return _last(graph.named_here(relax.op.nn.conv2d(image, kernel)))


def sink_reduction(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Move a transposition after a mean, sum, maximum or minimum over the pixels or over the channels."""
    image, shape, axes = _image(call.args[0], graph), static_shape(call), call.attrs.axis
    along = None if axes is None else sorted(int(axis) % 4 for axis in axes)
    if image is None or shape is None or along not in ([1, 2], [3]):
        return None
    reduced = _REDUCTIONS[call.op.name](image, axis=sorted(_LAST[axis] for axis in along), keepdims=True)
    return relax.op.reshape(graph.named_here(reduced), shape)  # the rest need not be transposed


def sink_pad(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Move a transposition after a pad."""
    image = _image(call.args[0], graph)
    return None if image is None else _last(graph.named_here(_padded(call, image, _FIRST)))


def _padded(call: relax.Call, data: relax.Expr, order: Sequence[int]) -> relax.Call:
    """Return the pad of ``call`` on ``data``, whose axes are those of the original operand in ``order``."""
    widths = [int(width) for width in call.attrs.pad_width]
    pairs = _moved([widths[2 * axis : 2 * axis + 2] for axis in range(4)], order)
    moved = [width for pair in pairs for width in pair]
    return relax.op.nn.pad(data, moved, str(call.attrs.pad_mode), float(call.attrs.pad_value))


def sink_concat(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Move transpositions after a concatenation of transposed images and constants."""
    fields, shape = graph.value(call.args[0]), static_shape(call)
    if not isinstance(fields, relax.Tuple) or shape is None or len(shape) != 4 or call.attrs.axis is None:
        return None
    images = [_image(field, graph) for field in fields.fields]
    if all(image is None for image in images):
        return None
    parts = [
        _constant_part(field, graph) if image is None else image
        for image, field in zip(images, fields.fields, strict=True)
    ]
    if any(part is None for part in parts):
        return None
    joined = relax.op.concat(relax.Tuple(parts), axis=_LAST[int(call.attrs.axis) % 4])
    return _last(graph.named_here(joined))


def _constant_part(expr: relax.Expr, graph: Definitions) -> relax.Expr | None:
    array = graph.constant(expr)
    return None if array is None else constant_of(np.ascontiguousarray(array.transpose(_FIRST)))


def sink_slice(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Move a transposition after a slice."""
    image, axes = _image(call.args[0], graph), getattr(call.args[1], "fields", None)
    if image is None or axes is None:
        return None
    numbers = [graph.scalar(axis) for axis in axes]
    if any(number is None for number in numbers):
        return None
    moved = relax.Tuple([relax.prim_value(_LAST[int(number) % 4]) for number in numbers if number is not None])
    return _last(graph.named_here(relax.Call(call.op, [image, moved, *call.args[2:]], call.attrs)))


def sink_split(item: relax.TupleGetItem, graph: Definitions) -> relax.Expr | None:
    """Move a transposition after a split."""
    call = graph.call(item.tuple_value, "relax.split")
    image = None if call is None else _image(call.args[0], graph)
    if call is None or image is None:
        return None
    sections = call.attrs.indices_or_sections
    parts = int(sections) if not hasattr(sections, "__len__") else [int(each) for each in sections]
    split = relax.op.split(image, parts, axis=_LAST[int(call.attrs.axis) % 4])
    return _last(relax.TupleGetItem(split, item.index))


# --- before the first transposition ---------------------------------------------------------------


def lift_transposition(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Move a pad, or an operator on one tensor and a constant, after the transposition to NCHW, where the next layer
    can absorb it.
    """
    if _axes(call) != _FIRST or static_shape(call) is None or not graph.has_single_user(call.args[0]):
        return None
    before = graph.call(call.args[0], "relax.nn.pad", *BINARY)
    if before is None:
        return None
    if before.op.name == "relax.nn.pad":
        return _padded(before, _first(before.args[0]), _FIRST)
    shape = static_shape(before)
    operands = []
    for arg in before.args:
        is_data = graph.constant(arg) is None and static_shape(arg) == shape
        operands.append(_first(arg) if is_data else _constant_first(arg, graph))
    computed = sum(graph.constant(arg) is None for arg in before.args)
    if computed != 1 or any(operand is None for operand in operands):
        return None
    return relax.Call(before.op, operands, before.attrs)


CHANNELS_LAST_RULES: RuleTable = {
    "relax.permute_dims": (join_transpositions, lift_transposition),
    **dict.fromkeys(UNARY, (sink_unary,)),
    **dict.fromkeys(BINARY, (sink_binary,)),
    **dict.fromkeys(_REDUCTIONS, (sink_reduction,)),
    "relax.nn.prelu": (sink_slopes,),
    "relax.nn.layer_norm": (sink_norm,),
    "relax.matmul": (sink_product,),
    "relax.nn.pad": (sink_pad,),
    "relax.concat": (sink_concat,),
    "relax.strided_slice": (sink_slice,),
    "TupleGetItem": (sink_split,),
}
