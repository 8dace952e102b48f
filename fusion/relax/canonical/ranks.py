"""Rules that convert sequences (one axis besides the channels) and volumes (three) to images, which have kernels.

A convolution along one axis is one of images of a single row. A convolution along three axes is one of frames, whose
channels are those of all frames that a window reads; if it reads one pixel of each frame, the rows of its image are the
frames. Subsequent operators per value or per channel are computed on the image, and :class:`_View` describes how the
original tensor is a view of it.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.rewriter import BINARY, UNARY, Definitions, RuleTable, constant_of

# Kernels unroll the taps of a row and loop over the rows: longer windows are placed along a column.
LONGEST_ROW = 11
_FRAMES_BEHIND_CHANNELS = (0, 2, 1, 3, 4)
_CONV = "relax.nn.conv2d"


@dataclass(frozen=True, eq=False)
class _View:
    """View of an image as a tensor (N, C, ...) of ``shape``: a reshape, or a move of the frames after the channels."""

    image: relax.Expr
    shape: tuple[int, ...]
    # The image is (N D, C, H, W), and the frames are moved after the channels.
    frames: bool = False

    @property
    def image_shape(self) -> tuple[int, ...]:
        shape = static_shape(self.image)
        assert shape is not None  # guaranteed by _view
        return shape

    def of(self, image: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """Return a tensor of ``shape``, the same kind of view of ``image``."""
        if not self.frames:
            return relax.op.reshape(image, shape)
        batch, channels, depth, height, width = shape
        apart = relax.op.reshape(image, (batch, depth, channels, height, width))
        return relax.op.permute_dims(apart, _FRAMES_BEHIND_CHANNELS)


def _view(expr: relax.Expr, graph: Definitions) -> _View | None:
    """Return ``expr`` as a view of an image; None if it is not one."""
    shape = static_shape(expr)
    if shape is None or len(shape) not in (3, 4, 5):
        return None
    turned = graph.call(expr, "relax.permute_dims")
    if turned is not None:
        axes = None if turned.attrs.axes is None else tuple(int(axis) % len(shape) for axis in turned.attrs.axes)
        if axes != _FRAMES_BEHIND_CHANNELS:
            return None
        expr = turned.args[0]
    merged = graph.call(expr, "relax.reshape")
    image = None if merged is None else static_shape(merged.args[0])
    if merged is None or image is None or len(image) != 4:
        return None
    batch, channels = (shape[0], shape[1]) if turned is None else (shape[0] * shape[2], shape[1])
    if len(shape) == 4 and not (shape[2] == image[3] == 1 != image[2]):
        return None  # single images: only a row placed along a column
    if image[:2] != (batch, channels) or (turned is not None and image[2:] != shape[3:]):
        return None
    return _View(merged.args[0], shape, frames=turned is not None)


# --- convolutions and pools ----------------------------------------------------------------------


def convolution_of_a_sequence(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``conv1d`` as ``conv2d`` of one row, or of one column if the window is long."""
    weight, result, attrs = graph.constant(call.args[1]), static_shape(call), call.attrs
    shape = static_shape(call.args[0])
    if weight is None or shape is None or result is None or str(call.ty.dtype) != "float32":
        return None
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or "NCW")
    if layouts != ("NCW", "OIW", "NCW") or weight.dtype != np.float32:
        return None
    axis = 3 if weight.shape[2] <= LONGEST_ROW else 2
    before, behind = (int(width) for width in attrs.padding)
    conv = relax.op.nn.conv2d(
        _image_along(call.args[0], axis),
        relax.const(weight.reshape((*weight.shape[:2], *_along(axis, weight.shape[2], 1)))),
        strides=_along(axis, int(attrs.strides[0]), 1),
        padding=(*_along(axis, before, 0), *_along(axis, behind, 0)),
        dilation=_along(axis, int(attrs.dilation[0]), 1),
        groups=int(attrs.groups),
    )
    return relax.op.reshape(graph.named_here(conv), result)


