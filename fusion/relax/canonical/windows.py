"""Rules for convolutions and pools: padding, global pools, transposed convolutions, computed weights.

Pads are folded into the window that reads them; global pools are means over H and W.

Each phase of the stride of a transposed convolution is an ordinary convolution. Row ``s q + y`` of the result (stride
s, phase y) only reads every s-th row of the kernel (Shi et al. 2016, "Is the deconvolution layer the same as a
convolutional layer?"). The channels hold the phases, and depth-to-space puts them in place. Subsequent operators per
channel or per value are applied before that, where a kernel does them at no cost.

Kernels for convolutions need constant, packed weights; kernels for products of two computed tensors do not. So for
computed weights (modulated or predicted by other layers, cross-correlation) the pixels that a window reads are copied
next to each other, and the convolution is a product with them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.composites import clip_bounds
from fusion.relax.canonical.rewriter import Definitions, RuleTable


def _zero_padding(expr: relax.Expr, graph: Definitions) -> tuple[relax.Expr, tuple[int, ...], float] | None:
    """Return (data, (top, left, bottom, right), value) if ``expr`` pads H and W of an NCHW tensor with a constant; else
    None.
    """
    call = graph.call(expr, "relax.nn.pad")
    if call is None or call.attrs.pad_mode != "constant":
        return None
    widths = np.array([int(width) for width in call.attrs.pad_width]).reshape(-1, 2)
    if widths.shape != (4, 2) or widths[:2].any() or (widths < 0).any():
        return None
    return call.args[0], (*widths[2:, 0].tolist(), *widths[2:, 1].tolist()), float(call.attrs.pad_value)


def _sum(left: Sequence[int], right: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(a) + int(b) for a, b in zip(left, right, strict=True))


def remove_pad(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Remove a pad of width zero."""
    return None if any(int(width) for width in call.attrs.pad_width) else call.args[0]


