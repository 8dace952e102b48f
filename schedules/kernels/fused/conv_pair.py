"""Fused pairs with a dense k x k convolution, on a window of rows that slides down the image.

k x k -> 1x1 (bottlenecks, detection heads), 1x1 -> k x k (bottlenecks, fire modules), k x k -> k x k (basic blocks,
U-Nets, stems) and k x k -> depthwise (stems). A task processes its output rows from top to bottom; intermediate rows
needed again stay in a ring buffer of the task with all channels, so each is computed once, except for the halo between
two tasks. Either all layers are direct sums, or those that support it use Winograd's algorithm.

The buffer of rows between the layers is (channel blocks, pixels, V), in which a row begins at ``position(row)``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.cpu.core_work import OUTPUTS, winograd_applies
from costmodel.cpu.roofline import middle_dtype
from costmodel.operators.layers import Conv2d, FusedConvs, Operator, element_bytes
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Template, blocks, tensor_dtype
from schedules.kernels.algorithms import ConvAlgorithms
from schedules.kernels.depthwise_conv2d import DepthwiseConv2d
from schedules.kernels.direct_conv2d import DirectConv2d
from schedules.kernels.fused.fused_chain import (
    ChainInput,
    ChainLayer,
    FusedTemplate,
    conv_output_phase,
    is_matrix,
    pointwise_output_phase,
    split_arguments,
)
from schedules.kernels.pointwise_kernel import Pointwise
from schedules.kernels.winograd_conv2d import WINOGRAD_OUTPUTS, WinogradConv2d
from schedules.loops import emit
from schedules.loops.config_space import (
    RegisterTile,
    TapRow,
    cheapest_first,
    dense_cycles,
    depthwise_cycles,
    depthwise_widths,
    exposed_traffic,
    is_small,
    parallel_cycles,
    register_tiles,
    task_splits,
    window_unrolls,
)
from schedules.loops.emit import Expr
from schedules.loops.kernel_inputs import RowWindow, source_rows
from schedules.loops.loop_nests import TiledExtent, depthwise_phase, store_finished, task_index
from schedules.loops.winograd import WinogradBlock, WinogradBuffers, WinogradTiles, relative_rounding

Position = Callable[[Expr], Expr]


def has_winograd(conv: Conv2d, outputs: int, lanes: int) -> bool:
    """True if ``conv`` is computed in tiles of ``outputs`` x ``outputs`` (0: never): bands of tiles fit its rows."""
    return outputs > 0 and winograd_applies(conv, lanes) and conv.out_height >= outputs


@dataclass(frozen=True)
class PairLayer:
    """``conv`` with the register tile ``tile``."""

    conv: Conv2d
    tile: RegisterTile
    # Outputs along each side of a Winograd tile, 0 for direct sums.
    outputs: int
    lanes: int
    # Maximum number of Winograd tiles of a step that are transformed together, 0 for all.
    block_tiles: int = 0

    @property
    def groups(self) -> TiledExtent:
        """Its output blocks, all of which every task computes."""
        return TiledExtent(blocks(self.conv.out_channels, self.lanes), self.tile.out_blocks, 1)

    def block(self, rows: int) -> WinogradBlock | None:
        """Block of the Winograd tiles of ``rows`` rows, or None for direct sums."""
        if not self.outputs:
            return None
        return WinogradBlock(WinogradTiles(self.conv, self.outputs), self.tile, self.shares(rows).size, self.lanes)

    def shares(self, rows: int) -> TiledExtent:
        """Winograd tiles of ``rows`` rows in equal blocks."""
        count = rows // self.outputs * WinogradTiles(self.conv, self.outputs).columns
        parts = -(-count // (self.block_tiles or count))
        return TiledExtent(count, -(-count // parts), 1)

    def transformed_bytes(self, rows: int) -> int:
        """Bytes of the transformed input of these tiles; 0 for direct sums."""
        block = self.block(rows)
        count = 0 if block is None else block.tiles * block.grid.size**2
        return element_bytes("float32") * count * blocks(self.conv.in_channels, self.lanes) * self.lanes

    @property
    def _depth(self) -> int:
        return self.conv.in_channels * self.conv.kernel[0] * self.conv.kernel[1]

    @property
    def _row_bytes(self) -> int:
        return element_bytes(self.conv.dtype) * self.conv.in_channels * self.conv.width * self.conv.stride[0]

    @property
    def _group_bytes(self) -> int:
        return element_bytes(self.conv.dtype) * self.tile.out_blocks * self.lanes * self._depth

    def _exposed_weights(self, cpu: CpuTarget, resident: int) -> float:
        """Exposed cycles of passing over all weights again in every step."""
        size = blocks(self.conv.out_channels, self.lanes) * self.lanes * self._depth * element_bytes(self.conv.dtype)
        return exposed_traffic(cpu, size, size + resident)


class FirstLayer(PairLayer):
    """First layer, which fills rows of the buffer."""

    def rows(
        self,
        layer: ChainLayer,
        buffers: WinogradBuffers | None,
        source: ChainInput,
        image: Expr,
        new_rows: tuple[Expr, Expr],
        middle: Any,
        position: Position,
    ) -> None:
        """Emit rows [begin, end) of its output, all channel blocks."""
        conv, lanes = self.conv, self.lanes

        def keep(block: Expr, start: Expr, sums: Any) -> None:
            store_finished(middle, sums, (block, start), conv, lanes, channel=(layer.bias, block))

        if buffers is None:
            with emit.loop(self.groups.per_task) as group, emit.span(*new_rows) as row:
                start = emit.bind(position(row))
                source.row(
                    layer, self.tile, image, row, self.groups.start(0, group),
                    lambda block, column, sums: keep(block, start + column, sums),
                )  # fmt: skip
            return
        begin, end = new_rows
        tiles = self.block(self.outputs)
        assert tiles is not None, "buffers are allocated for its tiles"
        with emit.span(0, emit.quotient(end - begin + self.outputs - 1, self.outputs)) as band:
            # The last band is shifted to end with the rows: the overlap of two bands is computed twice.
            row = emit.bind(emit.larger(0, emit.smaller(begin + band * self.outputs, end - self.outputs)))
            shares = self.shares(self.outputs)
            with emit.loop(shares.per_task) as part:
                tile_0 = shares.start(0, part)
                tiles.emit(
                    buffers,
                    groups=self.groups,
                    channel_task=0,
                    place=lambda tile: (image, row, emit.bind((tile_0 + tile) * self.outputs)),
                    source=lambda n, block: lambda y, x: emit.load(source.data, n, block, y, x, lanes=lanes),
                    weight=layer.weight,
                    bias=layer.bias,
                    finish=lambda at, sums: keep(at[1], position(at[2]) + at[3], sums),
                )

    def shapes(self, cpu: CpuTarget) -> list[tuple[int, int]]:
        """Candidate register tiles."""
        block = self.block(self.outputs)
        columns = self.conv.out_width if block is None else block.tiles
        return register_tiles(self.groups.extent, columns, cpu, most=6)

    def cycles(self, cpu: CpuTarget, rows: int, resident: int) -> float:
        """Cycles of ``rows`` new rows; ``resident`` bytes are used before its weights are read again."""
        filling = exposed_traffic(cpu, resident, resident)
        block = self.block(self.outputs)
        if block is not None:
            parts = -(-rows // self.outputs) * self.shares(self.outputs).per_task
            return parts * block.cycles(cpu, self.groups.per_task, resident) + filling
        one = dense_cycles(
            cpu, self.tile, self.conv.out_width, self._depth,
            data_bytes=self._row_bytes, weight_bytes=self._group_bytes, dtype=self.conv.dtype,
            taps=TapRow.of(self.conv),
        )  # fmt: skip
        one += exposed_traffic(cpu, self._row_bytes, rows * self._row_bytes)
        return self.groups.per_task * rows * one + self._exposed_weights(cpu, resident) + filling


class LastLayer(PairLayer):
    """Last layer, which computes rows of the output from the buffer."""

    def rows(
        self,
        layer: ChainLayer,
        buffers: WinogradBuffers | None,
        rows: int,
        image: Expr,
        first_row: Expr,
        middle: Any,
        position: Position,
        residual: Any | None,
        output: Any,
    ) -> None:
        """Emit ``rows`` rows from ``first_row``, all output blocks, with the epilogue."""
        conv, lanes, tiles = self.conv, self.lanes, self.block(rows)
        if tiles is not None:
            assert buffers is not None, "buffers are allocated for its tiles"

            shares = self.shares(rows)

            def place(tile: Expr) -> tuple[Expr, Expr, Expr]:
                band, column = task_index(tile, rows // self.outputs, tiles.grid.columns)
                return image, emit.bind(first_row + band * self.outputs), emit.bind(column * self.outputs)

            def finish(at: tuple[Expr, ...], sums: Any) -> None:
                store_finished(output, sums, at, conv, lanes, residual, channel=(layer.bias, at[1]))

            with emit.loop(shares.per_task) as part:
                tile_0 = shares.start(0, part)
                tiles.emit(
                    buffers,
                    groups=self.groups,
                    channel_task=0,
                    place=lambda tile: place(tile_0 + tile),
                    source=lambda _, block: lambda y, x: emit.load(middle, block, position(y) + x, lanes=lanes),
                    weight=layer.weight,
                    bias=layer.bias,
                    finish=finish,
                )
        elif conv.is_pointwise:
            pointwise_output_phase(
                layer, self.tile, lanes, rows=rows, groups=self.groups, task=0, image=image, first_row=first_row,
                tile=middle, residual=residual, output=output,
            )  # fmt: skip
        elif conv.is_depthwise:
            self._depthwise_rows(layer, rows, image, first_row, middle, position, residual, output)
        else:
            conv_output_phase(
                layer, self.tile, lanes, rows=rows, groups=self.groups, image=image, first_row=first_row,
                tile=middle, position=position, residual=residual, output=output,
            )  # fmt: skip

    def _depthwise_rows(
        self,
        layer: ChainLayer,
        rows: int,
        image: Expr,
        first_row: Expr,
        middle: Any,
        position: Position,
        residual: Any | None,
        output: Any,
    ) -> None:
        conv, lanes = self.conv, self.lanes
        with emit.loop(self.groups.extent) as block:

            def sink(row: Expr, column: Expr, sums: Any) -> None:
                at = (image, block, first_row + row, column)
                store_finished(output, sums, at, conv, lanes, residual, channel=(layer.bias, block))

            depthwise_phase(
                conv, self.tile.columns, lanes, rows=rows, first_row=first_row, block=block,
                data=middle, at=lambda row, column: (block, position(row) + column),
                weight=layer.weight, bias=layer.bias, sink=sink,
            )  # fmt: skip

    def shapes(self, cpu: CpuTarget, rows: int) -> list[tuple[int, int]]:
        """Candidate register tiles for steps of ``rows`` rows."""
        conv, block = self.conv, self.block(rows)
        if conv.is_depthwise:
            return [(1, width) for width in depthwise_widths(conv, cpu)[-2:]]
        columns = rows * conv.width if conv.is_pointwise else conv.out_width
        return register_tiles(self.groups.extent, columns if block is None else block.tiles, cpu, most=6)

    def cycles(self, cpu: CpuTarget, rows: int, resident: int) -> float:
        """Cycles of a step of ``rows`` rows, which reads ``resident`` bytes of intermediate rows."""
        conv, groups, block = self.conv, self.groups, self.block(rows)
        if block is not None:
            return self.shares(rows).per_task * block.cycles(cpu, groups.per_task, resident)
        if conv.is_depthwise:
            return groups.extent * depthwise_cycles(
                conv, self.tile.columns, rows, source=middle_dtype(conv)
            ) + exposed_traffic(cpu, resident, resident)
        weights = self._exposed_weights(cpu, resident)
        if conv.is_pointwise:
            one = dense_cycles(
                cpu, self.tile, rows * conv.width, self._depth,
                data_bytes=resident, weight_bytes=self._group_bytes, dtype=conv.dtype,
            )  # fmt: skip
            return groups.per_task * one + weights
        row = dense_cycles(
            cpu, self.tile, conv.out_width, self._depth,
            data_bytes=self._row_bytes, weight_bytes=self._group_bytes, dtype=conv.dtype, taps=TapRow.of(conv),
        )  # fmt: skip
        return groups.per_task * (rows * row + exposed_traffic(cpu, resident, resident)) + weights


# Number of register tiles of a layer that are combined with those of the other: the cheapest by its own cycles.
_TILES = 6
# Output rows per step.
_ROWS = (1, 2, 3, 4, 7, 8, 12, 14, 16)
# Winograd tiles transformed together: all of a step, or one or half of the widest register tile.
_BLOCK_TILES = (0, 28, 14)
# Do not measure task splits with more computed intermediate rows than this multiple of the existing ones.
_MOST_RECOMPUTATION = 1.6


class ConvPairKnobs(NamedTuple):
    """Knobs of a fused pair."""

    # Register tile of the first convolution.
    middle_blocks: int
    middle_columns: int
    # Register tile of the last convolution; one block if it is depthwise.
    out_blocks: int
    columns: int
    # For both convolutions.
    unroll: int
    # Output rows of a step.
    rows: int
    # Number of parallel tasks.
    row_tasks: int
    # Outputs along each side of a Winograd tile, 0 for direct sums.
    winograd_outputs: int = 0
    # Maximum number of Winograd tiles transformed together (0: all of a step).
    block_tiles: int = 0

    @property
    def config(self) -> Config:
        """Knobs that the algorithm uses."""
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
    """Per step of ``rows`` output rows: compute new intermediate rows with all channels, then the output.

    ``kind``: kind of the chain; ``outputs`` along each side of a Winograd tile, 0 for direct sums.
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
                        # A 1x1 keeps no rows: those of a step are consecutive.
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
        """Rows per step with intermediate rows and Winograd tiles within half of L2; at least the smallest number."""
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
        """Configuration that fits any image: one block, the fewest rows per step, and a task per step."""
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
    """Pairs of one ``kind`` by every algorithm."""
    return ConvAlgorithms(kind, ConvPair(kind), {outputs: ConvPair(kind, outputs) for outputs in OUTPUTS})


