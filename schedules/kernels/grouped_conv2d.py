"""k x k convolution in groups of few channels: vectors hold several groups, whose inputs are shuffled into place.

The direct kernel multiplies a whole block of inputs by weights that are mostly zeros; here lane o of a block reads
input j of its own group, so that a group of g channels costs g multiplications per tap.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d, Operator
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template, numpy_dtype
from schedules.kernels.pointwise_kernel import conv_buffers, conv_signature, is_prepared
from schedules.loops import emit
from schedules.loops.issue_slots import PORTS, TILE_CYCLES, equal_tiles, parallel_cycles
from schedules.loops.loop_nests import TiledExtent, axes, store_finished, task_index
from schedules.loops.register_tiling import tile_widths
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits
from schedules.loops.weight_packing import pack_channel_constants

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
    """Grouped convolution with tasks of channel blocks x rows; groups have as many inputs as outputs, and vectors whole
    groups.
    """

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
            # A shuffle uses the port of a multiplication; every product loads its weight.
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
    """Emit one output row of a channel block. ``source(row, column)`` returns an input vector, ``weight(ky, kx, j)``
    the weights of input ``j`` of every group; ``sink(column, sums)`` stores the result.
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
    """Return for each input column of a tile, counted from its first, the (output column, tap) pairs that read it."""
    found: dict[int, list[tuple[int, int]]] = {}
    for column in range(width):
        for kx in range(conv.kernel[1]):
            found.setdefault(column * conv.stride[1] + kx * conv.dilation[1], []).append((column, kx))
    return dict(sorted(found.items()))


def _extents(conv: Conv2d, knobs: GroupedConv2dKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Return channel blocks and rows, each divided among tasks; one band of rows per task."""
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
