"""Packing of weights in the order in which kernels read them. Lanes and rows beyond the channels are zero."""

from __future__ import annotations

import numpy as np

from costmodel.operators.layers import Conv2d, Epilogue
from schedules.contract.template import Parameters, blocks, stored
from schedules.loops.dot_products import dot_product, pack_depthwise_quads, quad_weights_shape, sums_quads
from schedules.loops.requantised_sums import pack_requantisation, requantisation_rows


def channel_vectors(epilogue: Epilogue) -> tuple[str, ...]:
    """Per-channel vectors of an epilogue, as names of :class:`Parameters`, in storage order."""
    slopes = ("slopes",) if epilogue.activation == "prelu" else ()
    return ("bias", *slopes, *(("scale", "shift") if epilogue.affine else ()))


def channel_constants_shape(conv: Conv2d, lanes: int) -> tuple[int, int]:
    """Shape of the per-channel constants of an epilogue: all biases, then all of each other vector.

    For int8: the shape of :func:`schedules.loops.requantised_sums.pack_requantisation`.
    """
    if conv.dtype == "int8":
        return (requantisation_rows(conv, lanes), lanes)
    return (blocks(conv.out_channels, lanes) * len(channel_vectors(conv.epilogue)), lanes)


def pack_channel_constants(conv: Conv2d, parameters: Parameters, lanes: int) -> np.ndarray:
    """Pack vectors (O,) to :func:`channel_constants_shape`; the bias defaults to zero."""
    if conv.dtype == "int8":
        return pack_requantisation(conv, parameters, lanes)
    packed = np.zeros(channel_constants_shape(conv, lanes), np.float32)
    vectors = [getattr(parameters, name) for name in channel_vectors(conv.epilogue)]
    for rows, vector in zip(np.split(packed, len(vectors)), vectors, strict=True):
        if vector is not None:
            rows.reshape(-1)[: conv.out_channels] = vector.reshape(-1)
    return packed


def prologue_shapes(conv: Conv2d, lanes: int) -> tuple[tuple[int, int], ...]:
    """Shapes of the constants of a prologue: none, or one array of all scales, then all shifts."""
    affine = conv.prologue is not None and conv.prologue.affine
    return ((2 * blocks(conv.in_channels, lanes), lanes),) if affine else ()


def pack_prologue(conv: Conv2d, parameters: Parameters, lanes: int) -> list[np.ndarray]:
    """Pack vectors (I,) to :func:`prologue_shapes`; lanes beyond the channels become zero, whatever they contained."""
    arrays = []
    for shape in prologue_shapes(conv, lanes):
        assert parameters.input_scale is not None and parameters.input_shift is not None
        packed = np.zeros(shape, np.float32)
        for rows, vector in zip(np.split(packed, 2), (parameters.input_scale, parameters.input_shift), strict=True):
            rows.reshape(-1)[: conv.in_channels] = vector.reshape(-1)
        arrays.append(packed)
    return arrays


def pack_depthwise(weight: np.ndarray, lanes: int, dtype: str = "float32") -> np.ndarray:
    """Pack (C, 1, KH, KW) to (ceil(C/V), KH, KW, V) of ``dtype``."""
    channels, _, kernel_height, kernel_width = weight.shape
    count = blocks(channels, lanes)
    packed = np.zeros((count * lanes, kernel_height, kernel_width), np.float32)
    packed[:channels] = weight[:, 0]
    split = packed.reshape(count, lanes, kernel_height, kernel_width)
    return stored(split.transpose(0, 2, 3, 1), dtype)


def packed_dtype(conv: Conv2d) -> str:
    """Dtype of packed weights: float32 if bytes are multiplied one by one, as sums of so few products are exact."""
    return "float32" if conv.dtype == "int8" and conv.is_depthwise and not sums_quads(conv) else conv.dtype


def depthwise_weight_shape(conv: Conv2d, lanes: int) -> tuple[int, ...]:
    """Shape of the result of :func:`pack_depthwise_of`."""
    if sums_quads(conv):
        return quad_weights_shape(conv, lanes)
    return (blocks(conv.in_channels, lanes), *conv.kernel, lanes)


def pack_depthwise_of(conv: Conv2d, weight: np.ndarray, lanes: int) -> np.ndarray:
    """Pack (C, 1, KH, KW) for the kernels of ``conv``: tap by tap, or four taps of a row per word of bytes."""
    if sums_quads(conv):
        return stored(pack_depthwise_quads(weight, lanes), conv.dtype)
    return pack_depthwise(weight, lanes, packed_dtype(conv))


def plain_weight_shape(conv: Conv2d, lanes: int) -> tuple[int, ...]:
    """Shape of the result of :func:`pack_plain_input`."""
    dot = dot_product(conv.dtype)
    return (blocks(conv.out_channels, lanes), dot.steps(conv.in_channels), *conv.kernel, lanes * dot.group)


