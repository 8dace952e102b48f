"""k x k convolutions with few channels in a group or in the output, whose lanes the direct kernel would waste.

**Groups of few channels** (``GroupedConv2d``): the direct kernel multiplies a whole block of inputs by weights that are
mostly zeros. Here vectors hold several groups, and lane o of a block reads input j of its own group, so that a group
of g channels needs g multiplications per tap.

**Few output channels** (``ColumnLanes``): the direct kernel gives every output channel a lane. Here A columns of a row
are A times as many channels of a wider convolution, with A times the stride and a window that covers their windows.
Its weights are those of the window shifted by a column from lane to lane, with zeros beside them (a Toeplitz matrix),
so that an input is multiplied once for all columns that read it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.cpu.core_work import columns_reach, lane_columns
from costmodel.operators.layers import Conv2d, Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template, TensorSpec, blocks, numpy_dtype
from schedules.kernels.direct_conv2d import DirectConv2d, DirectConv2dKnobs, reads_plain_input
from schedules.kernels.pointwise_kernel import conv_buffers, conv_signature, is_prepared
from schedules.loops import emit
from schedules.loops.config_space import (
    PORTS,
    TILE_CYCLES,
    cheapest_first,
    equal_tiles,
    is_small,
    parallel_cycles,
    task_splits,
    tile_widths,
)
from schedules.loops.dot_products import FLOAT32
from schedules.loops.emit import Expr
from schedules.loops.loop_nests import TiledExtent, axes, conv_phase, store_finished, task_index
from schedules.loops.weight_packing import (
    channel_vectors,
    conv_weight_shape,
    pack_channel_constants,
    pack_conv,
    pack_plain_input,
    plain_weight_shape,
)

# Knob of this algorithm only: channels of a group.
GROUP_CHANNELS = "group_channels"
# Registers for an input, its shuffles and weights in flight.
_IN_FLIGHT = 8


class GroupedConv2dKnobs(NamedTuple):
    """Knobs: ``group_channels``, ``columns`` of the register tile, ``channel_tasks`` x ``row_tasks`` parallel tasks."""

    group_channels: int
    columns: int
    channel_tasks: int
    row_tasks: int


class GroupedConv2d(Template):
    """Tasks of channel blocks x rows; each group has as many inputs as outputs, and a vector has whole groups."""

    family = "grouped-conv2d"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        if not isinstance(operator, Conv2d) or is_prepared(operator) or operator.groups == 1:
            return False
        if operator.dtype == "int8":
            return False
        channels = operator.in_channels // operator.groups
        return operator.in_channels == operator.out_channels and 1 < channels < cpu.lanes and cpu.lanes % channels == 0

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        count, channels = blocks(operator.out_channels, cpu.lanes), operator.in_channels // operator.groups
        return conv_signature(operator, cpu.lanes, (count, *operator.kernel, channels, cpu.lanes))

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        conv, knobs = operator, GroupedConv2dKnobs(**config)
        channels, bands = _extents(conv, knobs, cpu)
        row = 0.0
        for tiles in equal_tiles(conv.out_width, knobs.columns):
            inputs = min((tiles.width - 1) * conv.stride[1] + conv.kernel[1], tiles.width * conv.kernel[1])
            products = knobs.group_channels * conv.kernel[1] * tiles.width
            # A shuffle uses a port of multiplications; every product loads its weight.
            slots = max(products + knobs.group_channels * inputs, products + inputs) / PORTS
            row += tiles.count * (conv.kernel[0] * slots + 1.5 * tiles.width + TILE_CYCLES)
        tasks = conv.batch * channels.tasks * bands.tasks
        return parallel_cycles(cpu, tasks, channels.per_task * bands.size * row)

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,) = parameters
        count, lanes = blocks(operator.out_channels, cpu.lanes), cpu.lanes
        packed = np.zeros((count * lanes, *layer.weight.shape[1:]), np.float32)
        packed[: operator.out_channels] = layer.weight
        weight = packed.reshape(count, lanes, *layer.weight.shape[1:]).transpose(0, 3, 4, 2, 1)
        return [
            np.ascontiguousarray(weight, dtype=numpy_dtype(operator.dtype)),
            pack_channel_constants(operator, layer, lanes),
        ]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, GroupedConv2dKnobs(**config)
        channels, bands = _extents(conv, knobs, cpu)

        def body(*buffers: Any) -> None:
            data, _, weight, bias, _, residual, output = conv_buffers(conv, buffers)
            with emit.tasks(conv.batch * channels.tasks * bands.tasks) as task:
                image, channel_task, band = task_index(task, conv.batch, channels.tasks, bands.tasks)
                first = bands.start(band, 0)
                with emit.loop(channels.per_task) as index, emit.loop(bands.size) as row:
                    block, out_row = channels.start(channel_task, index), emit.bind(first + row)

                    def sink(column: Any, sums: Any) -> None:
                        at = (image, block, out_row, column)
                        store_finished(output, sums, at, conv, lanes, residual, channel=(bias, block))

                    _emit_row(
                        conv,
                        knobs,
                        lanes,
                        out_row,
                        source=lambda y, x: emit.load(data, image, block, y, x, lanes=lanes),
                        weight=lambda ky, kx, j: emit.load(weight, block, ky, kx, j, lanes=lanes),
                        initial=lambda: emit.load(bias, block, lanes=lanes),
                        sink=sink,
                    )

        return emit.kernel("grouped_conv2d", self.signature(conv, cpu), body)


def _emit_row(
    conv: Conv2d,
    knobs: GroupedConv2dKnobs,
    lanes: int,
    out_row: Any,
    *,
    source: Callable[[Any, Any], Any],
    weight: Callable[[Any, int, int], Any],
    initial: Callable[[], Any],
    sink: Callable[[Any, Any], None],
) -> None:
    """Emit one output row of a channel block.

    ``source(row, column)`` is an input vector, ``weight(ky, kx, j)`` that of input ``j`` of every group, ``sink(column,
    sums)`` stores.
    """
    vertical, horizontal = axes(conv)
    taps = vertical.taps(out_row, conv.out_height)
    size = knobs.group_channels
    for segment in emit.segments(conv.out_width, knobs.columns, horizontal):
        with emit.column_tile(segment) as start:
            (sums,) = emit.registers(1, segment.width, lanes)
            for each in sums:
                emit.store(each, initial(), lanes=lanes)
            with emit.span(*taps) as ky:
                row = emit.bind(vertical.source(out_row, ky))
                for offset, users in _readers(conv, segment.width).items():
                    column = start * conv.stride[1] - conv.padding[1] + offset
                    if segment.border and not 0 <= column < conv.width:
                        continue
                    pixel = T.bind(source(row, column))
                    for j in range(size):
                        value = T.bind(emit.shuffle([pixel], [lane // size * size + j for lane in range(lanes)]))
                        for position, kx in users:
                            product = value * weight(ky, kx, j)
                            emit.store(sums[position], emit.load(sums[position], lanes=lanes) + product, lanes=lanes)
            for position, each in enumerate(sums):
                sink(start + position, [emit.load(each, lanes=lanes)])


def _readers(conv: Conv2d, width: int) -> dict[int, list[tuple[int, int]]]:
    """Input column of a tile, relative to its first -> (output column, tap) pairs that read it."""
    found: dict[int, list[tuple[int, int]]] = {}
    for column in range(width):
        for kx in range(conv.kernel[1]):
            found.setdefault(column * conv.stride[1] + kx * conv.dilation[1], []).append((column, kx))
    return dict(sorted(found.items()))


def _extents(conv: Conv2d, knobs: GroupedConv2dKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Channel blocks, and one band of rows per task."""
    rows = -(-conv.out_height // knobs.row_tasks)
    return (
        TiledExtent(blocks(conv.out_channels, cpu.lanes), 1, knobs.channel_tasks),
        TiledExtent(conv.out_height, rows, knobs.row_tasks),
    )


def _candidates(conv: Conv2d, cpu: CpuTarget) -> Iterator[Config]:
    count, size = blocks(conv.out_channels, cpu.lanes), conv.in_channels // conv.groups
    for columns in tile_widths(conv.out_width, cpu.registers - _IN_FLIGHT):
        for channel_tasks, row_tasks in task_splits(count, conv.out_height, cpu, is_small(conv.flops)):
            yield GroupedConv2dKnobs(size, columns, channel_tasks, row_tasks)._asdict()


# Knob of this algorithm only: number of neighbouring columns in a vector, and its supported values.
LANE_COLUMNS = "lane_columns"
COLUMNS_OF_A_VECTOR = (2, 4, 8, 16)


class ColumnLanes(Template):
    """Direct kernel of the wider convolution of ``columns`` at a time (:func:`columns_as_channels`).

    An output of few channels is plain, as its readers expect; others are blocked.
    """

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self.family = f"column-lanes-{columns}"
        self._direct = DirectConv2d()

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return isinstance(operator, Conv2d) and self.columns in lane_columns(operator, cpu.lanes)

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        """Constants of a convolution plus the initial values of a vector of sums."""
        lanes, wide, plain = (
            cpu.lanes,
            columns_as_channels(operator, self.columns),
            reads_plain_input(operator, cpu.lanes),
        )
        shape = plain_weight_shape(wide, lanes) if plain else conv_weight_shape(wide, lanes)
        signature = conv_signature(operator, lanes, shape, plain_input=plain)
        output = TensorSpec(operator.output_shape) if _writes_plain(operator, lanes) else signature.output
        residual = output if operator.epilogue.residual else None
        constants = (*signature.constants, TensorSpec((1, lanes)))
        return replace(signature, constants=constants, output=output, residual=residual)

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        wide = self._direct.space(columns_as_channels(operator, self.columns), cpu)
        configs = [{LANE_COLUMNS: self.columns, **config} for config in wide]
        return cheapest_first(configs, partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        return self._direct.cost(columns_as_channels(operator, self.columns), _direct_knobs(config)._asdict(), cpu)

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,), lanes = parameters, cpu.lanes
        wide = columns_as_channels(operator, self.columns)
        weight = np.zeros((operator.out_channels, self.columns, *wide.weight_shape[1:]), np.float32)
        for column in range(self.columns):
            first = column * operator.stride[1]
            weight[:, column, :, :, first : first + operator.kernel[1]] = layer.weight
        pack = pack_plain_input if reads_plain_input(operator, lanes) else pack_conv
        packed = pack(wide, weight.reshape(wide.weight_shape), lanes)
        first_sums = np.zeros((1, lanes), np.float32)
        if layer.bias is not None:
            first_sums[0, : wide.out_channels] = np.repeat(layer.bias.reshape(-1), self.columns)
        return [packed, pack_channel_constants(operator, layer, lanes), first_sums]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, _direct_knobs(config)
        wide = columns_as_channels(conv, self.columns)
        bands = TiledExtent(wide.out_height, knobs.rows, knobs.row_tasks)
        plain = reads_plain_input(conv, lanes)

        def body(*arguments: Any) -> None:
            data, weight, constants, first_sums, *others = arguments
            residual, output = others if conv.epilogue.residual else (None, *others)
            with emit.tasks(conv.batch * bands.tasks) as task:
                image, row_task = task_index(task, conv.batch, bands.tasks)
                with emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)

                    def source(block: Any, lane: Any, row: Any, column: Any) -> Any:
                        return data[image, block, row, column] if plain else data[image, block, row, column, lane]

                    def weights(out_block: Any, block: Any, step: Any, ky: Any, kx: int) -> Any:
                        step_index = () if plain else (step,)
                        return FLOAT32.weights(weight, out_block, block, ky, kx, *step_index, lanes=lanes)

                    def sink(_block: Any, row: Any, column: Any, sums: Any) -> None:
                        self._store(conv, lanes, sums[0], (image, first_row + row, column), constants, residual, output)

                    conv_phase(
                        wide,
                        knobs.tile,
                        lanes,
                        rows=knobs.rows,
                        first_row=first_row,
                        first_block=0,
                        channels=wide.in_channels,
                        block_lanes=1 if plain else lanes,
                        source=source,
                        weight=weights,
                        bias=first_sums,
                        sink=sink,
                    )

        return emit.kernel("column_lanes", self.signature(conv, cpu), body)

    def _store(
        self,
        conv: Conv2d,
        lanes: int,
        sums: Any,
        at: tuple[Expr, Expr, Expr],
        constants: Any,
        residual: Any | None,
        output: Any,
    ) -> None:
        """Apply the epilogue to a vector of ``sums`` (including the bias) and store it; ``at``: image, row, vector in
        the row.

        If a row ends with a partial vector, that vector is processed separately, with a constant index.
        """
        image, row, place = at
        count = min(self.columns, conv.out_width - place * self.columns) if isinstance(place, int) else self.columns
        first, sums = place * self.columns, T.bind(sums)
        if _writes_plain(conv, lanes):
            for channel in range(conv.out_channels):
                for start, size in _powers_of_two(count):
                    begin = channel * self.columns + start
                    part = sums if size == lanes else T.bind(emit.shuffle([sums], range(begin, begin + size)))
                    where = (image, channel, row, first + start)
                    _store_plain(conv, part, size, where, constants, residual, output)
            return
        zeros = emit.splat(0.0, lanes)
        for column in range(count):
            order = [channel * self.columns + column for channel in range(conv.out_channels)]
            order += [lanes] * (lanes - len(order))
            where = (image, 0, row, first + column)
            vector = T.bind(emit.shuffle([sums, zeros], order))
            store_finished(output, [vector], where, conv, lanes, residual, channel=(constants, 0))


