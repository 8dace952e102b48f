"""k x k convolution in the tile registers of AMX: rows of a tile are adjacent columns of an output row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from tvm import tirx

from costmodel.operators.layers import Conv2d, Operator, element_bytes
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config
from schedules.kernels.direct_conv2d import reads_plain_input
from schedules.kernels.pointwise_kernel import conv_buffers
from schedules.kernels.tile_pointwise import TileConvolution
from schedules.loops import emit
from schedules.loops.issue_slots import exposed_traffic, parallel_cycles
from schedules.loops.loop_nests import TiledExtent, store_finished, task_index
from schedules.loops.prepared_input import PreparedInput
from schedules.loops.register_tiling import row_blocks
from schedules.loops.requantised_sums import initial_sums
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits
from schedules.loops.tile_products import (
    TileShape,
    block_cycles,
    depths,
    has_tile_products,
    tile_product,
    tile_shapes,
)
from schedules.loops.tile_rows import TileRows, is_copied, laying_out_cycles


class TileConv2dKnobs(NamedTuple):
    """Knobs: ``row_tiles`` x ``out_blocks`` tiles of sums of ``tile_rows`` columns each, side by side or, if an output
    row is too short, one below the other; ``depth_blocks`` blocks of input channels per step, ``rows`` per pass over
    the weights, ``channel_tasks`` x ``row_tasks`` parallel tasks.
    """

    row_tiles: int
    out_blocks: int
    tile_rows: int
    depth_blocks: int
    rows: int
    channel_tasks: int
    row_tasks: int


class TileConv2d(TileConvolution):
    """Convolution as :class:`schedules.kernels.direct_conv2d.DirectConv2d`, in tiles, on blocked data without groups.

    The input rows of a block of output rows are first laid out in a buffer of the task, including the padding; except
    for a window without padding and one block of input channels per step, whose tiles are read directly from the image.
    """

    kind = "tile-conv2d"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        if not isinstance(operator, Conv2d) or not has_tile_products(operator.dtype, cpu):
            return False
        if operator.groups > 1 or operator.gated or reads_plain_input(operator, cpu.lanes):
            return False
        if operator.dtype == "int8" and operator.prologue is not None:
            return False
        return self._depth in depths(blocks(operator.in_channels, cpu.lanes), operator.dtype, cpu.lanes)

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        candidates = list(self._candidates(operator, cpu))
        half = cpu.l2_bytes // 2
        fitting = [each for each in candidates if self._buffer_bytes(operator, each["rows"], cpu) <= half]
        return cheapest_first(fitting or candidates, partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        conv, knobs = operator, TileConv2dKnobs(**config)
        groups, bands = _extents(conv, knobs, cpu)
        shape = self._shape(conv, knobs, cpu)
        steps = -(-blocks(conv.in_channels, cpu.lanes) // self._depth) * conv.kernel[0] * conv.kernel[1]
        weight_bytes = knobs.out_blocks * cpu.lanes * steps * shape.depth_bytes
        blocks_of_sums = _parts(conv, knobs).count
        one = blocks_of_sums * block_cycles(shape, steps)
        one += blocks_of_sums * exposed_traffic(cpu, weight_bytes, weight_bytes + shape.all_rows * shape.depth_bytes)
        data_bytes = self._buffer_bytes(conv, knobs.rows, cpu)
        one += exposed_traffic(cpu, data_bytes, data_bytes + weight_bytes)
        band = groups.per_task * one
        if self._laid_out(conv):
            height, width = _window(conv, knobs.rows)
            band += laying_out_cycles(conv, cpu, height * width, conv.input_bytes / cpu.threads)
        return parallel_cycles(cpu, conv.batch * groups.tasks * bands.tasks, bands.per_task * band)

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, TileConv2dKnobs(**config)
        groups, bands = _extents(conv, knobs, cpu)
        shape, parts = self._shape(conv, knobs, cpu), _parts(conv, knobs)
        (stride_y, stride_x), (dilation_y, dilation_x) = conv.stride, conv.dilation

        def body(*buffers: Any) -> None:
            data, _, weight, bias, prologue, residual, output = conv_buffers(conv, buffers)
            with emit.tasks(conv.batch * groups.tasks * bands.tasks) as task:
                image, channel_task, row_task = task_index(task, conv.batch, groups.tasks, bands.tasks)
                laid_out = (
                    TileRows(conv, lanes, self._depth, *_window(conv, knobs.rows)) if self._laid_out(conv) else None
                )
                with tile_product(shape, conv.dtype) as product, emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)
                    top = emit.bind(first_row * stride_y - conv.padding[0])
                    if laid_out is not None:
                        source_image = PreparedInput(conv, data, None, prologue, lanes)
                        laid_out.fill(source_image, image, top, -conv.padding[1], conv.width)

                    def source(run: Any, row: Any, column: Any) -> Any:
                        if laid_out is not None:
                            return laid_out.first(run, row, column)
                        return data[image, run, top + row, column, 0]

                    with (
                        emit.loop(groups.per_task) as group,
                        emit.loop(parts.rows.per_task) as down,
                        emit.loop(parts.columns.per_task) as right,
                    ):
                        block = groups.start(channel_task, group)
                        row, column = parts.rows.start(0, down), parts.columns.start(0, right)
                        product.zero()
                        with (
                            emit.loop(int(weight.shape[1])) as run,
                            emit.loop(conv.kernel[0]) as ky,
                            emit.loop(conv.kernel[1]) as kx,
                        ):

                            def window(tile: int) -> Any:
                                below, beside = parts.place(tile)
                                at_row = (row + below) * stride_y + ky * dilation_y
                                return source(run, at_row, (column + beside) * stride_x + kx * dilation_x)

                            product.add(
                                window, lambda out: weight[block + out, run, ky, kx, 0, 0], stride_x * shape.depth_bytes
                            )

                        def sink(tile: int, index: Any, out: int, sums: Any) -> None:
                            below, beside = parts.place(tile)
                            at_row, at_column = emit.bind(first_row + row + below), emit.bind(column + beside + index)
                            total = sums + initial_sums(conv, bias, block + out, lanes, (at_row, at_column))
                            at, channel = (image, block + out, at_row, at_column), (bias, block + out)
                            store_finished(output, [total], at, conv, lanes, residual, channel=channel)

                        product.finish(sink)

        return emit.kernel("tile_conv2d", self.signature(conv, cpu), body, tiles=True)

    def _laid_out(self, conv: Conv2d) -> bool:
        return self._depth > 1 or not is_copied(conv) or any(conv.padding)

    def _shape(self, conv: Conv2d, knobs: TileConv2dKnobs, cpu: CpuTarget) -> TileShape:
        depth_bytes = self._depth * cpu.lanes * element_bytes(conv.dtype)
        return TileShape(knobs.row_tiles, knobs.out_blocks, knobs.tile_rows, depth_bytes)

    def _buffer_bytes(self, conv: Conv2d, rows: int, cpu: CpuTarget) -> int:
        """Return the bytes of the input pixels of ``rows`` output rows, laid out or read directly."""
        height, width = _window(conv, rows)
        runs = -(-blocks(conv.in_channels, cpu.lanes) // self._depth)
        return runs * self._depth * cpu.lanes * element_bytes(conv.dtype) * height * width

    def _candidates(self, conv: Conv2d, cpu: CpuTarget) -> Iterator[Config]:
        count, depth_bytes = blocks(conv.out_channels, cpu.lanes), self._depth * cpu.lanes * element_bytes(conv.dtype)
        for rows in row_blocks(conv.out_height):
            bands = -(-conv.out_height // rows)
            for shape in tile_shapes(count, conv.out_width, depth_bytes, rows):
                groups = -(-count // shape.out_blocks)
                for channel_tasks, row_tasks in task_splits(groups, bands, cpu, is_small(conv.flops)):
                    yield TileConv2dKnobs(
                        shape.row_tiles, shape.out_blocks, shape.rows, self._depth, rows, channel_tasks, row_tasks
                    )._asdict()


@dataclass(frozen=True)
class _Parts:
    """Division of a band of output rows into blocks of sums: in steps of one row, with the tiles side by side, or if a
    row is too short for that in steps of as many rows as there are tiles.
    """

    rows: TiledExtent
    columns: TiledExtent
    beside: bool
    tile_rows: int

    @property
    def count(self) -> int:
        """Number of blocks of sums for each group of output blocks."""
        return self.rows.per_task * self.columns.per_task

    def place(self, tile: int) -> tuple[int, int]:
        """Return row and column of a tile, relative to the first tile."""
        return (0, tile * self.tile_rows) if self.beside else (tile, 0)


def _parts(conv: Conv2d, knobs: TileConv2dKnobs) -> _Parts:
    beside = knobs.row_tiles * knobs.tile_rows <= conv.out_width
    down, right = (1, knobs.row_tiles) if beside else (knobs.row_tiles, 1)
    columns = TiledExtent(conv.out_width, right * knobs.tile_rows, 1)
    return _Parts(TiledExtent(knobs.rows, down, 1), columns, beside, knobs.tile_rows)


def _window(conv: Conv2d, rows: int) -> tuple[int, int]:
    """Return rows and columns of the input, including the padding, that ``rows`` output rows read."""
    counts = (rows, conv.out_width)
    height, width = (
        (count - 1) * stride + (kernel - 1) * dilation + 1
        for count, stride, kernel, dilation in zip(counts, conv.stride, conv.kernel, conv.dilation, strict=True)
    )
    return height, width


def _extents(conv: Conv2d, knobs: TileConv2dKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Return output blocks and rows, each divided among tasks."""
    return (
        TiledExtent(blocks(conv.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(conv.out_height, knobs.rows, knobs.row_tasks),
    )
