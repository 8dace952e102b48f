"""Fused convolution -> depthwise -> 1x1 on a sliding window of rows.

The first convolution is a 1x1 (an inverted residual) or any dense k x k (the stem of a network). A task processes its
output rows from top to bottom; expanded rows that the depthwise filter needs again stay in a ring buffer, so each is
computed once, except for the halo between two tasks, and never leaves the core's caches. (Storage folding and sliding
windows: Ragan-Kelley et al., PLDI 2013.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.cpu.roofline import middle_dtype
from costmodel.operators.layers import Conv2d, FusedConvs, element_bytes
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Template, blocks, tensor_dtype
from schedules.kernels.direct_conv2d import DirectConv2d
from schedules.kernels.fused.fused_chain import (
    ChainInput,
    FusedTemplate,
    is_matrix,
    pointwise_output_phase,
    split_arguments,
)
from schedules.loops import emit
from schedules.loops.config_space import (
    RegisterTile,
    cheapest_first,
    dense_cycles,
    depthwise_cycles,
    depthwise_widths,
    exposed_traffic,
    is_small,
    parallel_cycles,
    register_tiles,
    task_splits,
)
from schedules.loops.emit import Expr
from schedules.loops.kernel_inputs import RowWindow, source_rows
from schedules.loops.loop_nests import TiledExtent, depthwise_phase, store_finished, task_index


class SlidingWindowKnobs(NamedTuple):
    """Knobs of the sliding window."""

    # Register tile of the first convolution.
    expand_blocks: int
    expand_columns: int
    # Register tile of the last convolution.
    out_blocks: int
    columns: int
    # Of both convolutions.
    unroll: int
    # Output rows of a step.
    rows: int
    # Columns of the register tile of the depthwise convolution.
    depthwise_columns: int
    # Number of parallel tasks.
    row_tasks: int

    @property
    def expand_tile(self) -> RegisterTile:
        return RegisterTile(self.expand_blocks, self.expand_columns, self.unroll)

    @property
    def project_tile(self) -> RegisterTile:
        return RegisterTile(self.out_blocks, self.columns, self.unroll)


class SlidingWindow(FusedTemplate):
    """Per step of ``rows`` output rows: new source rows are expanded (all channel blocks), filtered, and projected."""

    def __init__(self, family: str) -> None:
        self.family = family

    def layer_templates(self, operator: FusedConvs, cpu: CpuTarget) -> list[Template]:
        first, *others = super().layer_templates(operator, cpu)
        return [first if is_matrix(operator.convs[0], cpu.lanes) else DirectConv2d(), *others]

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        found = cheapest_first(_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))
        return found or (_one_row_at_a_time(operator, cpu)._asdict(),)

    def cost(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> float:
        (expand, depthwise, project), knobs = operator.convs, SlidingWindowKnobs(**config)
        window = RowWindow(depthwise, knobs.rows, knobs.row_tasks)
        wide, outs = _extents(operator, knobs, cpu)
        kept, size = middle_dtype(depthwise), element_bytes(project.dtype)
        ring_bytes = element_bytes(kept) * window.ring * expand.out_width * wide.extent * cpu.lanes
        filtering = wide.extent * depthwise_cycles(depthwise, knobs.depthwise_columns, knobs.rows, source=kept)
        filtering += exposed_traffic(cpu, ring_bytes, ring_bytes)
        pixels = knobs.rows * project.width
        one = dense_cycles(
            cpu,
            knobs.project_tile,
            pixels,
            project.in_channels,
            data_bytes=size * pixels * wide.extent * cpu.lanes,
            weight_bytes=size * knobs.out_blocks * cpu.lanes * project.in_channels,
            dtype=project.dtype,
        )
        widened_rows = source_rows(depthwise, window.steps * knobs.rows)
        widening = widened_rows * _row_cycles(expand, knobs, wide, ring_bytes, cpu)
        return parallel_cycles(
            cpu, expand.batch * window.tasks, widening + window.steps * (filtering + outs.per_task * one)
        )

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        (expand, depthwise, project), lanes, knobs = operator.convs, cpu.lanes, SlidingWindowKnobs(**config)
        window = RowWindow(depthwise, knobs.rows, knobs.row_tasks)
        wide, outs = _extents(operator, knobs, cpu)
        width, out_width, mid = expand.out_width, project.width, wide.extent

        def body(*buffers: Any) -> None:
            data, layers, residual, output = split_arguments(operator, buffers)
            with emit.tasks(expand.batch * window.tasks) as task:
                image, row_task = task_index(task, expand.batch, window.tasks)
                source = ChainInput(expand, data, lanes)
                widened = T.alloc_buffer((mid, window.ring * width + 1, lanes), tensor_dtype(middle_dtype(depthwise)))
                filtered = T.alloc_buffer(
                    (mid, window.rows * out_width + 1, lanes), tensor_dtype(middle_dtype(project))
                )
                with emit.loop(window.steps) as step:
                    first_row = window.first_row(row_task, step)
                    with emit.span(*window.new_sources(first_row, step)) as row:
                        start = emit.bind(window.slot(row) * width)

                        def widen(block: Expr, column: Expr, sums: Any) -> None:
                            at, channel = (block, start + column), (layers[0].bias, block)
                            store_finished(widened, sums, at, expand, lanes, channel=channel)

                        with emit.loop(wide.per_task) as group:
                            source.row(layers[0], knobs.expand_tile, image, row, wide.start(0, group), widen)
                    with emit.loop(mid) as block:

                        def keep(row: Expr, column: Expr, sums: Any) -> None:
                            at, channel = (block, row * out_width + column), (layers[1].bias, block)
                            store_finished(filtered, sums, at, depthwise, lanes, channel=channel)

                        depthwise_phase(
                            depthwise,
                            knobs.depthwise_columns,
                            lanes,
                            rows=window.rows,
                            first_row=first_row,
                            block=block,
                            data=widened,
                            at=lambda row, column: (block, window.slot(row) * width + column),
                            weight=layers[1].weight,
                            bias=layers[1].bias,
                            sink=keep,
                        )
                    pointwise_output_phase(
                        layers[2],
                        knobs.project_tile,
                        lanes,
                        rows=window.rows,
                        groups=outs,
                        task=0,
                        image=image,
                        first_row=first_row,
                        tile=filtered,
                        residual=residual,
                        output=output,
                    )

        return emit.kernel("sliding_window", self.signature(operator, cpu), body)


def _extents(fused: FusedConvs, knobs: SlidingWindowKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Output blocks of the first and of the last convolution, all of which every task computes."""
    expand, _, project = fused.convs
    return (
        TiledExtent(blocks(expand.out_channels, cpu.lanes), knobs.expand_blocks, 1),
        TiledExtent(blocks(project.out_channels, cpu.lanes), knobs.out_blocks, 1),
    )


