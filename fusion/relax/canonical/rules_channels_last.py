"""Rules that bring images that an exporter holds channels-last back to NCHW: transpositions sink until two meet.

``op(permute(x))`` becomes ``permute(op'(x))`` with ``op'`` along axis 1 where ``op`` was along the last one; a product
of the last axis with a constant matrix is a 1x1 convolution. What no rule takes reads the transposed tensor as before.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from fusion.relax.canonical.rewriter import Definitions, RewriteRule, constant_of, static_shape

_LAST = (0, 2, 3, 1)  # NCHW to NHWC
_UNARY = (
    *("relax.nn.relu", "relax.nn.gelu", "relax.nn.gelu_tanh", "relax.nn.silu", "relax.clip", "relax.sigmoid"),
    *("relax.tanh", "relax.erf", "relax.exp", "relax.negative", "relax.sqrt", "relax.abs"),
)
_BINARY = ("relax.add", "relax.subtract", "relax.multiply", "relax.divide", "relax.maximum", "relax.minimum")


def _axes(call: relax.Call) -> tuple[int, ...] | None:
    rank, axes = len(call.ty.shape), call.attrs.axes
    return None if axes is None else tuple(int(axis) % rank for axis in axes)


def _image(expr: relax.Expr, graph: Definitions) -> relax.Expr | None:
    """``x`` in NCHW if ``expr`` is its NHWC form, read once."""
    call = graph.call(expr, "relax.permute_dims")
    if call is None or _axes(call) != _LAST or static_shape(call) is None or not graph.has_single_user(expr):
        return None
    return call.args[0]


def _last(expr: relax.Expr) -> relax.Expr:
    return relax.op.permute_dims(expr, _LAST)


def join(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Two transpositions in a row as one, or none."""
    inner = graph.call(call.args[0], "relax.permute_dims")
    outer_axes, inner_axes = _axes(call), None if inner is None else _axes(inner)
    if inner is None or outer_axes is None or inner_axes is None:
        return None
    axes = tuple(inner_axes[axis] for axis in outer_axes)
    return inner.args[0] if axes == tuple(range(len(axes))) else relax.op.permute_dims(inner.args[0], axes)


def sink_unary(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Behind an operator that computes element by element."""
    image = _image(call.args[0], graph)
    if image is None:
        return None
    return _last(graph.named_here(relax.Call(call.op, [image, *call.args[1:]], call.attrs)))


def sink_binary(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Behind an operator on two transposed images, or on one and a constant."""
    sides = [_image(arg, graph) for arg in call.args]
    if all(side is None for side in sides):
        return None
    shape = static_shape(call)
    if shape is None:
        return None
    operands = [
        _constant_first(arg, graph) if side is None else side for side, arg in zip(sides, call.args, strict=True)
    ]
    if any(operand is None for operand in operands):
        return None
    if any(side is not None and len(static_shape(side) or ()) != len(shape) for side in sides):
        return None
    return _last(graph.named_here(relax.Call(call.op, operands, call.attrs)))


def _constant_first(expr: relax.Expr, graph: Definitions) -> relax.Expr | None:
    """A constant that broadcasts over NHWC, as it broadcasts over NCHW."""
    array = graph.constant(expr)
    if array is None or array.ndim > 4:
        return None
    if array.size == 1:
        return constant_of(array.reshape(()))
    aligned = array.reshape((1,) * (4 - array.ndim) + array.shape)
    return constant_of(np.ascontiguousarray(aligned.transpose(0, 3, 1, 2)))


def sink_norm(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Behind a layer norm along the channels."""
    image = _image(call.args[0], graph)
    if image is None or [int(axis) % 4 for axis in call.attrs.axes] != [3]:
        return None
    norm = relax.op.nn.layer_norm(image, *call.args[1:], axes=[1], epsilon=float(call.attrs.epsilon))
    return _last(graph.named_here(norm))


def sink_product(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Behind a product of the channels with a constant matrix: a 1x1 convolution."""
    image, weight = _image(call.args[0], graph), graph.constant(call.args[1])
    if image is None or weight is None or weight.ndim != 2 or weight.dtype != np.float32:
        return None
    kernel = relax.const(np.ascontiguousarray(weight.T)[:, :, None, None])
    return _last(graph.named_here(relax.op.nn.conv2d(image, kernel)))


def sink_mean(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Behind a mean over the pixels, which needs no transposition any more."""
    image, shape, axes = _image(call.args[0], graph), static_shape(call), call.attrs.axis
    if image is None or shape is None or axes is None or sorted(int(axis) % 4 for axis in axes) != [1, 2]:
        return None
    mean = graph.named_here(relax.op.mean(image, axis=[2, 3], keepdims=True))
    return relax.op.reshape(mean, shape)


RULES: dict[str, tuple[RewriteRule, ...]] = {
    "relax.permute_dims": (join,),
    **dict.fromkeys(_UNARY, (sink_unary,)),
    **dict.fromkeys(_BINARY, (sink_binary,)),
    "relax.nn.layer_norm": (sink_norm,),
    "relax.matmul": (sink_product,),
    "relax.mean": (sink_mean,),
}