def pack_plain_input(conv: Conv2d, weight: np.ndarray, lanes: int) -> np.ndarray:
    """Pack OIHW to (ceil(O/V), steps, KH, KW, V x group), for kernels with a plain NCHW input.

    A step is one input channel of float32, or a group of channels of a narrower dtype.
    """
    out_channels, in_channels, kernel_height, kernel_width = weight.shape
    count = blocks(out_channels, lanes)
    padded = np.zeros((count * lanes, in_channels, kernel_height, kernel_width), np.float32)
    padded[:out_channels] = weight
    split = padded.reshape(count, lanes, in_channels, kernel_height, kernel_width)
    packed = dot_product(conv.dtype).pack_steps(split.transpose(0, 3, 4, 2, 1))
    return np.ascontiguousarray(np.moveaxis(packed, 3, 1))


def tile_weight_shape(conv: Conv2d, lanes: int, together: int) -> tuple[int, ...]:
    """Shape of the result of :func:`pack_tiles`."""
    dot = dot_product(conv.dtype)
    runs = -(-blocks(conv.in_channels, lanes) // together)
    return (blocks(conv.out_channels, lanes), runs, *conv.kernel, together * dot.steps(lanes), lanes * dot.group)


def pack_tiles(conv: Conv2d, weight: np.ndarray, lanes: int, together: int) -> np.ndarray:
    """Pack OIHW to (ceil(O/V), runs, KH, KW, steps, V x group).

    It is :func:`pack_conv` with the steps of ``together`` input blocks concatenated, as the rows of a tile. The last
    run is padded with zeros.
    """
    single = pack_conv(conv, weight, lanes)
    out_blocks, in_blocks, height, width, steps, values = single.shape
    runs = -(-in_blocks // together)
    padded = np.zeros((out_blocks, runs * together, height, width, steps, values), single.dtype)
    padded[:, :in_blocks] = single
    split = padded.reshape(out_blocks, runs, together, height, width, steps, values)
    return np.ascontiguousarray(split.transpose(0, 1, 3, 4, 2, 5, 6)).reshape(tile_weight_shape(conv, lanes, together))


def conv_weight_shape(conv: Conv2d, lanes: int) -> tuple[int, ...]:
    """Shape of the result of :func:`pack_conv`."""
    dot = dot_product(conv.dtype)
    window = group_window_blocks(conv, lanes)
    return (blocks(conv.out_channels, lanes), window, *conv.kernel, dot.steps(lanes), lanes * dot.group)


def pack_conv(conv: Conv2d, weight: np.ndarray, lanes: int) -> np.ndarray:
    """Pack OIHW to (ceil(O/V), input blocks of the window, KH, KW, V in, V out).

    The last two are packed as by :class:`schedules.loops.dot_products.DotProduct` of the dtype. With groups, the window
    of an output block is the run of input blocks that its groups read (:func:`group_window`); other elements of the
    window are zero.
    """
    out_blocks = blocks(conv.out_channels, lanes)
    window = group_window_blocks(conv, lanes)
    packed = np.zeros((out_blocks, window, *conv.kernel, lanes, lanes), np.float32)
    in_per_group = conv.in_channels // conv.groups
    out_per_group = conv.out_channels // conv.groups
    for group in range(conv.groups):
        outs = np.arange(group * out_per_group, (group + 1) * out_per_group)
        ins = np.arange(group * in_per_group, (group + 1) * in_per_group)
        for out_block in np.unique(outs // lanes):
            rows = outs[outs // lanes == out_block]
            start = group_window(conv, int(out_block), lanes)
            part = weight[rows].transpose(1, 2, 3, 0)  # (I, KH, KW, outs)
            index = (ins // lanes - start)[:, None], (ins % lanes)[:, None], (rows % lanes)[None, :]
            for y in range(conv.kernel[0]):
                for x in range(conv.kernel[1]):
                    packed[out_block, index[0], y, x, index[1], index[2]] = part[:, y, x, :]
    return dot_product(conv.dtype).pack_steps(packed)


def group_window_blocks(conv: Conv2d, lanes: int) -> int:
    """Maximum number of input blocks read by an output block; all without groups."""
    if conv.groups == 1:
        return blocks(conv.in_channels, lanes)
    return max(_last_block(conv, b, lanes) - _first_block(conv, b, lanes) + 1 for b in _out_blocks(conv, lanes))


def group_window(conv: Conv2d, out_block: int, lanes: int) -> int:
    """First input block of the window of ``out_block``."""
    if conv.groups == 1:
        return 0
    limit = blocks(conv.in_channels, lanes) - group_window_blocks(conv, lanes)
    return min(_first_block(conv, out_block, lanes), limit)


def _out_blocks(conv: Conv2d, lanes: int) -> range:
    return range(blocks(conv.out_channels, lanes))


def _first_block(conv: Conv2d, out_block: int, lanes: int) -> int:
    group = out_block * lanes // (conv.out_channels // conv.groups)
    return group * (conv.in_channels // conv.groups) // lanes


def _last_block(conv: Conv2d, out_block: int, lanes: int) -> int:
    last_channel = min((out_block + 1) * lanes, conv.out_channels) - 1
    group = last_channel // (conv.out_channels // conv.groups)
    return ((group + 1) * (conv.in_channels // conv.groups) - 1) // lanes