def _row_cycles(expand: Conv2d, knobs: SlidingWindowKnobs, wide: TiledExtent, ring_bytes: int, cpu: CpuTarget) -> float:
    """Cycles of one expanded row, all channel blocks; ``ring_bytes`` are used before its weights are read again."""
    depth = expand.in_channels * expand.kernel[0] * expand.kernel[1]
    size = element_bytes(expand.dtype)
    row = dense_cycles(
        cpu,
        knobs.expand_tile,
        expand.out_width,
        depth,
        data_bytes=size * expand.in_channels * expand.width,
        weight_bytes=size * knobs.expand_blocks * cpu.lanes * depth,
        dtype=expand.dtype,
    )
    all_weights = size * wide.extent * cpu.lanes * depth
    return wide.per_task * row + exposed_traffic(cpu, all_weights, all_weights + ring_bytes)


def _candidates(fused: FusedConvs, cpu: CpuTarget) -> Iterator[Config]:
    expand, depthwise, project = fused.convs
    wide, outs = blocks(expand.out_channels, cpu.lanes), blocks(project.out_channels, cpu.lanes)
    height = depthwise.out_height
    for rows in _fitting_rows(fused, cpu):
        tiles = product(
            register_tiles(wide, expand.out_width, cpu, most=6),
            register_tiles(outs, rows * project.width, cpu, most=5),
            (2, 4, 8) if expand.is_pointwise else (1, 2),
            depthwise_widths(depthwise, cpu)[-2:],
        )
        splits = [
            row_tasks
            for _, row_tasks in task_splits(1, -(-height // rows), cpu, is_small(fused.flops))
            if RowWindow(depthwise, rows, row_tasks).steps * rows <= height
        ]
        for (expand_tile, project_tile, unroll, width), row_tasks in product(tiles, splits):
            yield SlidingWindowKnobs(*expand_tile, *project_tile, unroll, rows, width, row_tasks)._asdict()


def _fitting_rows(fused: FusedConvs, cpu: CpuTarget) -> list[int]:
    """Rows per step with intermediates within half of L2; at least the smallest number."""
    expand, depthwise, project = fused.convs

    def resident(rows: int) -> int:
        ring = RowWindow(depthwise, rows, 1).ring * expand.out_width * element_bytes(middle_dtype(depthwise))
        filtered = rows * project.width * element_bytes(middle_dtype(project))
        return (ring + filtered) * blocks(expand.out_channels, cpu.lanes) * cpu.lanes

    steps = [rows for rows in (1, 2, 3, 4, 7, 8) if rows <= depthwise.out_height]
    return [rows for rows in steps if resident(rows) <= cpu.l2_bytes // 2] or steps[:1]


def _one_row_at_a_time(fused: FusedConvs, cpu: CpuTarget) -> SlidingWindowKnobs:
    """Knobs that fit any image: a single task, one row per step."""
    expand, depthwise, project = fused.convs
    return SlidingWindowKnobs(
        expand_blocks=1,
        expand_columns=min(8, expand.out_width),
        out_blocks=1,
        columns=min(8, project.width),
        unroll=2,
        rows=1,
        depthwise_columns=depthwise_widths(depthwise, cpu)[-2:][0],
        row_tasks=1,
    )
