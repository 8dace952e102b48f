"""Rules for padding and pooling: pads are folded into the window that reads them, global pools are means
over H and W.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.rewriter import Definitions, RuleTable
from fusion.relax.canonical.rules_activation import clip_bounds


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