def columns_as_channels(conv: Conv2d, columns: int) -> Conv2d:
    """``conv`` with ``columns`` neighbouring columns as channels, adjacent for each channel."""
    stride, left = conv.stride[1], conv.padding[1]
    width, kernel = -(-conv.out_width // columns), columns_reach(conv, columns)
    right = (width - 1) * columns * stride + kernel - conv.width - left
    return replace(
        conv,
        out_channels=conv.out_channels * columns,
        kernel=(conv.kernel[0], kernel),
        stride=(conv.stride[0], columns * stride),
        padding=(conv.padding[0], left, conv.padding[2], right),
    )


def _writes_plain(conv: Conv2d, lanes: int) -> bool:
    """True if the output has so few channels that its readers use the plain layout (:func:`reads_plain_input`)."""
    return conv.out_channels < lanes // 2


def _powers_of_two(count: int) -> Iterator[tuple[int, int]]:
    """Split ``count`` columns into runs (first, length) of powers of two, longest first."""
    start = 0
    for power in reversed(range(count.bit_length())):
        if count >> power & 1:
            yield start, 1 << power
            start += 1 << power


def _store_plain(
    conv: Conv2d, part: Any, size: int, at: tuple[Expr, ...], constants: Any, residual: Any | None, output: Any
) -> None:
    """Apply the epilogue to ``size`` columns of one channel and store them at the indices ``at``."""
    index = (*at[:-1], at[-1] if size == 1 else tirx.Ramp(at[-1], 1, size))
    names = channel_vectors(conv.epilogue)

    def constant(name: str) -> Any:
        return emit.splat(constants[names.index(name), at[1]], size)

    def read() -> Any:
        assert residual is not None
        return residual[index]

    T.buffer_store(output, emit.finish(part, conv.epilogue, read, size, constant), [*index])


def _direct_knobs(config: Config) -> DirectConv2dKnobs:
    return DirectConv2dKnobs(**{knob: value for knob, value in config.items() if knob != LANE_COLUMNS})
