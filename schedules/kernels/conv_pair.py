"""Fused pairs with a dense k x k convolution, on a window of rows that slides down the image.

k x k -> 1x1 (bottlenecks, detection heads), 1x1 -> k x k (bottlenecks, fire modules), k x k -> k x k (basic blocks,
U-Nets, stems) and k x k -> depthwise (stems). A task walks down its rows of the output; the rows in between that the
second convolution still needs stay in a ring buffer of the task with all their channels, so each is computed once, but
for the halo between two tasks. Both convolutions are direct sums in the register tiles that they have apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d, FusedConvs
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Template
from schedules.kernels.depthwise_conv2d import DepthwiseConv2d
from schedules.kernels.direct_conv2d import DirectConv2d
from schedules.kernels.fused_chain import (
    ChainLayer,
    FusedTemplate,
    conv_output_phase,
    first_layer_row,
    is_matrix,
    pointwise_output_phase,
    split_arguments,
)
from schedules.kernels.pointwise_kernel import Pointwise
from schedules.loops import emit
from schedules.loops.emit import Expr
from schedules.loops.issue_slots import dense_cycles, depthwise_cycles, exposed_traffic, parallel_cycles
from schedules.loops.loop_nests import TiledExtent, depthwise_phase, store_finished, task_index
from schedules.loops.register_tiling import RegisterTile, depthwise_widths, register_tiles
from schedules.loops.row_window import RowWindow, source_rows
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits

# Register tiles of a layer that are combined with those of the other: the cheapest by its own cycles.
_TILES = 6
# Rows in between computed over rows that exist, beyond which a split into tasks is not worth measuring.
_MOST_RECOMPUTATION = 1.6


class ConvPairKnobs(NamedTuple):
    """Register tiles of the first (``middle_blocks`` x ``middle_columns``) and of the last convolution (``out_blocks`` x
    ``columns``; one block where it is depthwise), ``unroll`` of both, output ``rows`` of a step, ``row_tasks`` parallel
    tasks.
    """

    middle_blocks: int
    middle_columns: int
    out_blocks: int
    columns: int
    unroll: int
    rows: int
    row_tasks: int

    @property
    def tiles(self) -> tuple[RegisterTile, RegisterTile]:
        """Of the first and of the last convolution."""
        return (
            RegisterTile(self.middle_blocks, self.middle_columns, self.unroll),
            RegisterTile(self.out_blocks, self.columns, self.unroll),
        )


class ConvPair(FusedTemplate):
    """Per step of ``rows`` output rows: the new rows in between, group by group of channel blocks, then the output."""

    def __init__(self, family: str) -> None:
        self.family = family

    def layer_templates(self, operator: FusedConvs, cpu: CpuTarget) -> list[Template]:
        first, last = operator.convs
        inside: Template = DirectConv2d(inside_chain=True)
        if last.is_depthwise:
            inside = DepthwiseConv2d()
        elif last.is_pointwise:
            inside = Pointwise()
        return [Pointwise() if is_matrix(first, cpu.lanes) else DirectConv2d(), inside]

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        found = cheapest_first(_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))
        return found or (_one_row_at_a_time(operator, cpu)._asdict(),)

    def cost(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> float:
        (first, last), knobs = operator.convs, ConvPairKnobs(**config)
        window = RowWindow(last, knobs.rows, knobs.row_tasks)
        (first_tile, last_tile), resident = knobs.tiles, _resident_bytes(operator, knobs.rows, cpu)
        new_rows = min(first.out_height, knobs.rows * last.stride[0])
        opening = source_rows(last, window.steps * knobs.rows) / new_rows  # steps of the first layer, the halo included
        cycles = opening * _first_cycles(first, first_tile, new_rows, resident, cpu)
        cycles += window.steps * _last_cycles(last, last_tile, knobs.rows, resident, cpu)
        return parallel_cycles(cpu, operator.batch * window.tasks, cycles)

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        (first, last), lanes, knobs = operator.convs, cpu.lanes, ConvPairKnobs(**config)
        window = RowWindow(last, knobs.rows, knobs.row_tasks)
        middle_groups = TiledExtent(blocks(first.out_channels, lanes), knobs.middle_blocks, 1)
        width, first_tile = first.out_width, knobs.tiles[0]

        def body(*buffers: Any) -> None:
            data, (one, other), residual, output = split_arguments(operator, buffers)
            with emit.tasks(operator.batch * window.tasks) as task:
                image, row_task = task_index(task, operator.batch, window.tasks)
                pixels = _resident_rows(last, knobs.rows) * width
                middle = T.alloc_buffer((middle_groups.extent, pixels + 1, lanes), "float32")
                with emit.loop(window.steps) as step:
                    first_row = window.first_row(row_task, step)
                    new_rows = window.new_sources(first_row, step)

                    def position(row: Expr) -> Expr:
                        # A 1x1 has no rows to keep: those of a step lie one behind the other.
                        return (row - first_row if last.is_pointwise else window.slot(row)) * width

                    with emit.loop(middle_groups.per_task) as group, emit.span(*new_rows) as row:
                        start = emit.bind(position(row))

                        def keep(block: Expr, column: Expr, sums: Any) -> None:
                            at, channel = (block, start + column), (one.bias, block)
                            store_finished(middle, sums, at, first.epilogue, lanes, channel=channel)

                        first_layer_row(
                            one, first_tile, lanes, data, image, row, middle_groups.start(0, group), keep
                        )  # fmt: skip
                    _output_rows(other, knobs, lanes, image, first_row, middle, position, residual, output)

        return emit.kernel("conv_pair", self.signature(operator, cpu), body)


def _output_rows(
    layer: ChainLayer,
    knobs: ConvPairKnobs,
    lanes: int,
    image: Expr,
    first_row: Expr,
    middle: Any,
    position: Callable[[Expr], Expr],
    residual: Any | None,
    output: Any,
) -> None:
    """``knobs.rows`` output rows from ``first_row``; a row of ``middle`` begins at ``position(row)``."""
    conv, tile = layer.conv, knobs.tiles[1]
    groups = TiledExtent(blocks(conv.out_channels, lanes), tile.out_blocks, 1)
    if conv.is_pointwise:
        pointwise_output_phase(
            layer, tile, lanes, rows=knobs.rows, groups=groups, task=0, image=image, first_row=first_row,
            tile=middle, residual=residual, output=output,
        )  # fmt: skip
        return
    if not conv.is_depthwise:
        conv_output_phase(
            layer, tile, lanes, rows=knobs.rows, groups=groups, image=image, first_row=first_row,
            tile=middle, position=position, residual=residual, output=output,
        )  # fmt: skip
        return
    with emit.loop(groups.extent) as block:

        def sink(row: Expr, column: Expr, sums: Any) -> None:
            at = (image, block, first_row + row, column)
            store_finished(output, sums, at, conv.epilogue, lanes, residual, channel=(layer.bias, block))

        depthwise_phase(
            conv, tile.columns, lanes, rows=knobs.rows, first_row=first_row, block=block,
            source=lambda row, column: emit.load(middle, block, position(row) + column, lanes=lanes),
            weight=layer.weight, bias=layer.bias, sink=sink,
        )  # fmt: skip


def _resident_rows(last: Conv2d, rows: int) -> int:
    """Rows in between that the buffer of a task holds."""
    return rows if last.is_pointwise else RowWindow(last, rows, 1).ring


def _resident_bytes(fused: FusedConvs, rows: int, cpu: CpuTarget) -> int:
    """Bytes of that buffer."""
    first, last = fused.convs
    return 4 * _resident_rows(last, rows) * first.out_width * blocks(first.out_channels, cpu.lanes) * cpu.lanes


def _first_cycles(conv: Conv2d, tile: RegisterTile, rows: int, resident: int, cpu: CpuTarget) -> float:
    """Cycles of ``rows`` rows in between, all their channel blocks; ``resident`` bytes are used before its weights are
    read again.
    """
    depth, groups = _depth(conv), -(-blocks(conv.out_channels, cpu.lanes) // tile.out_blocks)
    row_bytes = 4 * conv.in_channels * conv.width * conv.stride[0]
    weight_bytes = 4 * tile.out_blocks * cpu.lanes * depth
    one = dense_cycles(cpu, tile, conv.out_width, depth, data_bytes=row_bytes, weight_bytes=weight_bytes)
    step = groups * (rows * one + exposed_traffic(cpu, rows * row_bytes, rows * row_bytes))
    return step + _exposed_weights(conv, resident, cpu) + exposed_traffic(cpu, resident, resident)


def _last_cycles(conv: Conv2d, tile: RegisterTile, rows: int, resident: int, cpu: CpuTarget) -> float:
    """Cycles of ``rows`` output rows from ``resident`` bytes of rows in between."""
    count = blocks(conv.out_channels, cpu.lanes)
    if conv.is_depthwise:
        return count * depthwise_cycles(conv, tile.columns, rows) + exposed_traffic(cpu, resident, resident)
    depth, groups = _depth(conv), -(-count // tile.out_blocks)
    weight_bytes = 4 * tile.out_blocks * cpu.lanes * depth
    if conv.is_pointwise:
        pixels = rows * conv.width
        one = dense_cycles(cpu, tile, pixels, depth, data_bytes=resident, weight_bytes=weight_bytes)
        return groups * one + _exposed_weights(conv, resident, cpu)
    row_bytes = 4 * conv.in_channels * conv.width * conv.stride[0]
    one = dense_cycles(cpu, tile, conv.out_width, depth, data_bytes=row_bytes, weight_bytes=weight_bytes)
    return groups * (rows * one + exposed_traffic(cpu, resident, resident)) + _exposed_weights(conv, resident, cpu)


def _exposed_weights(conv: Conv2d, resident: int, cpu: CpuTarget) -> float:
    """Every step passes over all weights once more."""
    size = 4 * blocks(conv.out_channels, cpu.lanes) * cpu.lanes * _depth(conv)
    return exposed_traffic(cpu, size, size + resident)


def _depth(conv: Conv2d) -> int:
    return conv.in_channels * conv.kernel[0] * conv.kernel[1]


def _candidates(fused: FusedConvs, cpu: CpuTarget) -> Iterator[Config]:
    first, last = fused.convs
    height = last.out_height
    for rows in _fitting_rows(fused, cpu):
        splits = [
            row_tasks
            for _, row_tasks in task_splits(1, -(-height // rows), cpu, is_small(fused.flops))
            if RowWindow(last, rows, row_tasks).steps * rows <= height and _worth(fused, rows, row_tasks, cpu)
        ]
        resident = _resident_bytes(fused, rows, cpu)
        new_rows = min(first.out_height, rows * last.stride[0])
        shapes = register_tiles(blocks(first.out_channels, cpu.lanes), first.out_width, cpu, most=6)
        firsts = _cheapest(shapes, partial(_first_cycles, first, rows=new_rows, resident=resident, cpu=cpu))
        lasts = _cheapest(
            _last_shapes(last, rows, cpu), partial(_last_cycles, last, rows=rows, resident=resident, cpu=cpu)
        )
        for one, other, unroll, row_tasks in product(firsts, lasts, (1, 2, 4), splits):
            yield ConvPairKnobs(*one, *other, unroll, rows, row_tasks)._asdict()


def _last_shapes(conv: Conv2d, rows: int, cpu: CpuTarget) -> list[tuple[int, int]]:
    if conv.is_depthwise:
        return [(1, width) for width in depthwise_widths(conv, cpu)[-2:]]
    columns = rows * conv.width if conv.is_pointwise else conv.out_width
    return register_tiles(blocks(conv.out_channels, cpu.lanes), columns, cpu, most=6)


def _cheapest(shapes: Sequence[tuple[int, int]], cycles: Callable[[RegisterTile], float]) -> list[tuple[int, int]]:
    """The few register tiles of least ``cycles``; equals in their order."""
    return sorted(shapes, key=lambda shape: cycles(RegisterTile(*shape, 2)))[:_TILES]


def _worth(fused: FusedConvs, rows: int, row_tasks: int, cpu: CpuTarget) -> bool:
    """Whether the tasks compute few rows twice; as many tasks as threads are always worth it."""
    first, last = fused.convs
    computed = row_tasks * source_rows(last, RowWindow(last, rows, row_tasks).steps * rows)
    return row_tasks <= cpu.threads or computed <= _MOST_RECOMPUTATION * first.out_height


def _fitting_rows(fused: FusedConvs, cpu: CpuTarget) -> list[int]:
    """Rows of a step whose rows in between stay in half of L2; at least the smallest."""
    steps = [rows for rows in (1, 2, 3, 4, 7, 8, 14) if rows <= fused.convs[1].out_height]
    return [rows for rows in steps if _resident_bytes(fused, rows, cpu) <= cpu.l2_bytes // 2] or steps[:1]


def _one_row_at_a_time(fused: FusedConvs, cpu: CpuTarget) -> ConvPairKnobs:
    """By a single task: walks down any image."""
    first, last = fused.convs
    columns = depthwise_widths(last, cpu)[0] if last.is_depthwise else min(8, last.out_width)
    return ConvPairKnobs(1, min(8, first.out_width), 1, columns, unroll=2, rows=1, row_tasks=1)
