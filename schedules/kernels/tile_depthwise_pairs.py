"""Fused depthwise -> 1x1 and 1x1 -> depthwise with the 1x1 in the tile registers of AMX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.cpu.fused_tile import middle_dtype
from costmodel.operators.layers import Conv2d, FusedConvs, Operator, element_bytes
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Template, tensor_dtype
from schedules.kernels.depthwise_conv2d import DepthwiseConv2d
from schedules.kernels.depthwise_pointwise import fitting_rows, pair_splits
from schedules.kernels.fused_chain import FusedTemplate, split_arguments
from schedules.kernels.pointwise_depthwise import MOST_RECOMPUTATION, recomputation
from schedules.kernels.tile_pointwise import TilePointwise
from schedules.loops import emit
from schedules.loops.issue_slots import depthwise_cycles, exposed_traffic, parallel_cycles
from schedules.loops.loop_nests import TiledExtent, depthwise_phase, store_finished, task_index
from schedules.loops.prepared_input import PreparedInput
from schedules.loops.register_tiling import depthwise_widths, row_blocks
from schedules.loops.row_window import source_rows
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits
from schedules.loops.tile_phases import pixels_phase
from schedules.loops.tile_products import TileShape, block_cycles, depths, tile_product, tile_shapes
from schedules.loops.tile_rows import TileRows, laying_out_cycles


class TilePairKnobs(NamedTuple):
    """Knobs: ``row_tiles`` x ``out_blocks`` tiles of sums of the 1x1, of ``tile_rows`` pixels each, ``depth_blocks``
    blocks of its input channels per step; output ``rows`` of a tile of the image, ``depthwise_columns``,
    ``channel_tasks`` x ``row_tasks`` parallel tasks.
    """

    row_tiles: int
    out_blocks: int
    tile_rows: int
    depth_blocks: int
    rows: int
    depthwise_columns: int
    channel_tasks: int
    row_tasks: int


class _TilePair(FusedTemplate):
    """Base of both pairs: a 1x1 with weights for ``depth`` blocks of input channels per step."""

    kind: str

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.family = f"tile-{self.kind}-{depth}"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        if not isinstance(operator, FusedConvs) or operator.kind != self.kind:
            return False
        pointwise = next(conv for conv in operator.convs if not conv.is_depthwise)
        return TilePointwise(self._depth).covers(pointwise, cpu)

    def layer_templates(self, operator: FusedConvs, cpu: CpuTarget) -> list[Template]:
        return [DepthwiseConv2d() if conv.is_depthwise else TilePointwise(self._depth) for conv in operator.convs]

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        """Return the space, which may be empty: there are also kernels in vector registers."""
        return cheapest_first(self._candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def _candidates(self, fused: FusedConvs, cpu: CpuTarget) -> Iterator[Config]:
        raise NotImplementedError

    def _shape(self, conv: Conv2d, knobs: TilePairKnobs, lanes: int) -> TileShape:
        depth_bytes = self._depth * lanes * element_bytes(conv.dtype)
        return TileShape(knobs.row_tiles, knobs.out_blocks, knobs.tile_rows, depth_bytes)

    def _product_cycles(self, conv: Conv2d, shape: TileShape, pixels: int, cpu: CpuTarget) -> float:
        """Return the cycles of one group of output blocks over ``pixels``."""
        runs = -(-blocks(conv.in_channels, cpu.lanes) // self._depth)
        row_bytes = runs * shape.depth_bytes
        data_bytes, weight_bytes = pixels * row_bytes, shape.out_blocks * cpu.lanes * row_bytes
        one = block_cycles(shape, runs) + exposed_traffic(cpu, weight_bytes, weight_bytes + shape.all_rows * row_bytes)
        return -(-pixels // shape.all_rows) * one + exposed_traffic(cpu, data_bytes, data_bytes + weight_bytes)


class TileDepthwisePointwise(_TilePair):
    """Pair as :class:`schedules.kernels.depthwise_pointwise.DepthwisePointwise`: the depthwise layer writes its results
    as rows of tiles.
    """

    kind = "depthwise-pointwise"

    def cost(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> float:
        (first, second), knobs = operator.convs, TilePairKnobs(**config)
        groups, bands = _extents(second, second.height, knobs, cpu)
        mid, pixels = blocks(first.out_channels, cpu.lanes), knobs.rows * second.width
        tile_bytes = element_bytes(second.dtype) * pixels * mid * cpu.lanes
        filtering = mid * depthwise_cycles(first, knobs.depthwise_columns, knobs.rows)
        filtering += exposed_traffic(cpu, tile_bytes, tile_bytes)
        one = self._product_cycles(second, self._shape(second, knobs, cpu.lanes), pixels, cpu)
        tasks = first.batch * groups.tasks * bands.tasks
        return parallel_cycles(cpu, tasks, bands.per_task * (filtering + groups.per_task * one))

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        (first, second), lanes, knobs = operator.convs, cpu.lanes, TilePairKnobs(**config)
        mid_blocks, rows, width = blocks(first.out_channels, lanes), knobs.rows, second.width
        groups, bands = _extents(second, second.height, knobs, cpu)
        shape, runs = self._shape(second, knobs, lanes), -(-mid_blocks // self._depth)

        def body(*buffers: Any) -> None:
            data, (depthwise, pointwise), residual, output = split_arguments(operator, buffers)
            with emit.tasks(first.batch * groups.tasks * bands.tasks) as task:
                image, channel_task, row_task = task_index(task, first.batch, groups.tasks, bands.tasks)
                tile = T.alloc_buffer((runs, rows * width, self._depth, lanes), tensor_dtype(middle_dtype(second)))
                for index in range(mid_blocks - (runs - 1) * self._depth, self._depth):
                    with emit.loop(rows * width) as pixel:  # blocks that fill up the last run
                        emit.store(tile, emit.splat(0.0, lanes), runs - 1, pixel, index, lanes=lanes)
                with tile_product(shape, second.dtype) as tiles, emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)
                    with emit.loop(mid_blocks) as block:
                        place = (
                            emit.bind(emit.quotient(block, self._depth)),
                            emit.bind(emit.remainder(block, self._depth)),
                        )

                        def keep(row: Any, column: Any, sums: Sequence[Any]) -> None:
                            # The distance of adjacent pixels is the depth of a run of blocks.
                            for offset, each in enumerate(sums):
                                at = (place[0], row * width + column + offset, place[1])
                                store_finished(tile, [each], at, first, lanes, channel=(depthwise.bias, block))

                        depthwise_phase(
                            first,
                            knobs.depthwise_columns,
                            lanes,
                            rows=rows,
                            first_row=first_row,
                            block=block,
                            data=data,
                            at=lambda row, column: (image, block, row, column),
                            weight=depthwise.weight,
                            bias=depthwise.bias,
                            sink=keep,
                        )

                    def sink(block: Any, pixel: Any, sums: Any) -> None:
                        at, channel = (image, block, 0, first_row * width + pixel), (pointwise.bias, block)
                        store_finished(output, [sums], at, second, lanes, residual, channel=channel)

                    with emit.loop(groups.per_task) as group:
                        pixels_phase(
                            second,
                            tiles,
                            pixels=rows * width,
                            first_block=groups.start(channel_task, group),
                            source=lambda run, pixel: tile[run, pixel, 0, 0],
                            weight=pointwise.weight,
                            bias=pointwise.bias,
                            sink=sink,
                        )

        return emit.kernel("tile_depthwise_pointwise", self.signature(operator, cpu), body, tiles=True)

    def _candidates(self, fused: FusedConvs, cpu: CpuTarget) -> Iterator[Config]:
        depthwise, pointwise = fused.convs
        in_blocks, count = blocks(pointwise.in_channels, cpu.lanes), blocks(pointwise.out_channels, cpu.lanes)
        if self._depth < depths(in_blocks, pointwise.dtype, cpu.lanes)[-1]:
            return  # full rows cost nothing here: smaller depths have no benefit
        size = element_bytes(pointwise.dtype)
        row_bytes = pointwise.width * in_blocks * cpu.lanes * size
        for rows in fitting_rows(row_blocks(pointwise.height), row_bytes, cpu):
            for shape in tile_shapes(count, rows * pointwise.width, self._depth * cpu.lanes * size):
                splits = pair_splits(fused, -(-count // shape.out_blocks), -(-pointwise.height // rows), cpu)
                for (channels, row_tasks), columns in product(splits, depthwise_widths(depthwise, cpu)[-2:]):
                    yield _knobs(shape, self._depth, rows, columns, channels, row_tasks)


class TilePointwiseDepthwise(_TilePair):
    """Pair as :class:`schedules.kernels.pointwise_depthwise.PointwiseDepthwise`. With several blocks of input channels
    per step the pixels of a tile are first laid out in rows, for all groups of channels.
    """

    kind = "pointwise-depthwise"

    def cost(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> float:
        (first, second), knobs = operator.convs, TilePairKnobs(**config)
        groups, bands = _extents(first, second.out_height, knobs, cpu)
        pixels = source_rows(second, knobs.rows) * first.width
        one = self._product_cycles(first, self._shape(first, knobs, cpu.lanes), pixels, cpu)
        middle = middle_dtype(second)
        tile_bytes = element_bytes(middle) * pixels * knobs.out_blocks * cpu.lanes
        filtering = knobs.out_blocks * depthwise_cycles(second, knobs.depthwise_columns, knobs.rows, source=middle)
        filtering += 2 * exposed_traffic(cpu, tile_bytes, tile_bytes)
        band = groups.per_task * (one + filtering)
        if self._depth > 1:
            band += laying_out_cycles(first, cpu, pixels, first.input_bytes / cpu.threads)
        return parallel_cycles(cpu, first.batch * groups.tasks * bands.tasks, bands.per_task * band)

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        (first, second), lanes, knobs = operator.convs, cpu.lanes, TilePairKnobs(**config)
        size, rows, width = knobs.out_blocks, knobs.rows, first.width
        pixels = source_rows(second, rows) * width
        groups, bands = _extents(first, second.out_height, knobs, cpu)
        shape = self._shape(first, knobs, lanes)

        def body(*buffers: Any) -> None:
            data, (pointwise, depthwise), residual, output = split_arguments(operator, buffers)
            with emit.tasks(first.batch * groups.tasks * bands.tasks) as task:
                image, channel_task, row_task = task_index(task, first.batch, groups.tasks, bands.tasks)
                laid_out = TileRows(first, lanes, self._depth, 1, pixels) if self._depth > 1 else None
                tile = T.alloc_buffer((size, pixels, lanes), tensor_dtype(middle_dtype(second)))
                with tile_product(shape, first.dtype) as tiles, emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)
                    wanted = emit.larger(0, first_row * second.stride[0] - second.padding[0])
                    first_source = emit.clamp_start(wanted, pixels // width, first.height)
                    start = emit.bind(first_source * width)
                    if laid_out is not None:
                        source_image = PreparedInput(first, data, None, None, lanes)
                        laid_out.fill(source_image, image, 0, start, first.height * width)

                    def source(run: Any, pixel: Any) -> Any:
                        return (
                            data[image, run, 0, start + pixel, 0] if laid_out is None else laid_out.first(run, 0, pixel)
                        )

                    with emit.loop(groups.per_task) as group:
                        first_block = groups.start(channel_task, group)

                        def keep(block: Any, pixel: Any, sums: Any) -> None:
                            at, channel = (block - first_block, pixel), (pointwise.bias, block)
                            store_finished(tile, [sums], at, first, lanes, channel=channel)

                        pixels_phase(
                            first,
                            tiles,
                            pixels=pixels,
                            first_block=first_block,
                            source=source,
                            weight=pointwise.weight,
                            bias=pointwise.bias,
                            sink=keep,
                        )
                        with emit.loop(size) as index:

                            def sink(row: Any, column: Any, sums: Sequence[Any]) -> None:
                                at = (image, first_block + index, first_row + row, column)
                                channel = (depthwise.bias, first_block + index)
                                store_finished(output, sums, at, second, lanes, residual, channel=channel)

                            depthwise_phase(
                                second,
                                knobs.depthwise_columns,
                                lanes,
                                rows=rows,
                                first_row=first_row,
                                block=first_block + index,
                                data=tile,
                                at=lambda row, column: (index, (row - first_source) * width + column),
                                weight=depthwise.weight,
                                bias=depthwise.bias,
                                sink=sink,
                            )

        return emit.kernel("tile_pointwise_depthwise", self.signature(operator, cpu), body, tiles=True)

    def _candidates(self, fused: FusedConvs, cpu: CpuTarget) -> Iterator[Config]:
        pointwise, depthwise = fused.convs
        count, height = blocks(pointwise.out_channels, cpu.lanes), depthwise.out_height
        depth_bytes = self._depth * cpu.lanes * element_bytes(pointwise.dtype)
        pixel_bytes = (
            -(-blocks(pointwise.in_channels, cpu.lanes) // self._depth) * depth_bytes if self._depth > 1 else 0
        )
        middle_bytes = cpu.lanes * element_bytes(middle_dtype(depthwise))
        for rows in row_blocks(height):
            if rows < height and recomputation(fused, rows) > MOST_RECOMPUTATION:
                continue
            pixels = source_rows(depthwise, rows) * pointwise.width
            for shape in tile_shapes(count, pixels, depth_bytes):
                if pixels * (shape.out_blocks * middle_bytes + pixel_bytes) > cpu.l2_bytes // 2:
                    continue
                splits = task_splits(-(-count // shape.out_blocks), -(-height // rows), cpu, is_small(fused.flops))
                for (channels, row_tasks), columns in product(splits, depthwise_widths(depthwise, cpu)[-2:]):
                    yield _knobs(shape, self._depth, rows, columns, channels, row_tasks)


def _knobs(shape: TileShape, depth: int, rows: int, columns: int, channel_tasks: int, row_tasks: int) -> Config:
    return TilePairKnobs(
        shape.row_tiles, shape.out_blocks, shape.rows, depth, rows, columns, channel_tasks, row_tasks
    )._asdict()


def _extents(
    pointwise: Conv2d, out_height: int, knobs: TilePairKnobs, cpu: CpuTarget
) -> tuple[TiledExtent, TiledExtent]:
    """Return output blocks of the 1x1 and output rows of the pair, each divided among tasks."""
    return (
        TiledExtent(blocks(pointwise.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(out_height, knobs.rows, knobs.row_tasks),
    )