def fold_pad_into_conv(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``conv2d(pad(x, 0))`` with the widths added to the convolution's own padding."""
    padding = _zero_padding(call.args[0], graph)
    if padding is None or call.attrs.data_layout != "NCHW" or padding[2] != 0:
        return None
    data, widths, _ = padding
    attrs = call.attrs
    return relax.op.nn.conv2d(
        data,
        call.args[1],
        strides=attrs.strides,
        padding=_sum(attrs.padding, widths),
        dilation=attrs.dilation,
        groups=attrs.groups,
        data_layout=attrs.data_layout,
        kernel_layout=attrs.kernel_layout,
        out_layout=attrs.out_layout,
        out_dtype=attrs.out_dtype,
    )


def fold_pad_into_max_pool(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Fold a pad into a max pool if it cannot be the maximum: minus infinity, or zero below values that are not
    negative.
    """
    padding = _zero_padding(call.args[0], graph)
    attrs = call.attrs
    if padding is None or attrs.layout != "NCHW" or attrs.ceil_mode:
        return None
    data, widths, value = padding
    total = _sum(attrs.padding, widths)
    harmless = value <= -3e38 or (value == 0 and _is_non_negative(data, graph))
    # A window entirely in the padding would yield the value of the pad.
    inside = all(width < int(size) for width, size in zip(total, (*attrs.pool_size, *attrs.pool_size), strict=True))
    if not harmless or not inside:
        return None
    return relax.op.nn.max_pool2d(data, attrs.pool_size, attrs.strides, total, attrs.dilation)


def fold_pad_into_avg_pool(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Fold a zero pad into an average pool that counts it; the pool must not have padding that it does not count."""
    padding = _zero_padding(call.args[0], graph)
    attrs = call.attrs
    if padding is None or attrs.layout != "NCHW" or attrs.ceil_mode or padding[2] != 0:
        return None
    if any(int(width) for width in attrs.padding) and not attrs.count_include_pad:
        return None
    data, widths, _ = padding
    total = _sum(attrs.padding, widths)
    return relax.op.nn.avg_pool2d(data, attrs.pool_size, attrs.strides, total, attrs.dilation, count_include_pad=True)


def _is_non_negative(expr: relax.Expr, graph: Definitions) -> bool:
    if graph.call(expr, "relax.nn.relu", "relax.sigmoid") is not None:
        return True
    clip = graph.call(expr, "relax.clip")
    bounds = None if clip is None else clip_bounds(clip, graph)
    if bounds is not None and bounds[0] >= 0:
        return True
    pool = graph.call(expr, "relax.nn.max_pool2d")
    return pool is not None and _is_non_negative(pool.args[0], graph)


def global_average(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite an average over the whole image as ``mean(axis=[2, 3], keepdims=True)``."""
    shape, result = static_shape(call.args[0]), static_shape(call)
    attrs = call.attrs
    if shape is None or result is None or attrs.layout != "NCHW" or result[2:] != (1, 1):
        return None
    if call.op.name == "relax.nn.avg_pool2d" and not _averages_everything(shape[2:], attrs):
        return None
    return relax.op.mean(call.args[0], [2, 3], keepdims=True)


def _averages_everything(image: Sequence[int], attrs: Any) -> bool:
    """True if the one window of a pool holds the whole image and counts nothing else."""
    padding = [int(width) for width in attrs.padding]
    counts_padding = bool(attrs.count_include_pad) and any(padding)
    # The first window starts at the padding before the image.
    covers = all(padding[axis] + image[axis] <= int(attrs.pool_size[axis]) for axis in (0, 1))
    return covers and not counts_padding and not any(int(step) > 1 for step in attrs.dilation)


def canonical_mean(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite means over H and W to keep their dimensions, with a reshape after them if the model drops
    the dimensions.
    """
    shape, result = static_shape(call.args[0]), static_shape(call)
    if shape is None or result is None or len(shape) != 4 or call.attrs.axis is None:
        return None
    axes = [int(axis) % 4 for axis in call.attrs.axis]
    if sorted(axes) != [2, 3] or (axes == [2, 3] and call.attrs.keepdims and min(map(int, call.attrs.axis)) > 0):
        return None
    mean = relax.op.mean(call.args[0], [2, 3], keepdims=True)
    return mean if call.attrs.keepdims else relax.op.reshape(mean, result)


def sum_of_pixels(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite a sum over H and W as the mean times the number of pixels: there is a kernel for the mean."""
    shape, result, axes = static_shape(call.args[0]), static_shape(call), call.attrs.axis
    if shape is None or result is None or len(shape) != 4 or axes is None or str(call.ty.dtype) != "float32":
        return None
    if sorted(int(axis) % 4 for axis in axes) != [2, 3]:
        return None
    pixels = relax.const(np.float32(shape[2] * shape[3]))
    return relax.op.reshape(relax.op.multiply(relax.op.mean(call.args[0], [2, 3], keepdims=True), pixels), result)


def drop_unit_window(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Remove a pool whose window is one pixel with stride one."""
    attrs = call.attrs
    sizes = [*attrs.pool_size, *attrs.strides]
    return call.args[0] if math.prod(map(int, sizes)) == 1 and not any(map(int, attrs.padding)) else None


def resolve_ceil_mode(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``ceil_mode`` as padding after the image, if that computes the same."""
    shape, result = static_shape(call.args[0]), static_shape(call)
    attrs = call.attrs
    if not attrs.ceil_mode or shape is None or result is None or attrs.layout != "NCHW":
        return None
    is_average = call.op.name == "relax.nn.avg_pool2d"
    padding = [int(width) for width in attrs.padding]
    extra = [_missing_padding(shape[2 + a], result[2 + a], padding[a] + padding[2 + a], attrs, a) for a in (0, 1)]
    if is_average and any(extra) and attrs.count_include_pad and any(padding):
        return None  # would count the model's padding, but not the pixels beyond it
    total = (*padding[:2], padding[2] + extra[0], padding[3] + extra[1])
    pool = relax.op.nn.avg_pool2d if is_average else relax.op.nn.max_pool2d
    counted = bool(attrs.count_include_pad) and not any(extra)
    return pool(call.args[0], attrs.pool_size, attrs.strides, total, attrs.dilation, False, counted)


def _missing_padding(size: int, outputs: int, padding: int, attrs: Any, axis: int) -> int:
    extent = int(attrs.dilation[axis]) * (int(attrs.pool_size[axis]) - 1) + 1
    return max((outputs - 1) * int(attrs.strides[axis]) + extent - size - padding, 0)


WINDOW_RULES: RuleTable = {
    "relax.nn.pad": (remove_pad,),
    "relax.nn.conv2d": (fold_pad_into_conv,),
    "relax.nn.max_pool2d": (drop_unit_window, resolve_ceil_mode, fold_pad_into_max_pool),
    "relax.nn.avg_pool2d": (drop_unit_window, global_average, resolve_ceil_mode, fold_pad_into_avg_pool),
    "relax.nn.adaptive_avg_pool2d": (global_average,),
    "relax.mean": (canonical_mean,),
    "relax.sum": (sum_of_pixels,),
}


_UNARY = (
    *("relax.nn.relu", "relax.nn.gelu", "relax.nn.gelu_tanh", "relax.nn.silu", "relax.nn.leakyrelu"),
    *("relax.sigmoid", "relax.tanh", "relax.clip"),
)
_PRELU = "relax.nn.prelu"
_WITH_CONSTANT = ("relax.add", "relax.multiply", _PRELU)
# Orders of the axes (batch, two factors and channels in some order, height, width) that put rows and columns in place:
# with the factors before the channels, as in our own rule, and after them, as in ONNX's DepthToSpace of mode CRD.
_ROWS_FIRST = (0, 3, 4, 1, 5, 2)
_CHANNELS_FIRST = (0, 1, 4, 2, 5, 3)


@dataclass(frozen=True)
class Phase:
    """Phase along one axis: ``taps`` of the kernel in the order in which a convolution reads them, and its pads."""

    taps: tuple[int, ...]
    before: int
    after: int


def split_into_phases(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``conv2d_transpose`` as one convolution per phase; as a single one if there is one phase, or if all
    phases of one group read the same pixels (a kernel as large as the stride).
    """
    weight, shape, result = graph.constant(call.args[1]), static_shape(call.args[0]), static_shape(call)
    attrs = call.attrs
    strides = (int(attrs.strides[0]), int(attrs.strides[1]))
    if weight is None or shape is None or result is None:
        return None
    plain = attrs.data_layout == "NCHW" and attrs.kernel_layout == "IOHW" and attrs.out_layout in ("NCHW", "")
    if not plain or any(int(step) != 1 for step in attrs.dilation) or str(call.ty.dtype) != "float32":
        return None
    padding = [int(width) for width in attrs.padding]
    # All phases get the same length, and the excess is cut off.
    whole = [-(-result[2 + axis] // strides[axis]) * strides[axis] for axis in (0, 1)]
    axes = [
        phases_along(int(weight.shape[2 + axis]), strides[axis], padding[axis], shape[2 + axis], whole[axis])
        for axis in (0, 1)
    ]
    if axes[0] is None or axes[1] is None:
        return None
    phases = [(row, column) for row in axes[0] for column in axes[1]]
    groups = int(attrs.groups)
    ordinary = outputs_first(weight, groups)
    weights = [ordinary[:, :, row.taps][:, :, :, column.taps] for row, column in phases]
    pads = [(row.before, column.before, row.after, column.after) for row, column in phases]
    taps = {each.shape[2:] for each in weights}
    if len(phases) == 1:
        return _convolution(call.args[0], weights[0], pads[0], groups)
    if len(set(pads)) == 1 and len(taps) == 1 and groups == 1:
        joined: relax.Expr = graph.named_here(_convolution(call.args[0], np.concatenate(weights), pads[0]))
    else:
        parts = [_convolution(call.args[0], each, pad, groups) for each, pad in zip(weights, pads, strict=True)]
        joined = relax.op.concat(relax.Tuple(parts), axis=1)
    image = _depth_to_space(joined, strides, (*result[:2], *whole))
    return image if tuple(whole) == result[2:] else relax.op.strided_slice(image, [2, 3], [0, 0], list(result[2:]))


def outputs_first(weight: np.ndarray, groups: int) -> np.ndarray:
    """Return the weight of a transposed convolution, (in, out of a group, ...), as the weight of an ordinary one."""
    inputs, outputs, *window = weight.shape
    apart = weight.reshape(groups, inputs // groups, outputs, *window).swapaxes(1, 2)
    return np.ascontiguousarray(apart.reshape(groups * outputs, inputs // groups, *window))


def phases_along(kernel: int, stride: int, padding: int, size: int, result: int) -> list[Phase] | None:
    """Return the phases along an axis of a ``result`` in whole strides; None if they are not convolutions of equal
    length.
    """
    length = result // stride
    if kernel < stride:
        return None
    phases = []
    for phase in range(stride):
        first = (phase + padding) % stride
        taps = tuple(range(first, kernel, stride))[::-1]
        before = len(taps) - 1 - (phase + padding - first) // stride
        after = length - size - before + len(taps) - 1
        if before < 0 or after < 0:
            return None
        phases.append(Phase(taps, before, after))
    return phases


def _convolution(data: relax.Expr, weight: np.ndarray, padding: Sequence[int], groups: int = 1) -> relax.Call:
    return relax.op.nn.conv2d(data, relax.const(np.ascontiguousarray(weight)), padding=tuple(padding), groups=groups)


def _depth_to_space(
    data: relax.Expr, strides: tuple[int, int], result: tuple[int, ...], order: Sequence[int] = _ROWS_FIRST
) -> relax.Expr:
    """Move channels to pixels: channels in the order (row, column, channel of ``result``), or (channel,
    row, column).
    """
    batch, channels, height, width = result
    small = (height // strides[0], width // strides[1])
    factors = (*strides, channels) if order == _ROWS_FIRST else (channels, *strides)
    apart = relax.op.reshape(data, (batch, *factors, *small))
    return relax.op.reshape(relax.op.permute_dims(apart, list(order)), result)


def _spread(expr: relax.Expr, graph: Definitions) -> tuple[relax.Expr, tuple[int, int], Sequence[int]] | None:
    """Return the input of the depth-to-space that computes ``expr``, its strides and order; None if it is something
    else or read twice.
    """
    merged = graph.call(expr, "relax.reshape") if graph.has_single_user(expr) else None
    permuted = None if merged is None else graph.call(merged.args[0], "relax.permute_dims")
    order = () if permuted is None else tuple(map(int, permuted.attrs.axes or ()))
    if permuted is None or order not in (_ROWS_FIRST, _CHANNELS_FIRST):
        return None
    apart = graph.call(permuted.args[0], "relax.reshape")
    shape, result = static_shape(permuted.args[0]), static_shape(expr)
    if apart is None or shape is None or result is None or len(result) != 4:
        return None
    batch, *factors, height, width = shape
    rows, columns, channels = factors if order == _ROWS_FIRST else (factors[1], factors[2], factors[0])
    spread = (batch, channels, height * rows, width * columns)
    before = static_shape(apart.args[0])
    whole = before == (batch, channels * rows * columns, height, width)
    return (apart.args[0], (rows, columns), order) if whole and spread == result else None


def apply_before_spreading(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``f(depth_to_space(x)) -> depth_to_space(f(x))`` for functions that do not depend on the position of a
    pixel.
    """
    found, result = _spread(call.args[0], graph), static_shape(call)
    if found is None or result is None or static_shape(call.args[0]) != result:
        return None
    data, strides, order = found
    phases = strides[0] * strides[1]
    constant = None
    if len(call.args) > 1 and call.op.name in _WITH_CONSTANT:
        constant = graph.constant(call.args[1])
        if constant is None or not _is_along_channels(call, constant, result[1]):
            return None
    joined = graph.call(data, "relax.concat")
    fields = None if joined is None else graph.value(joined.args[0])
    if isinstance(fields, relax.Tuple) and len(fields.fields) == phases and order == _ROWS_FIRST:
        parts = [_applied(call, field, constant, 1, order) for field in fields.fields]
        return _depth_to_space(relax.op.concat(relax.Tuple(parts), axis=1), strides, result)
    return _depth_to_space(_applied(call, data, constant, phases, order), strides, result, order)


def _is_along_channels(call: relax.Call, constant: np.ndarray, channels: int) -> bool:
    """True if the constant operand is one value, or one per channel."""
    if constant.size == 1:
        return True
    if call.op.name == _PRELU:
        return constant.shape == (channels,) and int(call.attrs.axis) % 4 == 1
    return constant.ndim <= 4 and (1,) * (4 - constant.ndim) + constant.shape == (1, channels, 1, 1)


def _applied(
    call: relax.Call, data: relax.Expr, constant: np.ndarray | None, copies: int, order: Sequence[int]
) -> relax.Call:
    """Return ``call`` on ``data``, which has ``copies`` times as many channels."""
    rest = list(call.args[1:])
    if constant is not None and constant.size > 1:
        copy = np.tile if order == _ROWS_FIRST else np.repeat
        vector = copy(constant.reshape(-1), copies)
        rest = [relax.const(vector if call.op.name == _PRELU else vector.reshape(1, -1, 1, 1))]
    return relax.Call(call.op, [data, *rest], call.attrs)


TRANSPOSED_RULES: RuleTable = {
    "relax.nn.conv2d_transpose": (split_into_phases,),
    "relax.add": (apply_before_spreading,),
    "relax.multiply": (apply_before_spreading,),
    _PRELU: (apply_before_spreading,),
    **dict.fromkeys(_UNARY, (apply_before_spreading,)),
}


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
