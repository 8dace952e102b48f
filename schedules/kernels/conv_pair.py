"""Fused pairs with a dense k x k convolution, on a window of rows that slides down the image.

k x k -> 1x1 (bottlenecks, detection heads), 1x1 -> k x k (bottlenecks, fire modules), k x k -> k x k (basic blocks,
U-Nets, stems) and k x k -> depthwise (stems). A task computes its rows of the output from top to bottom; the
intermediate rows that the second convolution still needs stay in a ring buffer of the task with all their channels, so
each is computed once, except for the halo between two tasks. Either all layers are direct sums, or all that can use
Winograd's algorithm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.cpu.fused_tile import middle_dtype
from costmodel.cpu.winograd_work import OUTPUTS
from costmodel.operators.layers import Conv2d, FusedConvs, Operator, element_bytes
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Template, tensor_dtype
from schedules.kernels.conv_algorithms import ConvAlgorithms
from schedules.kernels.depthwise_conv2d import DepthwiseConv2d
from schedules.kernels.direct_conv2d import DirectConv2d
from schedules.kernels.fused_chain import ChainInput, FusedTemplate, is_matrix, split_arguments
from schedules.kernels.pair_layers import FirstLayer, LastLayer, has_winograd
from schedules.kernels.pointwise_kernel import Pointwise
from schedules.kernels.winograd_conv2d import WINOGRAD_OUTPUTS, WinogradConv2d
from schedules.loops import emit
from schedules.loops.emit import Expr
from schedules.loops.issue_slots import parallel_cycles
from schedules.loops.loop_nests import task_index
from schedules.loops.register_tiling import RegisterTile, depthwise_widths, window_unrolls
from schedules.loops.row_window import RowWindow, source_rows
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits
from schedules.loops.winograd_transforms import relative_rounding

# Register tiles of a layer, the cheapest by its own cycles, that are combined with those of the other layer.
_TILES = 6
# Output rows of a step.
_ROWS = (1, 2, 3, 4, 7, 8, 12, 14, 16)
# Winograd tiles that are transformed together: all of a step (0), or one or half of the widest register tile.
_BLOCK_TILES = (0, 28, 14)
# Limit of intermediate rows computed relative to rows that exist; splits into more tasks are not worth measuring.
_MOST_RECOMPUTATION = 1.6


class ConvPairKnobs(NamedTuple):
    """Knobs of a pair."""

    # Register tile of the first convolution: ``middle_blocks`` x ``middle_columns``.
    middle_blocks: int
    middle_columns: int
    # Register tile of the last convolution: ``out_blocks`` (1 for depthwise) x ``columns``.
    out_blocks: int
    columns: int
    # Unrolling of both.
    unroll: int
    # Output rows of a step.
    rows: int
    # Parallel tasks.
    row_tasks: int
    # Outputs along each side of a Winograd tile; 0: direct sums.
    winograd_outputs: int = 0
    # Limit of Winograd tiles that go through the steps of the algorithm together; 0: all of a step.
    block_tiles: int = 0

    @property
    def config(self) -> Config:
        """Knobs that the algorithm has."""
        last = len(self) if self.winograd_outputs else self._fields.index(WINOGRAD_OUTPUTS)
        return dict(zip(self._fields[:last], self[:last], strict=True))

    @property
    def tiles(self) -> tuple[RegisterTile, RegisterTile]:
        """Register tiles of the first and of the last convolution."""
        return (
            RegisterTile(self.middle_blocks, self.middle_columns, self.unroll),
            RegisterTile(self.out_blocks, self.columns, self.unroll),
        )


class ConvPair(FusedTemplate):
    """Pair of convolutions; each step computes the new intermediate rows with all their channels, then ``rows`` output
    rows.

    ``kind``: of the chain; ``outputs`` along each side of a Winograd tile, 0 for direct sums everywhere.
    """

    def __init__(self, kind: str, outputs: int = 0) -> None:
        self.kind = kind
        self.outputs = outputs
        self.family = f"{kind}-winograd-{outputs}x{outputs}" if outputs else kind

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        if not isinstance(operator, FusedConvs) or operator.kind != self.kind:
            return False
        if self.outputs and not any(has_winograd(conv, self.outputs, cpu.lanes) for conv in operator.convs):
            return False
        return self._least_rows(operator, cpu) is not None

    def layer_templates(self, operator: FusedConvs, cpu: CpuTarget) -> list[Template]:
        first, last = operator.convs
        own: list[Template] = [Pointwise() if is_matrix(first, cpu.lanes) else DirectConv2d()]
        if last.is_depthwise:
            own.append(DepthwiseConv2d())
        else:
            own.append(Pointwise() if last.is_pointwise else DirectConv2d(inside_chain=True))
        fast = [has_winograd(conv, self.outputs, cpu.lanes) for conv in operator.convs]
        return [WinogradConv2d(self.outputs) if each else direct for each, direct in zip(fast, own, strict=True)]

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        found = cheapest_first(self._candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))
        return found or (self._smallest(operator, cpu),)

    def cost(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> float:
        last, knobs = operator.convs[1], ConvPairKnobs(**config)
        window = RowWindow(last, knobs.rows, knobs.row_tasks)
        one, other = self._layers(operator, knobs, cpu)
        resident, new_rows = _resident_bytes(operator, knobs.rows, cpu), _new_rows(operator, knobs.rows)
        # Steps of the first layer, including the halo of a task.
        opening = source_rows(last, window.steps * knobs.rows) / new_rows
        cycles = opening * one.cycles(cpu, new_rows, resident) + window.steps * other.cycles(cpu, knobs.rows, resident)
        return parallel_cycles(cpu, operator.batch * window.tasks, cycles)

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        (first, last), lanes, knobs = operator.convs, cpu.lanes, ConvPairKnobs(**config)
        window = RowWindow(last, knobs.rows, knobs.row_tasks)
        one, other = self._layers(operator, knobs, cpu)
        width, tiles = first.out_width, (one.block(one.outputs), other.block(knobs.rows))

        def body(*buffers: Any) -> None:
            data, layers, residual, output = split_arguments(operator, buffers)
            with emit.tasks(operator.batch * window.tasks) as task:
                image, row_task = task_index(task, operator.batch, window.tasks)
                pixels = _resident_rows(last, knobs.rows) * width
                middle = T.alloc_buffer((one.groups.extent, pixels + 1, lanes), tensor_dtype(middle_dtype(last)))
                source = ChainInput(first, data, lanes)
                transformed = [None if each is None else each.allocate() for each in tiles]
                with emit.loop(window.steps) as step:
                    first_row = window.first_row(row_task, step)
                    new_rows = window.new_sources(first_row, step)

                    def position(row: Expr) -> Expr:
                        # A 1x1 keeps no rows: those of a step are stored one after the other.
                        return (row - first_row if last.is_pointwise else window.slot(row)) * width

                    one.rows(layers[0], transformed[0], source, image, new_rows, middle, position)
                    other.rows(
                        layers[1], transformed[1], knobs.rows, image, first_row, middle, position, residual, output
                    )

        return emit.kernel("conv_pair", self.signature(operator, cpu), body)

    def relative_rounding(self, config: Config) -> float:
        return relative_rounding(self.outputs) if self.outputs else 1.0

    def _layers(self, fused: FusedConvs, knobs: ConvPairKnobs, cpu: CpuTarget) -> tuple[FirstLayer, LastLayer]:
        (first, last), (one, other) = fused.convs, knobs.tiles
        outputs = [self.outputs if has_winograd(conv, self.outputs, cpu.lanes) else 0 for conv in fused.convs]
        return (
            FirstLayer(first, one, outputs[0], cpu.lanes, knobs.block_tiles),
            LastLayer(last, other, outputs[1], cpu.lanes, knobs.block_tiles),
        )

    def _candidates(self, fused: FusedConvs, cpu: CpuTarget) -> Iterator[Config]:
        last = fused.convs[1]
        height = last.out_height
        for rows, block_tiles in product(self._fitting_rows(fused, cpu), _BLOCK_TILES if self.outputs else (0,)):
            resident, new_rows = _resident_bytes(fused, rows, cpu), _new_rows(fused, rows)
            one, other = self._layers(fused, _any_tiles(rows, self.outputs, block_tiles), cpu)
            firsts = _cheapest(one, one.shapes(cpu), cpu, new_rows, resident)
            lasts = _cheapest(other, other.shapes(cpu, rows), cpu, rows, resident)
            splits = [
                row_tasks
                for _, row_tasks in task_splits(1, -(-height // rows), cpu, is_small(fused.flops))
                if RowWindow(last, rows, row_tasks).steps * rows <= height and _worth(fused, rows, row_tasks, cpu)
            ]
            widest = max(conv.kernel[1] for conv in fused.convs)
            unrolls = [4] if one.outputs and other.outputs else window_unrolls(widest, (1, 2, 4))
            for tiles, unroll, row_tasks in product(product(firsts, lasts), unrolls, splits):
                yield ConvPairKnobs(*tiles[0], *tiles[1], unroll, rows, row_tasks, self.outputs, block_tiles).config

    def _fitting_rows(self, fused: FusedConvs, cpu: CpuTarget) -> list[int]:
        """Return step sizes for which intermediate rows, and Winograd tiles if any, stay in half of L2; at least the
        smallest.
        """
        steps = [rows for rows in _ROWS if self._divides(fused, rows, cpu)]
        return [rows for rows in steps if self._held_bytes(fused, rows, cpu) <= cpu.l2_bytes // 2] or steps[:1]

    def _divides(self, fused: FusedConvs, rows: int, cpu: CpuTarget) -> bool:
        """True if the rows of a step are whole bands of Winograd tiles, and the buffer holds a band."""
        last = fused.convs[1]
        one, other = self._layers(fused, _any_tiles(rows, self.outputs), cpu)
        whole = rows % (other.outputs or 1) == 0 and rows * last.stride[0] % (one.outputs or 1) == 0
        return rows <= last.out_height and whole and _resident_rows(last, rows) >= one.outputs

    def _least_rows(self, fused: FusedConvs, cpu: CpuTarget) -> int | None:
        return next((rows for rows in _ROWS if self._divides(fused, rows, cpu)), None)

    def _held_bytes(self, fused: FusedConvs, rows: int, cpu: CpuTarget) -> int:
        one, other = self._layers(fused, _any_tiles(rows, self.outputs), cpu)
        tiles = max(one.transformed_bytes(one.outputs), other.transformed_bytes(rows))
        return _resident_bytes(fused, rows, cpu) + tiles

    def _smallest(self, fused: FusedConvs, cpu: CpuTarget) -> Config:
        """Return a configuration for any image: one block and the fewest rows at a time, one task per step."""
        first, last = fused.convs
        rows = self._least_rows(fused, cpu)
        assert rows is not None, "else it is not covered"
        one, other = self._layers(fused, _any_tiles(rows, self.outputs), cpu)
        widths = [
            min(8, conv.out_width if tiles is None else tiles.tiles)
            for conv, tiles in ((first, one.block(one.outputs)), (last, other.block(rows)))
        ]
        if last.is_depthwise:
            widths[1] = depthwise_widths(last, cpu)[0]
        tasks = -(-last.out_height // rows)
        return ConvPairKnobs(1, widths[0], 1, widths[1], 2, rows, tasks, self.outputs).config


def conv_pairs(kind: str) -> ConvAlgorithms:
    """Return the template of pairs of one ``kind`` with all algorithms."""
    return ConvAlgorithms(kind, ConvPair(kind), {outputs: ConvPair(kind, outputs) for outputs in OUTPUTS})


def _resident_rows(last: Conv2d, rows: int) -> int:
    """Return the number of intermediate rows that the buffer of a task holds."""
    return rows if last.is_pointwise else RowWindow(last, rows, 1).ring


def _resident_bytes(fused: FusedConvs, rows: int, cpu: CpuTarget) -> int:
    """Return the bytes of the buffer of intermediate rows."""
    first, last = fused.convs
    pixels = _resident_rows(last, rows) * first.out_width
    return element_bytes(middle_dtype(last)) * pixels * blocks(first.out_channels, cpu.lanes) * cpu.lanes


def _new_rows(fused: FusedConvs, rows: int) -> int:
    """Return the number of intermediate rows that a step adds."""
    first, last = fused.convs
    return min(first.out_height, rows * last.stride[0])


def _any_tiles(rows: int, outputs: int, block_tiles: int = 0) -> ConvPairKnobs:
    """Return knobs for quantities that do not depend on register tiles."""
    return ConvPairKnobs(1, 1, 1, 1, 4, rows, 1, outputs, block_tiles)


def _cheapest(
    layer: FirstLayer | LastLayer, shapes: Sequence[tuple[int, int]], cpu: CpuTarget, rows: int, resident: int
) -> list[tuple[int, int]]:
    """Return the ``_TILES`` register tiles of fewest cycles for ``layer``, in order; the sort is stable."""

    def cycles(shape: tuple[int, int]) -> float:
        return replace(layer, tile=RegisterTile(*shape, 4)).cycles(cpu, rows, resident)

    return sorted(shapes, key=cycles)[:_TILES]


def _worth(fused: FusedConvs, rows: int, row_tasks: int, cpu: CpuTarget) -> bool:
    """True if the tasks compute few rows twice; as many tasks as threads are always accepted."""
    first, last = fused.convs
    computed = row_tasks * source_rows(last, RowWindow(last, rows, row_tasks).steps * rows)
    return row_tasks <= cpu.threads or computed <= _MOST_RECOMPUTATION * first.out_height