def _resident_rows(last: Conv2d, rows: int) -> int:
    """Number of intermediate rows in the buffer of a task."""
    return rows if last.is_pointwise else RowWindow(last, rows, 1).ring


def _resident_bytes(fused: FusedConvs, rows: int, cpu: CpuTarget) -> int:
    """Size of that buffer in bytes."""
    first, last = fused.convs
    pixels = _resident_rows(last, rows) * first.out_width
    return element_bytes(middle_dtype(last)) * pixels * blocks(first.out_channels, cpu.lanes) * cpu.lanes


def _new_rows(fused: FusedConvs, rows: int) -> int:
    """Number of intermediate rows added by a step."""
    first, last = fused.convs
    return min(first.out_height, rows * last.stride[0])


def _any_tiles(rows: int, outputs: int, block_tiles: int = 0) -> ConvPairKnobs:
    """Knobs for computations that do not depend on register tiles."""
    return ConvPairKnobs(1, 1, 1, 1, 4, rows, 1, outputs, block_tiles)


def _cheapest(
    layer: FirstLayer | LastLayer, shapes: Sequence[tuple[int, int]], cpu: CpuTarget, rows: int, resident: int
) -> list[tuple[int, int]]:
    """The few register tiles with the fewest cycles for ``layer``, with stable order."""

    def cycles(shape: tuple[int, int]) -> float:
        return replace(layer, tile=RegisterTile(*shape, 4)).cycles(cpu, rows, resident)

    return sorted(shapes, key=cycles)[:_TILES]


def _worth(fused: FusedConvs, rows: int, row_tasks: int, cpu: CpuTarget) -> bool:
    """True if the tasks compute few rows twice, or if there are no more tasks than threads."""
    first, last = fused.convs
    computed = row_tasks * source_rows(last, RowWindow(last, rows, row_tasks).steps * rows)
    return row_tasks <= cpu.threads or computed <= _MOST_RECOMPUTATION * first.out_height
