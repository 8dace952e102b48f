"""Rules that make images of one row of what has one dimension, so that kernels of images compute it.

A convolution or pool of (N, C, W) becomes one of (N, C, 1, W) between two views; a view behind it sinks through what
treats all values, or all of a channel, alike.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from fusion.relax.canonical.rewriter import Definitions, RewriteRule, static_shape

_UNARY = (
    *("relax.nn.relu", "relax.nn.gelu", "relax.nn.gelu_tanh", "relax.nn.silu", "relax.nn.leakyrelu", "relax.clip"),
    *("relax.sigmoid", "relax.tanh"),
)
_BINARY = ("relax.add", "relax.multiply")
_POOLS = {"relax.nn.max_pool1d": relax.op.nn.max_pool2d, "relax.nn.avg_pool1d": relax.op.nn.avg_pool2d}


def _image(expr: relax.Expr) -> relax.Expr | None:
    """(N, C, W) as (N, C, 1, W)."""
    shape = static_shape(expr)
    return None if shape is None or len(shape) != 3 else relax.op.reshape(expr, (shape[0], shape[1], 1, shape[2]))


def _row(image: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
    return relax.op.reshape(image, shape)


def _of_image(expr: relax.Expr, graph: Definitions) -> relax.Expr | None:
    """The image of one row that ``expr``, read once, is a view of."""
    call, shape = graph.call(expr, "relax.reshape"), static_shape(expr)
    if call is None or shape is None or len(shape) != 3 or not graph.has_single_user(expr):
        return None
    return call.args[0] if static_shape(call.args[0]) == (shape[0], shape[1], 1, shape[2]) else None


def widen_convolution(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """``conv1d`` as ``conv2d`` with a window of one row."""
    weight, image, shape, attrs = graph.constant(call.args[1]), _image(call.args[0]), static_shape(call), call.attrs
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or "NCW")
    if weight is None or image is None or shape is None or layouts != ("NCW", "OIW", "NCW"):
        return None
    before, after = _pads(attrs.padding)
    wide = relax.op.nn.conv2d(
        image,
        relax.const(np.ascontiguousarray(weight[:, :, None, :])),
        strides=(1, int(attrs.strides[0])),
        padding=(0, before, 0, after),
        dilation=(1, int(attrs.dilation[0])),
        groups=int(attrs.groups),
    )
    return _row(graph.named_here(wide), shape)


def widen_pool(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """A pool along the row as one with a window of one row."""
    image, shape, attrs = _image(call.args[0]), static_shape(call), call.attrs
    if image is None or shape is None or attrs.layout != "NCW":
        return None
    before, after = _pads(attrs.padding)
    pool = _POOLS[call.op.name](
        image,
        (1, int(attrs.pool_size[0])),
        (1, int(attrs.strides[0])),
        (0, before, 0, after),
        (1, int(attrs.dilation[0])),
        bool(attrs.ceil_mode),
        bool(attrs.count_include_pad),
    )
    return _row(graph.named_here(pool), shape)


def _pads(padding: relax.Expr) -> tuple[int, int]:
    widths = [int(width) for width in padding]
    return widths[0], widths[-1]


def sink_unary(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Behind an operator that computes element by element."""
    image, shape = _of_image(call.args[0], graph), static_shape(call)
    if image is None or shape is None:
        return None
    return _row(graph.named_here(relax.Call(call.op, [image, *call.args[1:]], call.attrs)), shape)


def sink_binary(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Behind an operator on two such views, or on one and a constant."""
    shape, (left, right) = static_shape(call), call.args
    image = _of_image(left, graph)
    if image is None or shape is None or static_shape(left) != shape:
        return None
    array = graph.constant(right)
    if array is not None:
        if array.ndim > 3:
            return None
        aligned = array.reshape((1,) * (3 - array.ndim) + array.shape)
        other: relax.Expr | None = relax.const(np.ascontiguousarray(aligned[:, :, None, :]))
    else:
        other = _of_image(right, graph) if static_shape(right) == shape else None
    if other is None:
        return None
    return _row(graph.named_here(relax.Call(call.op, [image, other], call.attrs)), shape)


def widen_mean(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """A mean along the row of such a view as one over the image."""
    image, shape, axes = _of_image(call.args[0], graph), static_shape(call), call.attrs.axis
    if image is None or shape is None or axes is None or [int(axis) % 3 for axis in axes] != [2]:
        return None
    return relax.op.reshape(graph.named_here(relax.op.mean(image, [2, 3], keepdims=True)), shape)


RULES: dict[str, tuple[RewriteRule, ...]] = {
    "relax.nn.conv1d": (widen_convolution,),
    **dict.fromkeys(_POOLS, (widen_pool,)),
    **dict.fromkeys(_UNARY, (sink_unary,)),
    **dict.fromkeys(_BINARY, (sink_binary,)),
    "relax.mean": (widen_mean,),
}
