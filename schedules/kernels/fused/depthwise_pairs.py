"""Fused pairs of a depthwise and a 1x1 convolution, whose intermediate stays in the caches of one core.

Depthwise -> 1x1 keeps a tile of rows of all channels, 1x1 -> depthwise a few channel blocks of a tile of rows. The 1x1
is computed in vector registers, or in the tile registers of AMX.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.cpu.roofline import middle_dtype
from costmodel.operators.layers import Conv2d, FusedConvs, Operator, element_bytes
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Template, blocks, tensor_dtype
from schedules.kernels.depthwise_conv2d import DepthwiseConv2d
from schedules.kernels.fused.fused_chain import (
    FusedTemplate,
    PairKnobs,
    pointwise_output_phase,
    smallest_tiles,
    split_arguments,
)
from schedules.kernels.pointwise_kernel import TilePointwise
from schedules.loops import emit
from schedules.loops.config_space import (
    UNROLLS,
    cheapest_first,
    dense_cycles,
    depthwise_cycles,
    depthwise_widths,
    exposed_traffic,
    is_small,
    parallel_cycles,
    register_tiles,
    row_blocks,
    task_splits,
)
from schedules.loops.dot_products import dot_product
from schedules.loops.kernel_inputs import PreparedInput, source_rows
from schedules.loops.loop_nests import TiledExtent, depthwise_phase, pointwise_phase, store_finished, task_index
from schedules.loops.tile_products import (
    TileRows,
    TileShape,
    block_cycles,
    depths,
    laying_out_cycles,
    pixels_phase,
    tile_product,
    tile_shapes,
)


class DepthwisePointwise(FusedTemplate):
    """Knobs: :class:`PairKnobs`. Every task along the channels repeats the depthwise part of its rows."""

    family = "depthwise-pointwise"

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        found = cheapest_first(_depthwise_first_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))
        # With few rows and a dominant depthwise part, no division avoids computing that part twice.
        depthwise, pointwise = operator.convs
        return found or (smallest_tiles(pointwise, depthwise, cpu)._asdict(),)

    def cost(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> float:
        (first, second), knobs = operator.convs, PairKnobs(**config)
        groups, bands = _output_extents(operator, knobs, cpu)
        mid, pixels = blocks(first.out_channels, cpu.lanes), knobs.rows * second.width
        size = element_bytes(operator.dtype)
        tile_bytes = size * pixels * mid * cpu.lanes
        filtering = mid * depthwise_cycles(first, knobs.depthwise_columns, knobs.rows)
        filtering += exposed_traffic(cpu, tile_bytes, tile_bytes)
        weight_bytes = size * knobs.out_blocks * cpu.lanes * second.in_channels
        one = dense_cycles(
            cpu, knobs.tile, pixels, second.in_channels,
            data_bytes=tile_bytes, weight_bytes=weight_bytes, dtype=second.dtype,
        )  # fmt: skip
        all_weights = groups.per_task * weight_bytes
        again = exposed_traffic(cpu, all_weights, all_weights + tile_bytes)
        tasks = first.batch * groups.tasks * bands.tasks
        return parallel_cycles(cpu, tasks, bands.per_task * (filtering + groups.per_task * one + again))

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        (first, second), lanes, knobs = operator.convs, cpu.lanes, PairKnobs(**config)
        mid_blocks = blocks(first.out_channels, lanes)
        rows, width = knobs.rows, second.width
        groups, bands = _output_extents(operator, knobs, cpu)

        def body(*buffers: Any) -> None:
            data, (depthwise, pointwise), residual, output = split_arguments(operator, buffers)
            with emit.tasks(first.batch * groups.tasks * bands.tasks) as task:
                image, channel_task, row_task = task_index(task, first.batch, groups.tasks, bands.tasks)
                tile = T.alloc_buffer((mid_blocks, rows * width, lanes), tensor_dtype(middle_dtype(second)))
                with emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)
                    with emit.loop(mid_blocks) as block:

                        def keep(row: Any, column: Any, sums: Any) -> None:
                            at, channel = (block, row * width + column), (depthwise.bias, block)
                            store_finished(tile, sums, at, first, lanes, channel=channel)

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
                    pointwise_output_phase(
                        pointwise,
                        knobs.tile,
                        lanes,
                        rows=rows,
                        groups=groups,
                        task=channel_task,
                        image=image,
                        first_row=first_row,
                        tile=tile,
                        residual=residual,
                        output=output,
                    )

        return emit.kernel("depthwise_pointwise", self.signature(operator, cpu), body)


def _output_extents(fused: FusedConvs, knobs: PairKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Output blocks and rows of the 1x1, each distributed over tasks."""
    pointwise = fused.convs[1]
    return (
        TiledExtent(blocks(pointwise.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(pointwise.height, knobs.rows, knobs.row_tasks),
    )


def _depthwise_first_candidates(fused: FusedConvs, cpu: CpuTarget) -> Iterator[Config]:
    depthwise, pointwise = fused.convs
    count = blocks(pointwise.out_channels, cpu.lanes)
    row_bytes = pointwise.width * blocks(pointwise.in_channels, cpu.lanes) * cpu.lanes
    row_bytes *= element_bytes(fused.dtype)
    for rows in fitting_rows(row_blocks(pointwise.height), row_bytes, cpu):
        for (size, columns), unroll in product(register_tiles(count, rows * pointwise.width, cpu), UNROLLS):
            for channel_tasks, row_tasks in pair_splits(fused, -(-count // size), -(-pointwise.height // rows), cpu):
                for width in depthwise_widths(depthwise, cpu)[-2:]:
                    yield PairKnobs(size, columns, unroll, rows, width, channel_tasks, row_tasks)._asdict()


def pair_splits(fused: FusedConvs, groups: int, bands: int, cpu: CpuTarget) -> list[tuple[int, int]]:
    """Divisions along channels and rows that do not repeat a depthwise part of half of the work or more."""
    splits = [*task_splits(groups, bands, cpu, is_small(fused.flops))]
    if bands < cpu.threads < 2 * bands:
        splits.append((1, bands))  # most threads busy, and nothing computed twice
    depthwise = fused.convs[0]
    return [
        (channel_tasks, row_tasks)
        for channel_tasks, row_tasks in dict.fromkeys(splits)
        if channel_tasks == 1 or depthwise.flops * channel_tasks <= 0.5 * fused.flops
    ]


def fitting_rows(rows: list[int], row_bytes: int, cpu: CpuTarget) -> list[int]:
    """Row tiles whose intermediate fits into half of L2; at least the smallest."""
    return [count for count in rows if count * row_bytes <= cpu.l2_bytes // 2] or rows[:1]


# Do not measure row tiles with more computed rows of the 1x1 than this multiple of the existing ones.
MOST_RECOMPUTATION = 1.6


class PointwiseDepthwise(FusedTemplate):
    """Knobs: :class:`PairKnobs`. The halo of every row tile is computed again.

    A depthwise filter needs only its own channels, so tasks along the channels repeat nothing.
    """

    family = "pointwise-depthwise"

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        found = cheapest_first(_pointwise_first_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))
        pointwise, depthwise = operator.convs
        return found or (smallest_tiles(pointwise, depthwise, cpu)._asdict(),)

    def cost(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> float:
        (first, second), knobs = operator.convs, PairKnobs(**config)
        groups, bands = _middle_extents(operator, knobs, cpu)
        pixels = source_rows(second, knobs.rows) * first.width
        in_bytes = element_bytes(first.dtype) * first.in_channels
        one = dense_cycles(
            cpu,
            knobs.tile,
            pixels,
            first.in_channels,
            data_bytes=pixels * in_bytes,
            weight_bytes=knobs.out_blocks * cpu.lanes * in_bytes,
            dtype=first.dtype,
        )
        middle = middle_dtype(second)
        tile_bytes = element_bytes(middle) * pixels * knobs.out_blocks * cpu.lanes
        filtering = knobs.out_blocks * depthwise_cycles(second, knobs.depthwise_columns, knobs.rows, source=middle)
        filtering += 2 * exposed_traffic(cpu, tile_bytes, tile_bytes)
        tasks = first.batch * groups.tasks * bands.tasks
        return parallel_cycles(cpu, tasks, bands.per_task * groups.per_task * (one + filtering))

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        (first, second), lanes, knobs = operator.convs, cpu.lanes, PairKnobs(**config)
        size, rows, width = knobs.out_blocks, knobs.rows, first.width
        in_rows = source_rows(second, rows)
        groups, bands = _middle_extents(operator, knobs, cpu)
        operand = dot_product(first.dtype).operand

        def body(*buffers: Any) -> None:
            data, (pointwise, depthwise), residual, output = split_arguments(operator, buffers)
            with emit.tasks(first.batch * groups.tasks * bands.tasks) as task:
                image, channel_task, row_task = task_index(task, first.batch, groups.tasks, bands.tasks)
                tile = T.alloc_buffer((size, in_rows * width, lanes), tensor_dtype(middle_dtype(second)))
                with emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)
                    wanted = emit.larger(0, first_row * second.stride[0] - second.padding[0])
                    first_source = emit.clamp_start(wanted, in_rows, first.height)
                    with emit.loop(groups.per_task) as group:
                        first_block = groups.start(channel_task, group)

                        def keep(block: Any, pixel: Any, sums: Any) -> None:
                            at, channel = (block - first_block, pixel), (pointwise.bias, block)
                            store_finished(tile, sums, at, first, lanes, channel=channel)

                        pointwise_phase(
                            first,
                            knobs.tile,
                            lanes,
                            pixels=in_rows * width,
                            first_block=first_block,
                            source=lambda block, pixel, lane: operand(
                                data, image, block, 0, first_source * width + pixel, lane
                            ),
                            weight=pointwise.weight,
                            bias=pointwise.bias,
                            sink=keep,
                        )
                        with emit.loop(size) as index:

                            def sink(row: Any, column: Any, sums: Any) -> None:
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

        return emit.kernel("pointwise_depthwise", self.signature(operator, cpu), body)


def _middle_extents(fused: FusedConvs, knobs: PairKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Blocks of the intermediate channels and output rows, each distributed over tasks."""
    pointwise, depthwise = fused.convs
    return (
        TiledExtent(blocks(pointwise.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(depthwise.out_height, knobs.rows, knobs.row_tasks),
    )


def _pointwise_first_candidates(fused: FusedConvs, cpu: CpuTarget) -> Iterator[Config]:
    pointwise, depthwise = fused.convs
    count, height = blocks(pointwise.out_channels, cpu.lanes), depthwise.out_height
    for rows in row_blocks(height):
        pixels = source_rows(depthwise, rows) * pointwise.width
        if rows < height and recomputation(fused, rows) > MOST_RECOMPUTATION:
            continue
        for (size, columns), unroll in product(register_tiles(count, pixels, cpu), UNROLLS):
            if pixels * size * cpu.lanes * element_bytes(middle_dtype(depthwise)) > cpu.l2_bytes // 2:
                continue
            splits = task_splits(-(-count // size), -(-height // rows), cpu, is_small(fused.flops))
            for (channel_tasks, row_tasks), width in product(splits, depthwise_widths(depthwise, cpu)[-2:]):
                yield PairKnobs(size, columns, unroll, rows, width, channel_tasks, row_tasks)._asdict()


def recomputation(fused: FusedConvs, rows: int) -> float:
    """Number of computed rows of the 1x1 divided by existing rows, with tiles of ``rows`` output rows."""
    depthwise = fused.convs[1]
    return source_rows(depthwise, rows) * -(-depthwise.out_height // rows) / depthwise.height


class TilePairKnobs(NamedTuple):
    """Knobs of the pairs in tiles."""

    # Tiles of sums of the 1x1: ``row_tiles`` x ``out_blocks``, of ``tile_rows`` pixels each.
    row_tiles: int
    out_blocks: int
    tile_rows: int
    # Blocks of input channels of the 1x1 per step.
    depth_blocks: int
    # Output rows of a tile of the image.
    rows: int
    # Columns of the register tile of the depthwise convolution.
    depthwise_columns: int
    # Parallel tasks: ``channel_tasks`` x ``row_tasks``.
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
        """May be empty: kernels in vector registers exist too."""
        return cheapest_first(self._candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def _candidates(self, fused: FusedConvs, cpu: CpuTarget) -> Iterator[Config]:
        raise NotImplementedError

    def _shape(self, conv: Conv2d, knobs: TilePairKnobs, lanes: int) -> TileShape:
        depth_bytes = self._depth * lanes * element_bytes(conv.dtype)
        return TileShape(knobs.row_tiles, knobs.out_blocks, knobs.tile_rows, depth_bytes)

    def _product_cycles(self, conv: Conv2d, shape: TileShape, pixels: int, cpu: CpuTarget) -> float:
        """Cycles of one group of output blocks over ``pixels``."""
        runs = -(-blocks(conv.in_channels, cpu.lanes) // self._depth)
        row_bytes = runs * shape.depth_bytes
        data_bytes, weight_bytes = pixels * row_bytes, shape.out_blocks * cpu.lanes * row_bytes
        one = block_cycles(shape, runs) + exposed_traffic(cpu, weight_bytes, weight_bytes + shape.all_rows * row_bytes)
        return -(-pixels // shape.all_rows) * one + exposed_traffic(cpu, data_bytes, data_bytes + weight_bytes)


class TileDepthwisePointwise(_TilePair):
    """:class:`schedules.kernels.fused.depthwise_pairs.DepthwisePointwise`, with depthwise results as rows of tiles."""

    kind = "depthwise-pointwise"

    def cost(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> float:
        (first, second), knobs = operator.convs, TilePairKnobs(**config)
        groups, bands = _tile_extents(second, second.height, knobs, cpu)
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
        groups, bands = _tile_extents(second, second.height, knobs, cpu)
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
                            # The distance of neighbouring pixels is the depth of a run of blocks.
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
            return  # completely filled rows have no extra cost here
        size = element_bytes(pointwise.dtype)
        row_bytes = pointwise.width * in_blocks * cpu.lanes * size
        for rows in fitting_rows(row_blocks(pointwise.height), row_bytes, cpu):
            for shape in tile_shapes(count, rows * pointwise.width, self._depth * cpu.lanes * size):
                splits = pair_splits(fused, -(-count // shape.out_blocks), -(-pointwise.height // rows), cpu)
                for (channels, row_tasks), columns in product(splits, depthwise_widths(depthwise, cpu)[-2:]):
                    yield _tile_knobs(shape, self._depth, rows, columns, channels, row_tasks)


class TilePointwiseDepthwise(_TilePair):
    """:class:`schedules.kernels.fused.depthwise_pairs.PointwiseDepthwise` in tiles.

    With more than one block of input channels per step, the pixels of a tile are first copied into rows, for all groups
    of channels.
    """

    kind = "pointwise-depthwise"

    def cost(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> float:
        (first, second), knobs = operator.convs, TilePairKnobs(**config)
        groups, bands = _tile_extents(first, second.out_height, knobs, cpu)
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
        groups, bands = _tile_extents(first, second.out_height, knobs, cpu)
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
                    yield _tile_knobs(shape, self._depth, rows, columns, channels, row_tasks)


def _tile_knobs(shape: TileShape, depth: int, rows: int, columns: int, channel_tasks: int, row_tasks: int) -> Config:
    return TilePairKnobs(
        shape.row_tiles, shape.out_blocks, shape.rows, depth, rows, columns, channel_tasks, row_tasks
    )._asdict()


def _tile_extents(
    pointwise: Conv2d, out_height: int, knobs: TilePairKnobs, cpu: CpuTarget
) -> tuple[TiledExtent, TiledExtent]:
    """Output blocks of the 1x1 and output rows of the pair, each distributed over tasks."""
    return (
        TiledExtent(blocks(pointwise.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(out_height, knobs.rows, knobs.row_tasks),
    )
