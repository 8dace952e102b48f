"""Convolutions by Winograd's minimal filtering: 3x3 with stride 1, and long windows along one axis.

**3x3** (``WinogradConv2d``) is a matrix product over the channels at each of the n * n positions of a transformed tile,
for m * m outputs with n = m + 2. A block of tiles goes through all three steps on one core, so that transformed data
stay in its caches (Jia et al., PPoPP 2018). Lanes are channels in every step, so that the transforms are vector
additions.

**Along one axis** (``LineWinograd``) a window of many taps is split into pieces of r taps. r outputs of a piece need
2 r - 1 products instead of r * r. Pieces have the same distance as tiles of outputs, so that the transform for one
piece is reused by all others: the products at each of the 2 r - 1 positions are a convolution of tiles, whose window
has one tap per piece. A stride along the axis splits the input into phases: more channels with a shorter window, by
the same factor. Lanes are output channels in the products, and input channels in the transforms (unused for plain
input).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache, partial
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.cpu.core_work import TAPS, Lines, winograd_applies
from costmodel.operators.layers import Conv2d, Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.operator_reference import rounded_to
from schedules.contract.template import Config, Parameters, Signature, Template, blocks
from schedules.kernels.direct_conv2d import reads_plain_input
from schedules.kernels.pointwise_kernel import conv_buffers, conv_signature
from schedules.loops import emit
from schedules.loops.config_space import (
    PORTS,
    TILE_CYCLES,
    RegisterTile,
    cheapest_first,
    dense_cycles,
    exposed_traffic,
    is_small,
    parallel_cycles,
    register_tiles,
    task_splits,
    window_unrolls,
)
from schedules.loops.dot_products import FLOAT32
from schedules.loops.emit import Expr
from schedules.loops.kernel_inputs import PreparedInput
from schedules.loops.loop_nests import TiledExtent, last_lanes, store_finished, task_index
from schedules.loops.register_kernels import DenseTile
from schedules.loops.weight_packing import pack_channel_constants, pack_conv, pack_plain_input, pack_prologue
from schedules.loops.winograd import (
    WinogradBlock,
    WinogradMatrices,
    WinogradTiles,
    combination,
    relative_rounding,
    toom_cook,
    transformed_weight,
)

# Knob of this algorithm only.
WINOGRAD_OUTPUTS = "winograd_outputs"
_UNROLL = 4
# Maximum share of L2 for the transformed input of a block of tiles: the weights stream through the rest.
_L2_SHARE = 0.6


class WinogradKnobs(NamedTuple):
    """Knobs of the algorithm."""

    # Outputs along each side of a tile.
    winograd_outputs: int
    # Register tile of the products: ``out_blocks`` x ``columns``.
    out_blocks: int
    columns: int
    # Tiles of a block.
    tiles: int
    # Parallel tasks: ``channel_tasks`` x ``tile_tasks``.
    channel_tasks: int
    tile_tasks: int

    @property
    def tile(self) -> RegisterTile:
        return RegisterTile(self.out_blocks, self.columns, _UNROLL)


class WinogradConv2d(Template):
    """Tasks of output blocks x tiles of ``outputs`` x ``outputs``.

    bfloat16 data are widened when read; transformed weights and tiles are float32.
    """

    def __init__(self, outputs: int) -> None:
        self.outputs = outputs
        self.family = f"winograd-{outputs}x{outputs}"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return isinstance(operator, Conv2d) and winograd_applies(operator, cpu.lanes)

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        lanes, points = cpu.lanes, self._positions
        weight_shape = (blocks(operator.out_channels, lanes), points, operator.in_channels, lanes)
        return conv_signature(operator, lanes, weight_shape, weight_dtype="float32")

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(self._candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        conv, knobs = operator, WinogradKnobs(**config)
        groups, tiles = self._extents(conv, knobs, cpu)
        block = self._block(conv, knobs, cpu).cycles(cpu, groups.per_task)
        return parallel_cycles(cpu, groups.tasks * tiles.tasks, tiles.per_task * block)

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,), lanes = parameters, cpu.lanes
        count = blocks(operator.out_channels, lanes)
        padded = np.zeros((count * lanes, operator.in_channels, self._positions), np.float32)
        padded[: operator.out_channels] = transformed_weight(rounded_to(layer.weight, operator.dtype), self.outputs)
        packed = padded.reshape(count, lanes, operator.in_channels, self._positions).transpose(0, 3, 2, 1)
        constants = [pack_channel_constants(operator, layer, lanes), *pack_prologue(operator, layer, lanes)]
        return [np.ascontiguousarray(packed), *constants]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, WinogradKnobs(**config)
        groups, tiles = self._extents(conv, knobs, cpu)
        block = self._block(conv, knobs, cpu)

        def body(*arguments: Any) -> None:
            data, _, weight, bias, prologue, residual, output = conv_buffers(conv, arguments)
            source = PreparedInput(conv, data, None, prologue, lanes)
            with emit.tasks(groups.tasks * tiles.tasks) as task:
                channel_task, tile_task = task_index(task, groups.tasks, tiles.tasks)
                buffers = block.allocate()
                with emit.loop(tiles.per_task) as index:
                    first = tiles.start(tile_task, index)

                    def finish(at: tuple[Expr, ...], value: Any) -> None:
                        store_finished(output, value, at, conv, lanes, residual, (bias, at[1]))

                    block.emit(
                        buffers,
                        groups=groups,
                        channel_task=channel_task,
                        place=lambda tile: block.grid.place(first + tile),
                        source=source.block,
                        weight=weight,
                        bias=bias,
                        finish=finish,
                    )

        return emit.kernel("winograd_conv2d", self.signature(conv, cpu), body)

    def relative_rounding(self, config: Config) -> float:
        return relative_rounding(self.outputs)

    @property
    def _positions(self) -> int:
        return (self.outputs + TAPS - 1) ** 2

    def _block(self, conv: Conv2d, knobs: WinogradKnobs, cpu: CpuTarget) -> WinogradBlock:
        return WinogradBlock(WinogradTiles(conv, self.outputs), knobs.tile, knobs.tiles, cpu.lanes)

    def _extents(self, conv: Conv2d, knobs: WinogradKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
        """Output blocks and tiles, each distributed over tasks."""
        return (
            TiledExtent(blocks(conv.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
            TiledExtent(WinogradTiles(conv, self.outputs).count, knobs.tiles, knobs.tile_tasks),
        )

    def _candidates(self, conv: Conv2d, cpu: CpuTarget) -> Iterator[Config]:
        count, total = blocks(conv.out_channels, cpu.lanes), WinogradTiles(conv, self.outputs).count
        bytes_of_tile = 4 * self._positions * blocks(conv.in_channels, cpu.lanes) * cpu.lanes
        fitting = max(1, int(_L2_SHARE * cpu.l2_bytes) // bytes_of_tile)
        for tiles in _block_sizes(total, fitting):
            for size, width in register_tiles(count, tiles, cpu):
                groups, tile_blocks = -(-count // size), -(-total // tiles)
                for channel_tasks, tile_tasks in task_splits(groups, tile_blocks, cpu, is_small(conv.flops)):
                    yield WinogradKnobs(self.outputs, size, width, tiles, channel_tasks, tile_tasks)._asdict()


def _block_sizes(total: int, fitting: int) -> list[int]:
    """Tiles of a block: as many as fit into L2, halves of it, and equal parts near these sizes."""
    found = set()
    size = min(total, fitting)
    while size >= 1:
        found |= {size, -(-total // -(-total // size))}
        if size < 8:
            break
        size //= 2
    return sorted(found)


# Knobs of this algorithm only: taps of a piece, and the axis (0: rows, 1: columns) along which the pieces lie.
PIECE_TAPS, LINE_AXIS = "piece_taps", "line_axis"
# Finite points by the taps of a piece. RMS error over many channels relative to direct sums: 1.1 and 1.9; the smallest
# among multiples of 1/8 and 1/3 between 1/4 and 3.
_POINTS = {3: (0.0, 0.625, -1.0, 1.75), 4: (0.0, 1.0, -1.0, 2.0, -2.0, 0.375)}
# Unrolled steps of the sums.
_UNROLLS = (4, 8)


class LineWinogradKnobs(NamedTuple):
    """Knobs of the algorithm."""

    # Taps of a piece.
    piece_taps: int
    # Axis along which the pieces lie.
    line_axis: int
    # Register tile of the products: ``out_blocks`` x ``columns``.
    out_blocks: int
    columns: int
    unroll: int
    # Block of the output: ``lines`` x ``tiles``.
    lines: int
    tiles: int
    # Parallel tasks: ``channel_tasks`` x ``line_tasks`` x ``tile_tasks``.
    channel_tasks: int
    line_tasks: int
    tile_tasks: int

    @property
    def tile(self) -> RegisterTile:
        return RegisterTile(self.out_blocks, self.columns, self.unroll)


@lru_cache
def piece_matrices(taps: int) -> WinogradMatrices:
    """Transform matrices for as many outputs as taps."""
    return toom_cook(_POINTS[taps], taps, taps)


class LineWinograd(Template):
    """Tasks of output blocks x blocks of lines x tiles; each block is transformed, multiplied and transformed back."""

    def __init__(self, taps: int, axis: int) -> None:
        self.taps, self.axis = taps, axis
        self.family = f"line-winograd-{taps}-{'rows' if axis == 0 else 'columns'}"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return isinstance(operator, Conv2d) and self._lines(operator).applies

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        plain = reads_plain_input(operator, cpu.lanes)
        count, lines, lanes = blocks(operator.out_channels, cpu.lanes), self._lines(operator), cpu.lanes
        inputs = (operator.in_channels,) if plain else (blocks(operator.in_channels, lanes),)
        shape = (count, lines.positions, *inputs, *lines.window.kernel, *(() if plain else (lanes,)), lanes)
        return conv_signature(operator, lanes, shape, plain_input=plain)

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(self._candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        conv, knobs, lines = operator, LineWinogradKnobs(**config), self._lines(operator)
        groups, bands, runs = _extents(lines, knobs, cpu)
        matrices, vector = piece_matrices(self.taps), 4 * cpu.lanes
        plain = reads_plain_input(conv, cpu.lanes)
        width = 1 if plain else cpu.lanes
        read = blocks(conv.in_channels, width) * lines.phases * lines.source_lines(knobs.lines)
        read *= knobs.tiles + lines.pieces - 1
        inputs = 4 * width * read * lines.positions
        steps = lines.steps
        sums = vector * knobs.lines * knobs.tiles * knobs.out_blocks * lines.positions
        weights = vector * steps * knobs.out_blocks
        into, out_of = (np.count_nonzero(matrix) / PORTS for matrix in (matrices.input, matrices.output))
        transform = read * (into + 2 * lines.positions) + exposed_traffic(cpu, inputs, inputs)
        tiles = knobs.lines * knobs.tiles * knobs.out_blocks
        finish = tiles * (out_of + lines.positions + self.taps + TILE_CYCLES) + exposed_traffic(cpu, sums, sums)
        one = knobs.lines * dense_cycles(
            cpu, knobs.tile, knobs.tiles, steps,
            data_bytes=inputs / lines.positions / knobs.lines, weight_bytes=weights,
        )  # fmt: skip
        one += exposed_traffic(cpu, weights, weights * lines.positions * groups.per_task + inputs + sums)
        block = transform + groups.per_task * (lines.positions * one + finish)
        tasks = conv.batch * groups.tasks * bands.tasks * runs.tasks
        return parallel_cycles(cpu, tasks, bands.per_task * runs.per_task * block)

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,), lines, lanes = parameters, self._lines(operator), cpu.lanes
        # (O, I, taps across, taps along), the last padded to whole pieces of every phase.
        along = np.moveaxis(layer.weight.astype(np.float64), 2 + self.axis, 3)
        padded = np.zeros((*along.shape[:3], lines.pieces * self.taps * lines.phases))
        padded[..., : along.shape[3]] = along
        pieces = padded.reshape(*along.shape[:3], lines.pieces, self.taps, lines.phases)
        transformed = np.einsum("pt,oisgtf->poisgf", piece_matrices(self.taps).weight, pieces)
        window, pack = lines.window, pack_plain_input if reads_plain_input(operator, lanes) else pack_conv
        shape = (operator.out_channels, operator.in_channels, *window.kernel)
        packed = [pack(window, each.reshape(shape).astype(np.float32), lanes) for each in transformed]
        return [np.ascontiguousarray(np.stack(packed, axis=1)), pack_channel_constants(operator, layer, lanes)]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs, lines = operator, cpu.lanes, LineWinogradKnobs(**config), self._lines(operator)
        groups, bands, runs = _extents(lines, knobs, cpu)
        plain = reads_plain_input(conv, lanes)

        def body(*arguments: Any) -> None:
            data, _, weight, bias, _, residual, output = conv_buffers(conv, arguments)
            with emit.tasks(conv.batch * groups.tasks * bands.tasks * runs.tasks) as task:
                image, channel_task, line_task, tile_task = task_index(
                    task, conv.batch, groups.tasks, bands.tasks, runs.tasks
                )
                block = _Block(lines, knobs, lanes, 1 if plain else lanes)
                with emit.loop(bands.per_task) as band, emit.loop(runs.per_task) as run:
                    block.first_line, block.first_tile = bands.start(line_task, band), runs.start(tile_task, run)
                    block.fill(lambda channel, row, column: _pixel(data, image, channel, row, column, plain, lanes))
                    with emit.loop(groups.per_task) as group:
                        first_block = groups.start(channel_task, group)
                        block.multiply(weight, first_block)

                        def finish(out_block: Any, row: Any, column: Any, sums: Any) -> None:
                            value = T.bind(sums + emit.load(bias, out_block, lanes=lanes))
                            at = (image, out_block, row, column)
                            store_finished(output, [value], at, conv, lanes, residual, channel=(bias, out_block))

                        block.write(first_block, finish)

        return emit.kernel("line_winograd", self.signature(conv, cpu), body)

    def relative_rounding(self, config: Config) -> float:
        """Estimate from the norms of the matrices, see
        :func:`schedules.loops.winograd.relative_rounding`.
        """
        inputs, weights, sums = (matrix**2 for matrix in piece_matrices(self.taps))
        return float((sums @ (weights.sum(axis=1) * inputs.sum(axis=1))).mean()) ** 0.5 / self.taps

    def _lines(self, conv: Conv2d) -> Lines:
        return Lines(conv, self.taps, self.axis)

    def _candidates(self, conv: Conv2d, cpu: CpuTarget) -> Iterator[Config]:
        lines, count = self._lines(conv), blocks(conv.out_channels, cpu.lanes)
        plain = reads_plain_input(conv, cpu.lanes)
        vector = 4 if plain else 4 * cpu.lanes
        of_tile = lines.positions * lines.phases * (conv.in_channels if plain else blocks(conv.in_channels, cpu.lanes))
        outputs = 4 * cpu.lanes * lines.positions
        for rows, tiles in product(_line_counts(lines.outputs[1]), _tile_counts(lines.tiles)):
            held = vector * of_tile * lines.source_lines(rows) * (tiles + lines.pieces - 1) + outputs * rows * tiles
            if held > _L2_SHARE * cpu.l2_bytes and (rows, tiles) != (1, min(_tile_counts(lines.tiles))):
                continue
            shapes = product(register_tiles(count, tiles, cpu), window_unrolls(lines.phases, _UNROLLS))
            for (size, width), unroll in shapes:
                groups, units = -(-count // size), -(-lines.outputs[1] // rows)
                runs = -(-lines.tiles // tiles)
                for channel_tasks, others in task_splits(groups, units * runs, cpu, is_small(conv.flops)):
                    for line_tasks, tile_tasks in _split(others, units, runs):
                        yield LineWinogradKnobs(
                            self.taps, self.axis, size, width, unroll, rows, tiles,
                            channel_tasks, line_tasks, tile_tasks,
                        )._asdict()  # fmt: skip


class _Block:
    """Block of ``lines`` x ``tiles`` of one task: its transformed input and its products."""

    def __init__(self, lines: Lines, knobs: LineWinogradKnobs, lanes: int, width: int) -> None:
        """``width``: lanes of the input, 1 for a plain one."""
        self._lines, self._knobs, self._lanes, self._width = lines, knobs, lanes, width
        self._channels = blocks(lines.conv.in_channels, width)
        self._sources = lines.source_lines(knobs.lines)
        self._reach = knobs.tiles + lines.pieces - 1
        pixels = (self._channels, lines.phases, self._sources, self._reach)
        # An odd number of lines between two positions, so that they fall into different cache sets.
        self._inputs = T.alloc_buffer((lines.positions, (int(np.prod(pixels)) + 1) | 1, width), "float32")
        self._sums = T.alloc_buffer((knobs.out_blocks, knobs.lines, knobs.tiles, lines.positions | 1, lanes), "float32")
        self._border = T.alloc_buffer((lines.positions, width), "float32")
        self.first_line: Expr = 0
        self.first_tile: Expr = 0

    def _place(self, channel: Expr, phase: Expr, line: Expr, tile: Expr) -> Expr:
        return ((channel * self._lines.phases + phase) * self._sources + line) * self._reach + tile

    def fill(self, pixel: Callable[[Expr, Expr, Expr], Any]) -> None:
        """Transform the input of the block; ``pixel(channel block, row, column)`` loads from the input."""
        lines, conv = self._lines, self._lines.conv
        axis, phases, width = lines.axis, lines.phases, self._width
        size = (conv.height, conv.width)
        matrix = piece_matrices(lines.taps).input
        top = emit.bind(self.first_line * conv.stride[1 - axis] - conv.padding[1 - axis])
        with (
            emit.loop(self._channels) as channel,
            emit.loop(self._sources) as line,
            emit.loop(phases) as phase,
            emit.loop(self._reach) as tile,
        ):
            across = emit.bind(top + line)
            begin = emit.bind((self.first_tile + tile) * (lines.taps * phases) + phase - conv.padding[axis])
            at = emit.bind(self._place(channel, phase, line, tile))

            def value(index: Expr) -> Any:
                return pixel(channel, *lines.place(begin + index * phases, across))

            def transform(values: Sequence[Any]) -> None:
                for position in range(lines.positions):
                    _store(self._inputs, combination(matrix[position], values, width), (position, at), width)

            inside = tirx.all(
                across >= 0, across < size[1 - axis], begin >= 0, begin + (lines.positions - 1) * phases < size[axis]
            )
            with T.If(inside):
                with T.Then():
                    transform([T.bind(value(index)) for index in range(lines.positions)])
                with T.Else():
                    for index in range(lines.positions):
                        _store(self._border, emit.splat(0.0, width), (index,), width)
                    low = emit.larger(0, emit.quotient(phases - 1 - begin, phases))
                    high = emit.smaller(lines.positions, emit.quotient(size[axis] - 1 - begin, phases) + 1)
                    row_inside = tirx.all(across >= 0, across < size[1 - axis])
                    with emit.span(low, tirx.Select(row_inside, high, low)) as index:
                        _store(self._border, value(index), (index,), width)
                    transform([T.bind(_load(self._border, (index,), width)) for index in range(lines.positions)])

    def multiply(self, weight: Any, first_block: Expr) -> None:
        """Compute the products of a group of output blocks from ``first_block``, position by position."""
        lines, knobs, lanes, conv = self._lines, self._knobs, self._lanes, self._lines.conv
        stride, dilation = conv.stride[1 - lines.axis], conv.dilation[1 - lines.axis]
        plain = self._width == 1
        with emit.loop(lines.positions) as position, emit.loop(knobs.lines) as line:
            for segment in emit.segments(knobs.tiles, knobs.columns):
                with emit.column_tile(segment) as start:

                    def operand(block: Expr, lane: Expr, tap: Expr, phase: int, column: int, start=start) -> Any:
                        source = line * stride + emit.quotient(tap, lines.pieces) * dilation
                        tile = start + column + emit.remainder(tap, lines.pieces)
                        at = self._place(block, phase, source, tile)
                        return self._inputs[position, at, 0 if plain else lane]

                    def vector(o: int, block: Expr, step: Expr, tap: Expr, phase: int) -> Any:
                        inner = () if plain else (step,)
                        at = (first_block + o, position, block, tap, phase, *inner)
                        return FLOAT32.weights(weight, *at, lanes=lanes)

                    DenseTile(
                        out_blocks=knobs.out_blocks,
                        width=segment.width,
                        lanes=lanes,
                        unroll=knobs.unroll,
                        x=operand,
                        weight=vector,
                        initial=lambda _o, _column: emit.splat(0.0, lanes),
                        finish=lambda o, column, values, start=start: emit.store(  # type: ignore[misc]
                            self._sums, values[0], o, line, start + column, position, lanes=lanes
                        ),
                        last_lanes=last_lanes(conv, knobs.out_blocks, first_block, lanes),
                    ).emit(conv.in_channels, (0, lines.across * lines.pieces), lines.phases, self._width)

    def write(self, first_block: Expr, finish: Callable[[Expr, Expr, Expr, Any], None]) -> None:
        """Call ``finish(output block, row, column, sums)`` for every output of the block."""
        lines, knobs, lanes = self._lines, self._knobs, self._lanes
        matrix, length = piece_matrices(lines.taps).output, lines.outputs[0]
        with emit.loop(knobs.out_blocks) as o, emit.loop(knobs.lines) as line, emit.loop(knobs.tiles) as tile:
            values = [T.bind(emit.load(self._sums, o, line, tile, p, lanes=lanes)) for p in range(lines.positions)]
            along = emit.bind((self.first_tile + tile) * lines.taps)
            across = emit.bind(self.first_line + line)

            def one(index: int) -> None:
                row, column = lines.place(along + index, across)
                finish(first_block + o, row, column, combination(matrix[index], values, lanes))

            for index in range(lines.taps):
                if length % lines.taps == 0:
                    one(index)
                    continue
                with T.If(along + index < length), T.Then():
                    one(index)


def _store(buffer: Any, value: Any, at: tuple[Expr, ...], width: int) -> None:
    """Store a vector of ``width`` lanes, or a scalar for one lane."""
    T.buffer_store(buffer, value, [*at, 0 if width == 1 else tirx.Ramp(0, 1, width)])


def _load(buffer: Any, at: tuple[Expr, ...], width: int) -> Any:
    """Load a vector of ``width`` lanes, or a scalar for one lane."""
    return buffer[(*at, 0 if width == 1 else tirx.Ramp(0, 1, width))]


def _pixel(data: Any, image: Expr, channel: Expr, row: Expr, column: Expr, plain: bool, lanes: int) -> Any:
    return data[image, channel, row, column] if plain else emit.load(data, image, channel, row, column, lanes=lanes)


def _extents(lines: Lines, knobs: LineWinogradKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent, TiledExtent]:
    """Output blocks, lines and tiles, each distributed over tasks."""
    return (
        TiledExtent(blocks(lines.conv.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(lines.outputs[1], knobs.lines, knobs.line_tasks),
        TiledExtent(lines.tiles, knobs.tiles, knobs.tile_tasks),
    )


def _line_counts(count: int) -> list[int]:
    return sorted({lines for lines in (1, 2, 4, 8) if lines <= count})


def _tile_counts(count: int) -> list[int]:
    """All tiles of a line, and equal parts of them."""
    return sorted({-(-count // parts) for parts in (1, 2, 4, 8)})


def _split(tasks: int, lines: int, runs: int) -> Iterator[tuple[int, int]]:
    """Divide ``tasks`` by lines if there are enough, otherwise also by tiles."""
    for line_tasks in range(min(tasks, lines), 0, -1):
        if tasks % line_tasks == 0 and tasks // line_tasks <= runs:
            yield line_tasks, tasks // line_tasks
            return
    yield min(tasks, lines), 1