def stand_upright(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``conv2d`` of an image of one row (as exporters write it) with a long window as one of one column."""
    weight, shape, result, attrs = (
        graph.constant(call.args[1]),
        static_shape(call.args[0]),
        static_shape(call),
        call.attrs,
    )
    if weight is None or shape is None or result is None or shape[2:3] + weight.shape[2:3] != (1, 1):
        return None
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or "NCHW")
    top, left, bottom, right = (int(width) for width in attrs.padding)
    if weight.shape[3] <= LONGEST_ROW or top or bottom or layouts != ("NCHW", "OIHW", "NCHW"):
        return None
    conv = relax.op.nn.conv2d(
        relax.op.reshape(call.args[0], (*shape[:2], shape[3], 1)),
        constant_of(weight.transpose(0, 1, 3, 2)),
        strides=(int(attrs.strides[1]), 1),
        padding=(left, 0, right, 0),
        dilation=(int(attrs.dilation[1]), 1),
        groups=int(attrs.groups),
    )
    return relax.op.reshape(graph.named_here(conv), result)


def transposed_convolution_of_a_sequence(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``conv1d_transpose`` as ``conv2d_transpose`` of one row, whose phases are convolutions."""
    weight, result, attrs = graph.constant(call.args[1]), static_shape(call), call.attrs
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or "NCW")
    if weight is None or result is None or static_shape(call.args[0]) is None or layouts != ("NCW", "IOW", "NCW"):
        return None
    before, behind = (int(width) for width in attrs.padding)
    image = relax.op.nn.conv2d_transpose(
        _image_along(call.args[0], 3),
        relax.const(weight[:, :, None]),
        strides=_along(3, int(attrs.strides[0]), 1),
        padding=(0, before, 0, behind),
        output_padding=_along(3, int(attrs.output_padding[0]), 0),
        dilation=_along(3, int(attrs.dilation[0]), 1),
        groups=int(attrs.groups),
    )
    return relax.op.reshape(graph.named_here(image), result)


