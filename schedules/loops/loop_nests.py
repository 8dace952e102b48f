"""The loop nests that kernels are composed of: one layer over a tile, from an accessor to an accessor.

A fused kernel is two or three phases that meet in a buffer of one task; an unfused one is one phase.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d, Epilogue
from schedules.contract.blocked_layout import blocks
from schedules.loops import emit
from schedules.loops.dot_products import dot_product
from schedules.loops.emit import Axis, Expr
from schedules.loops.issue_slots import sums_pairs
from schedules.loops.register_kernels import ColumnPairs, DenseTile, DepthwiseTile
from schedules.loops.register_tiling import RegisterTile
from schedules.loops.weight_packing import channel_vectors

# (output block, pixel of the tile, vector of sums with bias) -> None
Sink = Callable[[Expr, Expr, Any], None]

# How far ahead weights that are used once or a few times are asked for. Of 16 and 48, tried on 7x7 layers inside
# MobileNetV2 (Zen 4), both gain 5 to 10 %, 48 a little more.
PREFETCH_VECTORS = 48
# Up to this many column tiles of an image, the first of which finds the weights in L3, share that wait.
_FEW_TILES = 8


@dataclass(frozen=True)
class TiledExtent:
    """An ``extent`` (output blocks, rows, pixels) in tiles of ``size``, shared by ``tasks``; the last may overlap."""

    extent: int
    size: int
    tasks: int

    @property
    def per_task(self) -> int:
        """Tiles of one task."""
        tiles = -(-self.extent // self.size)
        return -(-tiles // self.tasks)

    def start(self, task: Expr, index: Expr) -> Expr:
        """Where the ``index``-th tile of ``task`` begins."""
        return emit.clamp_start((task * self.per_task + index) * self.size, self.size, self.extent)


def task_index(task: Expr, *extents: int) -> list[Expr]:
    """Splits a task number into one index per extent, the last one fastest."""
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
    sums: Any,
    at: tuple[Expr, ...],
    epilogue: Epilogue,
    lanes: int,
    residual: Any | None = None,
    channel: tuple[Any, Expr] | None = None,
) -> Any:
    """What a sink does: ``epilogue`` on one vector of ``sums``, then its store to ``buffer`` at the indices ``at``.
    Returns what it stores.

    ``residual`` is a buffer of the same shape, ``channel`` the buffer of the constants per channel
    (:func:`schedules.loops.weight_packing.channel_constants_shape`) and the output block; ``AssertionError`` where the
    epilogue reads one and it is ``None``.
    """
    read = None if residual is None else lambda: emit.load(residual, *at, lanes=lanes)
    constant = None if channel is None else lambda name: _channel_vector(name, epilogue, *channel, lanes)
    value = T.bind(emit.finish(sums, epilogue, read, lanes, constant))
    emit.store(buffer, value, *at, lanes=lanes)
    return value


def _channel_vector(name: str, epilogue: Epilogue, constants: Any, block: Expr, lanes: int) -> Any:
    names = channel_vectors(epilogue)
    count = int(constants.shape[0]) // len(names)
    return emit.load(constants, block + names.index(name) * count, lanes=lanes)


def _last_lanes(conv: Conv2d, out_blocks: int, first_block: Expr, lanes: int) -> int | None:
    """Half of ``lanes`` where one group holds all output blocks and half of the last one is enough."""
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
    """A 1x1 convolution over ``pixels`` for ``tile.out_blocks`` output blocks from ``first_block``.

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
                initial=lambda o: emit.load(bias, first_block + o, lanes=lanes),
                finish=lambda o, column, sums, start=start: sink(first_block + o, start + column, sums),  # type: ignore[misc]
                last_lanes=_last_lanes(conv, tile.out_blocks, first_block, lanes),
                dot=dot,
            ).emit(conv.in_channels, (0, 1), 1, lanes)


def depthwise_phase(
    conv: Conv2d,
    columns: int,
    lanes: int,
    *,
    rows: int,
    first_row: Expr,
    block: Expr,
    source: Callable[[Expr, Expr], Any],
    weight: Any,
    bias: Any,
    sink: Callable[[Expr, Expr, Any], None],
    taps: int | None = None,
    pairs: Callable[[Expr, Expr], Any] | None = None,
) -> None:
    """A depthwise convolution of one channel block for ``rows`` output rows from ``first_row``.

    ``source(row, column)`` is an input vector in image coordinates; ``sink(row of the tile, column, sums)``. ``taps``
    as of a :class:`DepthwiseTile`. ``pairs(row, column)``: of values stored as bfloat16, the words of that column and
    the next; they are used where windows have neighbouring columns.
    """
    vertical, horizontal = axes(conv)
    if taps is not None or not sums_pairs(conv):
        pairs = None
    with emit.loop(rows) as row:
        out_row = emit.bind(first_row + row)
        inside = vertical.taps(out_row, conv.out_height)
        for segment in emit.segments(conv.out_width, columns, horizontal):
            with emit.column_tile(segment) as start:
                DepthwiseTile(
                    width=segment.width,
                    lanes=lanes,
                    axis=horizontal,
                    x=_padded(
                        lambda ky, column: source(vertical.source(out_row, ky), column), horizontal, start, segment
                    ),
                    weight=lambda ky, kx: emit.load(weight, block, ky, kx, lanes=lanes),
                    initial=lambda: emit.load(bias, block, lanes=lanes),
                    finish=lambda column, sums, start=start: sink(row, start + column, sums),  # type: ignore[misc]
                    taps=taps,
                    pairs=None
                    if pairs is None
                    else _column_pairs(
                        lambda ky, column: pairs(vertical.source(out_row, ky), column),
                        lambda ky, column: source(vertical.source(out_row, ky), column),
                        horizontal,
                        start,
                        segment,
                        weight,
                        block,
                        lanes,
                    ),  # fmt: skip
                ).emit(inside)


def axes(conv: Conv2d) -> tuple[Axis, Axis]:
    """Vertical and horizontal axis of a convolution."""
    vertical = Axis(conv.height, conv.kernel[0], conv.stride[0], conv.padding[0], conv.dilation[0])
    horizontal = Axis(conv.width, conv.kernel[1], conv.stride[1], conv.padding[1], conv.dilation[1])
    return vertical, horizontal


def _padded(
    source: Callable[[Expr, Expr], Any], axis: Axis, start: Expr, segment: emit.ColumnSegment
) -> Callable[[Expr, int], Any | None]:
    """Input of a tile by column offset; ``None`` in the padding, known because border tiles stand alone."""

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
    """Of a tile by column offset: ``pair(ky, column)`` inside the image, a ``single`` vector at its border."""

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
    sink: Callable[[Expr, Expr, Expr, Any], None],
) -> None:
    """A k x k convolution for ``rows`` output rows and ``tile.out_blocks`` output blocks.

    ``source(block, lane, row, column)`` is the operand of the input channels from ``lane`` on, ``weight(output block,
    block, step, ky, kx)`` a vector, ``sink(output block, row of the tile, column, sums)``.
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
                    initial=lambda o: emit.load(bias, first_block + o, lanes=lanes),
                    finish=lambda o, column, sums, start=start: sink(first_block + o, row, start + column, sums),  # type: ignore[misc]
                    last_lanes=_last_lanes(conv, tile.out_blocks, first_block, lanes),
                    dot=dot_product(conv.dtype),
                ).emit(channels, taps, conv.kernel[1], block_lanes)
