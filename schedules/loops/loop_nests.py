"""Loop nests of kernels: one layer over a tile, between accessors of input and output.

A fused kernel is two or three phases connected by a buffer of one task; an unfused one is one phase.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d, Epilogue
from schedules.contract.template import blocks
from schedules.loops import emit
from schedules.loops.config_space import RegisterTile
from schedules.loops.dot_products import (
    QuadPlan,
    TapPlaces,
    dot_product,
    quad_plan,
    quad_weights,
    quads,
    sums_pairs,
    sums_quads,
)
from schedules.loops.emit import Axis, Expr
from schedules.loops.register_kernels import ColumnPairs, ColumnQuads, DenseTile, DepthwiseTile
from schedules.loops.requantised_sums import JOINED, emit_requantised, initial_sums, requantised_bytes
from schedules.loops.weight_packing import channel_vectors

# (output block, pixel of the tile, vectors of sums with bias of that pixel and the next ones) -> None
Sink = Callable[[Expr, Expr, Sequence[Any]], None]

# Prefetch distance of weights that are used once or a few times. Of 16 and 48, measured on 7x7 layers inside
# MobileNetV2 (Zen 4), both gain 5 to 10 %, 48 a little more.
PREFETCH_VECTORS = 48
# Prefetch up to this number of column tiles of an image: the first one waits for weights from L3.
_FEW_TILES = 8


@dataclass(frozen=True)
class TiledExtent:
    """An ``extent`` (output blocks, rows, pixels) in tiles of ``size``, shared by ``tasks``; the last may overlap."""

    extent: int
    size: int
    tasks: int

    @property
    def per_task(self) -> int:
        """Number of tiles per task."""
        tiles = -(-self.extent // self.size)
        return -(-tiles // self.tasks)

    def start(self, task: Expr, index: Expr) -> Expr:
        """Start of the ``index``-th tile of ``task``."""
        return emit.clamp_start((task * self.per_task + index) * self.size, self.size, self.extent)


def task_index(task: Expr, *extents: int) -> list[Expr]:
    """Split a task number into one index per extent, the last one fastest."""
    indices: list[Expr] = []
    for extent in reversed(extents):
        if extent == 1:
            indices.append(0)
            continue
        indices.append(emit.bind(emit.remainder(task, extent)))
        task = emit.quotient(task, extent)
    return indices[::-1]


def store_finished(
    buffer: Any,
    sums: Sequence[Any],
    at: tuple[Expr, ...],
    layer: Conv2d,
    lanes: int,
    residual: Any | None = None,
    channel: tuple[Any, Expr] | None = None,
) -> list[Any]:
    """Apply the epilogue of ``layer`` to vectors of ``sums`` of neighbouring pixels, store and return them.

    They are stored to ``buffer`` from the indices ``at`` on, the last of which is a pixel. ``residual`` is a buffer of
    the same shape, ``channel`` the buffer of the constants per channel
    (:func:`schedules.loops.weight_packing.channel_constants_shape`) and the output block; raises ``AssertionError`` if
    the epilogue needs one that is None. For a buffer of bytes, sums are requantised after the activation.
    """
    places = [(*at[:-1], at[-1] + pixel if pixel else at[-1]) for pixel in range(len(sums))]
    reads = [None if residual is None else _reader(residual, place, lanes) for place in places]
    if buffer.dtype == "uint8":
        assert channel is not None
        return _store_bytes(buffer, sums, places, reads, channel, lanes, layer.epilogue)
    epilogue, coarse = layer.epilogue, layer.dtype == "bfloat16"
    constant = None if channel is None else lambda name: _channel_vector(name, epilogue, *channel, lanes)
    pairs = zip(sums, reads, strict=True)
    values = [T.bind(emit.finish(each, epilogue, read, lanes, constant, coarse)) for each, read in pairs]
    if buffer.dtype == "bfloat16" and len(values) == 2:
        emit.store_pair(buffer, *values, *at, lanes=lanes)
        return values
    for value, place in zip(values, places, strict=True):
        emit.store(buffer, value, *place, lanes=lanes)
    return values


def _reader(residual: Any, place: tuple[Expr, ...], lanes: int) -> Callable[[], Any]:
    return lambda: emit.load(residual, *place, lanes=lanes)


def _store_bytes(
    buffer: Any,
    sums: Sequence[Any],
    places: Sequence[tuple[Expr, ...]],
    reads: Sequence[Callable[[], Any] | None],
    channel: tuple[Any, Expr],
    lanes: int,
    epilogue: Epilogue,
) -> list[Any]:
    if len(sums) == JOINED:
        packed = requantised_bytes(sums, reads, *channel, lanes, epilogue)
        emit.store(buffer, packed, *places[0], lanes=JOINED * lanes)
        return [packed]
    pairs = zip(sums, reads, strict=True)
    values = [T.bind(emit_requantised(each, read, *channel, lanes, epilogue)) for each, read in pairs]
    for value, place in zip(values, places, strict=True):
        emit.store(buffer, value.astype(f"uint8x{lanes}"), *place, lanes=lanes)
    return values


def _channel_vector(name: str, epilogue: Epilogue, constants: Any, block: Expr, lanes: int) -> Any:
    names = channel_vectors(epilogue)
    count = int(constants.shape[0]) // len(names)
    return emit.load(constants, block + names.index(name) * count, lanes=lanes)


def last_lanes(conv: Conv2d, out_blocks: int, first_block: Expr, lanes: int) -> int | None:
    """Half of ``lanes`` if one group has all output blocks and half of the last one suffices, otherwise None."""
    known = isinstance(first_block, int) and first_block + out_blocks == blocks(conv.out_channels, lanes)
    rest = conv.out_channels % lanes
    return lanes // 2 if known and lanes >= 16 and 0 < rest <= lanes // 2 else None


def pointwise_phase(
    conv: Conv2d,
    tile: RegisterTile,
    lanes: int,
    *,
    pixels: int,
    first_block: Expr,
    source: Callable[[Expr, Expr, Expr], Any],
    weight: Any,
    bias: Any,
    sink: Sink,
) -> None:
    """Emit a 1x1 convolution over ``pixels`` for ``tile.out_blocks`` output blocks from ``first_block``.

    ``source(block, pixel, lane)`` is the operand of the input channels from ``lane`` on.
    """
    dot = dot_product(conv.dtype)
    count = -(-conv.out_height * conv.out_width // tile.columns)
    ahead = PREFETCH_VECTORS if count <= _FEW_TILES else 0
    for segment in emit.segments(pixels, tile.columns):
        with emit.column_tile(segment) as start:
            DenseTile(
                out_blocks=tile.out_blocks,
                width=segment.width,
                lanes=lanes,
                unroll=tile.unroll,
                x=lambda block, lane, _ky, _kx, column, start=start: source(block, start + column, lane),  # type: ignore[misc]
                weight=lambda o, block, step, _ky, _kx: dot.weights(
                    weight, first_block + o, block, 0, 0, step, lanes=lanes, ahead=ahead
                ),
                initial=lambda o, _column: initial_sums(conv, bias, first_block + o, lanes),
                finish=lambda o, column, sums, start=start: sink(first_block + o, start + column, sums),  # type: ignore[misc]
                last_lanes=last_lanes(conv, tile.out_blocks, first_block, lanes),
                dot=dot,
                joined=dot.group,
            ).emit(conv.in_channels, (0, 1), 1, lanes)


def depthwise_phase(
    conv: Conv2d,
    columns: int,
    lanes: int,
    *,
    rows: int,
    first_row: Expr,
    block: Expr,
    data: Any,
    at: Callable[[Expr, Expr], tuple[Expr, ...]],
    weight: Any,
    bias: Any,
    sink: Callable[[Expr, Expr, Sequence[Any]], None],
    taps: int | None = None,
) -> None:
    """Emit a depthwise convolution of one channel block for ``rows`` output rows from ``first_row``.

    Its input is ``data``, where the vector at (row, column) of an image is at ``at(row, column)``, followed by the next
    column; ``sink(row of the tile, column, sums)`` stores. ``taps``: see :class:`DepthwiseTile`. For windows with
    adjacent columns, words of bfloat16 and of bytes contain several of them.
    """
    vertical, horizontal = axes(conv)
    paired = taps is None and data.dtype == "bfloat16" and sums_pairs(conv)
    plan = quad_plan(conv) if sums_quads(conv) else None
    # A word may extend beyond the window of its last output, but not beyond the row.
    reach = horizontal if plan is None else replace(horizontal, kernel=max(plan.reach, horizontal.kernel))

    def source(row: Expr, column: Expr) -> Any:
        return emit.load(data, *at(row, column), lanes=lanes)

    def pair(row: Expr, column: Expr) -> Any:
        return emit.interleaved(data, *at(row, column), lanes=lanes)

    with emit.loop(rows) as row:
        out_row = emit.bind(first_row + row)
        inside = vertical.taps(out_row, conv.out_height)
        for segment in emit.segments(conv.out_width, columns, reach):
            with emit.column_tile(segment) as start:
                DepthwiseTile(
                    width=segment.width,
                    lanes=lanes,
                    axis=horizontal,
                    x=_padded(
                        lambda ky, column: source(vertical.source(out_row, ky), column), horizontal, start, segment
                    ),
                    weight=lambda ky, kx: emit.load(weight, block, ky, kx, lanes=lanes),
                    # All columns of tiles inside the row are equivalent.
                    initial=lambda column, segment=segment: initial_sums(  # type: ignore[misc]
                        conv, bias, block, lanes, (out_row, segment.start + column)
                    ),
                    finish=lambda column, sums, start=start: sink(row, start + column, sums),  # type: ignore[misc]
                    taps=taps,
                    pairs=None
                    if not paired
                    else _column_pairs(
                        lambda ky, column: pair(vertical.source(out_row, ky), column),
                        lambda ky, column: source(vertical.source(out_row, ky), column),
                        horizontal,
                        start,
                        segment,
                        weight,
                        block,
                        lanes,
                    ),  # fmt: skip
                    quads=None
                    if plan is None
                    else _column_quads(
                        plan,
                        lambda ky, column: quads(data, *at(vertical.source(out_row, ky), column), lanes=lanes),
                        horizontal,
                        start,
                        segment,
                        weight,
                        block,
                        lanes,
                    ),  # fmt: skip
                    joined=dot_product(conv.dtype).group,
                ).emit(inside)


def axes(conv: Conv2d) -> tuple[Axis, Axis]:
    """Vertical and horizontal axis of a convolution."""
    vertical = Axis(conv.height, conv.kernel[0], conv.stride[0], conv.padding[0], conv.dilation[0])
    horizontal = Axis(conv.width, conv.kernel[1], conv.stride[1], conv.padding[1], conv.dilation[1])
    return vertical, horizontal


def _padded(
    source: Callable[[Expr, Expr], Any], axis: Axis, start: Expr, segment: emit.ColumnSegment
) -> Callable[[Expr, int], Any | None]:
    """Input of a tile by column offset; None in the padding, which is known since border tiles are separate."""

    def value(ky: Expr, offset: int) -> Any | None:
        column = start * axis.stride - axis.before + offset
        if segment.border and not 0 <= column < axis.size:
            return None
        return source(ky, column)

    return value


def _column_pairs(
    pair: Callable[[Expr, Expr], Any],
    single: Callable[[Expr, Expr], Any],
    axis: Axis,
    start: Expr,
    segment: emit.ColumnSegment,
    weight: Any,
    block: Expr,
    lanes: int,
) -> ColumnPairs:
    """Column pairs of a tile by column offset: ``pair(ky, column)`` inside the image, a ``single`` vector at its
    border.
    """

    def words(ky: Expr, offset: int) -> Any | None:
        column = start * axis.stride - axis.before + offset
        if not segment.border or 0 <= column < axis.size - 1:
            return pair(ky, column)
        if column == -1:
            return emit.upper_halves(single(ky, 0), lanes)
        return emit.lower_halves(single(ky, column), lanes) if column == axis.size - 1 else None

    def weights(ky: Expr, tap: int, both: bool) -> Any:
        vector = emit.interleaved(weight, block, ky, tap, lanes=lanes)
        return vector if both else emit.upper_halves(vector, lanes)

    return ColumnPairs(words, weights)


def _column_quads(
    plan: QuadPlan,
    words: Callable[[Expr, Expr], Any],
    axis: Axis,
    start: Expr,
    segment: emit.ColumnSegment,
    weight: Any,
    block: Expr,
    lanes: int,
) -> ColumnQuads:
    """Column words of a tile of ``segment`` by column offset; ``words(ky, column)`` loads from the input."""
    border = (segment.start, axis) if segment.border else (None, None)

    def weights(ky: Expr, taps: TapPlaces) -> Any:
        return quad_weights(
            lambda index: weight[(block, ky, index, tirx.Ramp(0, 1, dot_product("int8").group * lanes))],
            taps,
            plan.kernel,
            lanes,
        )

    return ColumnQuads(
        plan.tile(segment.width, *border),
        lambda ky, offset: words(ky, start * axis.stride - axis.before + offset),
        weights,
    )


def conv_phase(
    conv: Conv2d,
    tile: RegisterTile,
    lanes: int,
    *,
    rows: int,
    first_row: Expr,
    first_block: Expr,
    channels: int,
    block_lanes: int,
    source: Callable[[Expr, Expr, Expr, Expr], Any],
    weight: Callable[[Expr, Expr, Expr, Expr, int], Any],
    bias: Any,
    sink: Callable[[Expr, Expr, Expr, Sequence[Any]], None],
) -> None:
    """Emit a k x k convolution for ``rows`` output rows and ``tile.out_blocks`` output blocks.

    ``source(block, lane, row, column)`` is the operand of the input channels from ``lane`` on, ``weight(output block,
    block, step, ky, kx)`` a vector, ``sink(output block, row of the tile, column, sums)`` stores.
    """
    vertical, horizontal = axes(conv)
    with emit.loop(rows) as row:
        out_row = emit.bind(first_row + row)
        taps = vertical.taps(out_row, conv.out_height)
        for segment in emit.segments(conv.out_width, tile.columns, horizontal):
            with emit.column_tile(segment) as start:

                def x(
                    block: Expr, lane: Expr, ky: Expr, kx: int, column: int, start=start, segment=segment
                ) -> Any | None:
                    position = horizontal.source(start + column, kx)
                    if segment.border and not 0 <= position < horizontal.size:
                        return None
                    return source(block, lane, vertical.source(out_row, ky), position)

                DenseTile(
                    out_blocks=tile.out_blocks,
                    width=segment.width,
                    lanes=lanes,
                    unroll=tile.unroll,
                    x=x,
                    weight=lambda o, block, step, ky, kx: weight(first_block + o, block, step, ky, kx),
                    # All columns of tiles inside the row are equivalent.
                    initial=lambda o, column, segment=segment: initial_sums(  # type: ignore[misc]
                        conv, bias, first_block + o, lanes, (out_row, segment.start + column)
                    ),
                    finish=lambda o, column, sums, start=start: sink(first_block + o, row, start + column, sums),  # type: ignore[misc]
                    last_lanes=last_lanes(conv, tile.out_blocks, first_block, lanes),
                    dot=dot_product(conv.dtype),
                    joined=dot_product(conv.dtype).group,
                ).emit(channels, taps, conv.kernel[1], block_lanes)