def pool_of_a_sequence(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``max_pool1d`` and ``avg_pool1d`` as pools of an image of one row."""
    attrs, result = call.attrs, static_shape(call)
    view = _view(call.args[0], graph)
    if result is None or attrs.layout != "NCW" or static_shape(call.args[0]) is None:
        return None
    axis = 2 if view is not None and view.image_shape[3] == 1 != view.image_shape[2] else 3
    before, behind = (int(width) for width in attrs.padding)
    pool = relax.op.nn.max_pool2d if call.op.name == "relax.nn.max_pool1d" else relax.op.nn.avg_pool2d
    image = pool(
        _image_along(call.args[0], axis),
        _along(axis, int(attrs.pool_size[0]), 1),
        _along(axis, int(attrs.strides[0]), 1),
        (*_along(axis, before, 0), *_along(axis, behind, 0)),
        _along(axis, int(attrs.dilation[0]), 1),
        bool(attrs.ceil_mode),
        bool(attrs.count_include_pad),
    )
    return relax.op.reshape(graph.named_here(image), result)


def pad_of_a_sequence(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite a pad along the sequence as one of an image: a later convolution absorbs zeros, and there is a kernel for
    mirrored pads.
    """
    shape, result = static_shape(call.args[0]), static_shape(call)
    widths = [int(width) for width in call.attrs.pad_width]
    if shape is None or result is None or len(shape) != 3 or any(widths[:4]):
        return None
    image = _image_along(call.args[0], 3)
    mode, value = str(call.attrs.pad_mode), float(call.attrs.pad_value)
    padded = relax.op.nn.pad(image, [*(0,) * 6, *widths[4:]], mode, value)
    return relax.op.reshape(graph.named_here(padded), result)


def _image_along(expr: relax.Expr, axis: int) -> relax.Expr:
    """Return a sequence (N, C, L) as an image with L along ``axis``."""
    shape = static_shape(expr)
    assert shape is not None  # checked by the callers
    return relax.op.reshape(expr, (*shape[:2], *_along(axis, shape[2], 1)))


def _along(axis: int, value: int, other: int) -> tuple[int, int]:
    """Return ``value`` for ``axis`` of an image (2: rows, 3: columns) and ``other`` for the other axis, as (rows,
    columns).
    """
    return (value, other) if axis == 2 else (other, value)


def convolution_of_a_volume(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``conv3d`` as ``conv2d`` of frames."""
    weight, shape, result = graph.constant(call.args[1]), static_shape(call.args[0]), static_shape(call)
    attrs = call.attrs
    if weight is None or shape is None or result is None or str(call.ty.dtype) != "float32":
        return None
    layouts = (attrs.data_layout, attrs.kernel_layout, attrs.out_layout or "NCDHW")
    if layouts != ("NCDHW", "OIDHW", "NCDHW") or weight.dtype != np.float32:
        return None
    padding = [int(width) for width in attrs.padding]
    strides, dilation = [int(step) for step in attrs.strides], [int(step) for step in attrs.dilation]
    view = _view(call.args[0], graph)
    # One pixel per frame of a single volume: the frames need not be moved if they are stored as images already.
    stays = shape[0] == 1 and view is not None and view.frames
    if weight.shape[3:] == (1, 1) and strides[1:] == [1, 1] and not any(padding[i] for i in (1, 2, 4, 5)) and not stays:
        batch, channels, depth, height, width = shape
        rows = relax.op.nn.conv2d(
            relax.op.reshape(call.args[0], (batch, channels, depth, height * width)),
            relax.const(weight.reshape((*weight.shape[:3], 1))),
            strides=(strides[0], 1),
            padding=(padding[0], 0, padding[3], 0),
            dilation=(dilation[0], 1),
            groups=int(attrs.groups),
        )
        return relax.op.reshape(graph.named_here(rows), result)
    window = _Depth(weight.shape[2], result[2], strides[0], dilation[0], (padding[0], padding[3]))
    options: dict[str, Any] = {
        "strides": strides[1:],
        "padding": (padding[1], padding[2], padding[4], padding[5]),
        "dilation": dilation[1:],
        "groups": int(attrs.groups),
    }
    if shape[0] == 1 and shape[1] == int(attrs.groups) == weight.shape[0] and window.taps > 1:
        frames = _frames(call.args[0], shape)
        taps = [np.ascontiguousarray(weight[:, :, tap]) for tap in range(window.taps)]
        each = [relax.op.nn.conv2d(frames, relax.const(tap), **options) for tap in taps]
        total = functools.reduce(relax.op.add, window.read(each))
        return _View(frames, shape, frames=True).of(graph.named_here(total), result)
    if shape[0] == 1 and int(attrs.groups) == 1:
        frames = _frames(call.args[0], shape)
        read = window.read([frames] * window.taps)
        joined = read[0] if len(read) == 1 else relax.op.concat(relax.Tuple(read), axis=1)
        taps_first = weight.transpose(0, 2, 1, 3, 4).reshape((weight.shape[0], -1, *weight.shape[3:]))
        conv = relax.op.nn.conv2d(joined, relax.const(np.ascontiguousarray(taps_first)), **options)
    else:
        frames = _gathered_frames(call.args[0], shape, window)
        apart = weight.reshape((weight.shape[0], -1, *weight.shape[3:]))
        conv = relax.op.nn.conv2d(frames, relax.const(apart), **options)
    return _View(frames, shape, frames=True).of(graph.named_here(conv), result)


@dataclass(frozen=True)
class _Depth:
    """Windows along the depth."""

    # Frames that a window reads.
    taps: int
    # Number of windows.
    count: int
    stride: int
    dilation: int
    # Frames of zeros before and after.
    padding: tuple[int, int]

    def read(self, images: Sequence[relax.Expr], value: float = 0.0) -> list[relax.Expr]:
        """Return for each tap the frames that it reads, of its tensor in ``images`` (frames of a single volume)."""
        found = []
        for tap, frames in enumerate(images):
            start = tap * self.dilation
            if any(self.padding):
                frames = relax.op.nn.pad(frames, [*self.padding, *(0,) * 6], "constant", value)
            if any(self.padding) or self.taps > 1 or self.stride > 1:
                last = start + (self.count - 1) * self.stride + 1
                frames = relax.op.strided_slice(frames, [0], [start], [last], [self.stride])
            found.append(frames)
        return found


def _frames(data: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
    """Return the images (N D, C, H, W) of a volume (N, C, D, H, W)."""
    batch, channels, depth, height, width = shape
    frames = relax.op.permute_dims(data, _FRAMES_BEHIND_CHANNELS)
    return relax.op.reshape(frames, (batch * depth, channels, height, width))


def _gathered_frames(data: relax.Expr, shape: tuple[int, ...], window: _Depth) -> relax.Expr:
    """Return images (N ``count``, C ``taps``, H, W): the frames that each window along the depth reads, tap by tap
    within a channel.
    """
    batch, channels, _, height, width = shape
    frames = relax.op.permute_dims(data, _FRAMES_BEHIND_CHANNELS)
    if any(window.padding):
        frames = relax.op.nn.pad(frames, [0, 0, *window.padding, *(0,) * 6], "constant", 0.0)
    taps, count = window.taps, window.count
    if taps > 1 or window.stride > 1:
        starts = [tap * window.dilation for tap in range(taps)]
        last = (count - 1) * window.stride + 1
        read = [relax.op.strided_slice(frames, [1], [start], [start + last], [window.stride]) for start in starts]
        apart = [relax.op.reshape(each, (batch, count, channels, 1, height, width)) for each in read]
        frames = apart[0] if taps == 1 else relax.op.concat(relax.Tuple(apart), axis=3)
    return relax.op.reshape(frames, (batch * count, channels * taps, height, width))


def maximum_of_a_volume(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``max_pool3d`` of frames as a maximum within each frame, then over the frames that a window reads."""
    shape, result, attrs = static_shape(call.args[0]), static_shape(call), call.attrs
    view = _view(call.args[0], graph)
    if shape is None or result is None or view is None or not view.frames or shape[0] != 1:
        return None
    if attrs.layout != "NCDHW" or attrs.ceil_mode or str(call.ty.dtype) != "float32":
        return None
    sizes, strides = [int(size) for size in attrs.pool_size], [int(step) for step in attrs.strides]
    dilation, padding = [int(step) for step in attrs.dilation], [int(width) for width in attrs.padding]
    around = (padding[1], padding[2], padding[4], padding[5])
    image = relax.op.nn.max_pool2d(view.image, tuple(sizes[1:]), tuple(strides[1:]), around, tuple(dilation[1:]))
    window = _Depth(sizes[0], result[2], strides[0], dilation[0], (padding[0], padding[3]))
    largest = functools.reduce(relax.op.maximum, window.read([image] * window.taps, float(np.finfo(np.float32).min)))
    return view.of(graph.named_here(largest), result)


# --- subsequent operators ------------------------------------------------------------------------


def sink_unary(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Apply an element-wise operator to the image instead of the view."""
    view = _view(call.args[0], graph)
    if view is None or static_shape(call) != view.shape:
        return None
    image = graph.named_here(relax.Call(call.op, [view.image, *call.args[1:]], call.attrs))
    return view.of(image, view.shape)


def sink_binary(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Apply an operator on two views of images of one kind, or on one view and a constant along the channels, to the
    images.
    """
    left, right = (_view(arg, graph) for arg in call.args)
    shape = static_shape(call)
    view = left if left is not None and left.shape == shape else right
    if view is None or shape is None or view.shape != shape:
        return None
    operands = [_operand(arg, other, view, graph) for arg, other in zip(call.args, (left, right), strict=True)]
    if any(operand is None for operand in operands):
        return None
    return view.of(graph.named_here(relax.Call(call.op, operands, call.attrs)), shape)


def _operand(expr: relax.Expr, own: _View | None, view: _View, graph: Definitions) -> relax.Expr | None:
    """Return ``expr`` in a form that broadcasts over the image of ``view``; None if it does not, or would have to be
    moved.
    """
    if own is not None and own.frames == view.frames:
        alike = own.image_shape == view.image_shape and own.shape == view.shape
        gate = not view.frames and own.image_shape == (*view.image_shape[:2], 1, 1)
        return own.image if alike or gate else None
    if view.frames and static_shape(expr) == (1, view.shape[1], 1, 1, 1) and graph.constant(expr) is None:
        return relax.op.reshape(expr, (1, view.shape[1], 1, 1))  # a gate of a single volume applies to all its frames
    array = graph.constant(expr)
    if array is not None:
        return _constant(array, len(view.shape))
    free = not view.frames and static_shape(expr) == view.shape
    # A residual: the preceding kernel adds it at no cost.
    if free and _is_layer(view.image, graph) and graph.has_single_user(view.image):
        return relax.op.reshape(expr, view.image_shape)
    return None


def _constant(array: np.ndarray, rank: int) -> relax.Expr | None:
    """Return a constant of at most ``rank`` dimensions that varies only along the channels in its form for an image, or
    None.
    """
    if array.size == 1 and array.ndim <= rank:
        return constant_of(array.reshape(()))
    if array.ndim > rank:
        return None
    sizes = (1,) * (rank - array.ndim) + array.shape
    if any(size != 1 for axis, size in enumerate(sizes) if axis != 1):
        return None
    return constant_of(array.reshape(1, -1, 1, 1))


def _is_layer(expr: relax.Expr, graph: Definitions) -> bool:
    """True if ``expr`` is a convolution, with or without bias."""
    total = graph.call(expr, "relax.add")
    return graph.call(expr if total is None else total.args[0], _CONV) is not None


def sink_reduction(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Apply a mean or maximum over everything but the channels to the image."""
    view, result, axes = _view(call.args[0], graph), static_shape(call), call.attrs.axis
    if view is None or result is None or axes is None:
        return None
    rank = len(view.shape)
    if sorted(int(axis) % rank for axis in axes) != list(range(2, rank)):
        return None
    reduce = relax.op.mean if call.op.name == "relax.mean" else relax.op.max
    image = graph.named_here(reduce(view.image, axis=[2, 3], keepdims=True))
    if view.frames:
        image = reduce(relax.op.reshape(image, (view.shape[0], view.shape[2], view.shape[1])), axis=[1])
    return relax.op.reshape(image, result)


def sink_concat(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Apply a concatenation of channels to the images, if all parts are views of images of one kind and size."""
    fields, shape = graph.value(call.args[0]), static_shape(call)
    if not isinstance(fields, relax.Tuple) or shape is None or call.attrs.axis is None:
        return None
    views = [_view(field, graph) for field in fields.fields]
    first = views[0]
    if first is None or int(call.attrs.axis) % len(shape) != 1:
        return None
    sizes = {None if view is None else (view.frames, view.image_shape[0], view.image_shape[2:]) for view in views}
    if len(sizes) > 1:
        return None
    images = relax.Tuple([view.image for view in views if view is not None])
    return first.of(graph.named_here(relax.op.concat(images, axis=1)), shape)


RANK_RULES: RuleTable = {
    "relax.nn.conv1d": (convolution_of_a_sequence,),
    "relax.nn.conv2d": (stand_upright,),
    "relax.nn.conv1d_transpose": (transposed_convolution_of_a_sequence,),
    "relax.nn.conv3d": (convolution_of_a_volume,),
    "relax.nn.max_pool3d": (maximum_of_a_volume,),
    "relax.nn.max_pool1d": (pool_of_a_sequence,),
    "relax.nn.avg_pool1d": (pool_of_a_sequence,),
    "relax.nn.pad": (pad_of_a_sequence,),
    "relax.mean": (sink_reduction,),
    "relax.max": (sink_reduction,),
    "relax.concat": (sink_concat,),
    **dict.fromkeys(UNARY, (sink_unary,)),
    **dict.fromkeys(BINARY, (sink_binary,)),
}
