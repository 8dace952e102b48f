"""Fused depthwise -> 1x1: a tile of rows of all channels stays in the caches of one core."""

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
from schedules.kernels.fused_chain import (
    FusedTemplate,
    PairKnobs,
    pointwise_output_phase,
    smallest_tiles,
    split_arguments,
)
from schedules.loops import emit
from schedules.loops.issue_slots import dense_cycles, depthwise_cycles, exposed_traffic, parallel_cycles
from schedules.loops.loop_nests import TiledExtent, depthwise_phase, store_finished, task_index
from schedules.loops.register_tiling import UNROLLS, depthwise_widths, register_tiles, row_blocks
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits


class DepthwisePointwise(FusedTemplate):
    """Pair depthwise -> 1x1 with knobs :class:`PairKnobs`. Every task along the channels repeats the depthwise part of
    its rows.
    """

    family = "depthwise-pointwise"

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        found = cheapest_first(_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))
        # Fallback: an image of few rows whose depthwise part is most of the work cannot be divided without repeating
        # that part.
        depthwise, pointwise = operator.convs
        return found or (smallest_tiles(pointwise, depthwise, cpu)._asdict(),)

    def cost(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> float:
        (first, second), knobs = operator.convs, PairKnobs(**config)
        groups, bands = _extents(operator, knobs, cpu)
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
        groups, bands = _extents(operator, knobs, cpu)

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


def _extents(fused: FusedConvs, knobs: PairKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Return output blocks and rows of the 1x1, each divided among tasks."""
    pointwise = fused.convs[1]
    return (
        TiledExtent(blocks(pointwise.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(pointwise.height, knobs.rows, knobs.row_tasks),
    )


def _candidates(fused: FusedConvs, cpu: CpuTarget) -> Iterator[Config]:
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
    """Return splits into tasks along channels and rows; several along channels only if the repeated depthwise part is
    at most half of the work.
    """
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
    """Return row tiles whose intermediate stays in half of L2; at least the smallest."""
    return [count for count in rows if count * row_bytes <= cpu.l2_bytes // 2] or rows[:1]
