"""Fused 1x1 -> depthwise: a few channel blocks of a tile of rows stay in the caches of one core."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.cpu.fused_tile import middle_dtype
from costmodel.operators.layers import FusedConvs, element_bytes
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, tensor_dtype
from schedules.kernels.fused_chain import FusedTemplate, PairKnobs, smallest_tiles, split_arguments
from schedules.loops import emit
from schedules.loops.dot_products import dot_product
from schedules.loops.issue_slots import dense_cycles, depthwise_cycles, exposed_traffic, parallel_cycles
from schedules.loops.loop_nests import TiledExtent, depthwise_phase, pointwise_phase, store_finished, task_index
from schedules.loops.register_tiling import UNROLLS, depthwise_widths, register_tiles, row_blocks
from schedules.loops.row_window import source_rows
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits

# Limit of rows of the 1x1 computed relative to rows that exist; smaller tiles of rows are not worth measuring.
MOST_RECOMPUTATION = 1.6


class PointwiseDepthwise(FusedTemplate):
    """Pair 1x1 -> depthwise with knobs :class:`PairKnobs`. The halo of every tile of rows is computed again; a
    depthwise filter needs only its own channels, so tasks along the channels repeat nothing.
    """

    family = "pointwise-depthwise"

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        found = cheapest_first(_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))
        pointwise, depthwise = operator.convs
        return found or (smallest_tiles(pointwise, depthwise, cpu)._asdict(),)

    def cost(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> float:
        (first, second), knobs = operator.convs, PairKnobs(**config)
        groups, bands = _extents(operator, knobs, cpu)
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
        groups, bands = _extents(operator, knobs, cpu)
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


def _extents(fused: FusedConvs, knobs: PairKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Return intermediate channel blocks and output rows, each divided among tasks."""
    pointwise, depthwise = fused.convs
    return (
        TiledExtent(blocks(pointwise.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(depthwise.out_height, knobs.rows, knobs.row_tasks),
    )


def _candidates(fused: FusedConvs, cpu: CpuTarget) -> Iterator[Config]:
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
    """Return rows of the 1x1 computed relative to rows that exist, with tiles of ``rows`` output rows."""
    depthwise = fused.convs[1]
    return source_rows(depthwise, rows) * -(-depthwise.out_height // rows) / depthwise.height
