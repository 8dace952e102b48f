"""Rules for convolutions whose weights are computed (modulated or predicted by other layers, cross-correlation).

Kernels for convolutions need constant, packed weights; kernels for products of two computed tensors do not. So the
pixels that a window reads are copied next to each other, and the convolution is a product with them.
"""

from __future__ import annotations

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.rewriter import Definitions, RuleTable

# Limit of copies of the image, one per tap of the window: beyond it the rewrite does not pay.
MOST_TAPS = 64


def product_of_columns(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``conv2d(x, w)`` with a computed ``w`` as ``matmul(w, columns of x)``, a product for each image and
    group.
    """
    data, weight = call.args
    shape, taps, result = static_shape(data), static_shape(weight), static_shape(call)
    attrs = call.attrs
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or "NCHW")
    if shape is None or taps is None or result is None or layouts != ("NCHW", "OIHW", "NCHW"):
        return None
    # Weights computed from constants alone (dequantised weights) are evaluated before the run; a parameter may still be
    # bound to a constant.
    if not isinstance(graph.value(weight), relax.Call) or graph.is_constant(weight) or taps[2] * taps[3] > MOST_TAPS:
        return None
    if str(call.ty.dtype) != "float32" or str(weight.ty.dtype) != "float32":
        return None
    groups, batch, (outputs, inputs) = int(attrs.groups), shape[0], taps[:2]
    size = inputs * taps[2] * taps[3]
    columns = relax.op.reshape(_columns(call, data, shape, taps, result), (batch * groups, size, result[2] * result[3]))
    rows: relax.Expr = relax.op.reshape(weight, (1, groups, outputs // groups, size))
    if batch > 1:
        rows = relax.op.broadcast_to(rows, (batch, groups, outputs // groups, size))
    rows = relax.op.reshape(rows, (batch * groups, outputs // groups, size))
    return relax.op.reshape(graph.named_here(relax.op.matmul(rows, columns)), result)


def _columns(
    call: relax.Call, data: relax.Expr, shape: tuple[int, ...], taps: tuple[int, ...], result: tuple[int, ...]
) -> relax.Expr:
    """Return the pixels that each tap of the window reads from each channel of ``data``, (N, C, taps, pixels)."""
    attrs = call.attrs
    top, left, bottom, right = (int(width) for width in attrs.padding)
    strides, dilation = [int(step) for step in attrs.strides], [int(step) for step in attrs.dilation]
    if top or left or bottom or right:
        data = relax.op.nn.pad(data, [0, 0, 0, 0, top, bottom, left, right], "constant", 0.0)
    pixels = result[2] * result[3]
    read = []
    for row, column in np.ndindex(*taps[2:]):
        begin = [row * dilation[0], column * dilation[1]]
        end = [first + (count - 1) * step + 1 for first, count, step in zip(begin, result[2:], strides, strict=True)]
        part = data
        if taps[2:] != (1, 1) or strides != [1, 1]:
            part = relax.op.strided_slice(data, [2, 3], begin, end, strides)
        read.append(relax.op.reshape(part, (*shape[:2], 1, pixels)))
    return read[0] if len(read) == 1 else relax.op.concat(relax.Tuple(read), axis=2)


COMPUTED_WEIGHT_RULES: RuleTable = {"relax.nn.conv2d": (product_of_columns,)}
