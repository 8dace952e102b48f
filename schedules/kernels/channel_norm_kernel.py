"""Layer normalisation over the channels of every pixel, on blocked tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import ChannelNorm, Operator, element_bytes
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template, TensorSpec, blocked_shape, blocks
from schedules.loops import emit
from schedules.loops.config_space import (
    PORTS,
    TILE_CYCLES,
    cheapest_first,
    exposed_traffic,
    is_small,
    parallel_cycles,
    task_splits,
    tile_widths,
)
from schedules.loops.loop_nests import TiledExtent, task_index

_PASSES = 3  # over the channels of a tile: mean, variance, result


class ChannelNormKnobs(NamedTuple):
    """Knobs: ``columns`` pixels of the register tile, ``pixel_tasks`` parallel tasks."""

    columns: int
    pixel_tasks: int


class ChannelNormKernel(Template):
    """Layer normalisation with tasks of pixels; a tile passes three times over its channels, which stay in L1.

    The variance is computed from differences to the mean: a sum of squares would lose significant digits.
    """

    family = "channel-norm"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return isinstance(operator, ChannelNorm) and operator.dtype != "int8"

    def signature(self, operator: ChannelNorm, cpu: CpuTarget) -> Signature:
        tensor = TensorSpec(blocked_shape(operator.input_shape, cpu.lanes), "blocked", operator.dtype)
        constants = TensorSpec((3 * blocks(operator.channels, cpu.lanes), cpu.lanes))
        return Signature(tensor, (constants,), None, tensor)

    def space(self, operator: ChannelNorm, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: ChannelNorm, config: Config, cpu: CpuTarget) -> float:
        knobs = ChannelNormKnobs(**config)
        tiles = _extent(operator, knobs)
        tile_bytes = element_bytes(operator.dtype) * operator.channels * knobs.columns
        count = blocks(operator.channels, cpu.lanes)
        one = _PASSES * (count * knobs.columns * 2 / PORTS + TILE_CYCLES)
        # The shuffles and additions of a horizontal sum are sequential; several pixels hide their latency.
        one += 2 * 4 * cpu.lanes.bit_length() * max(1.0, knobs.columns / PORTS)
        one += exposed_traffic(cpu, tile_bytes, 2 * operator.input_bytes / cpu.threads)
        return parallel_cycles(cpu, operator.batch * tiles.tasks, tiles.per_task * one)

    def pack(self, operator: ChannelNorm, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[np.ndarray]:
        """Pack one array: weights, biases, and ones in the lanes that hold channels."""
        (layer,) = parameters
        count = blocks(operator.channels, cpu.lanes)
        packed = np.zeros((3, count * cpu.lanes), np.float32)
        packed[0, : operator.channels] = layer.weight
        packed[1, : operator.channels] = 0.0 if layer.bias is None else layer.bias
        packed[2, : operator.channels] = 1.0
        return [packed.reshape(3 * count, cpu.lanes)]

    def build(self, operator: ChannelNorm, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        knobs = ChannelNormKnobs(**config)
        tiles = _extent(operator, knobs)

        def body(data: Any, constants: Any, output: Any) -> None:
            with emit.tasks(operator.batch * tiles.tasks) as task:
                image, pixel_task = task_index(task, operator.batch, tiles.tasks)
                with emit.loop(tiles.per_task) as index:
                    first = tiles.start(pixel_task, index)
                    _emit_tile(operator, knobs.columns, cpu.lanes, data, constants, output, image, first)

        return emit.kernel("channel_norm", self.signature(operator, cpu), body)


def _emit_tile(
    norm: ChannelNorm, columns: int, lanes: int, data: Any, constants: Any, output: Any, image: Any, first: Any
) -> None:
    count, partial_block = blocks(norm.channels, lanes), norm.channels % lanes != 0
    share = emit.splat(1.0 / norm.channels, lanes)
    (sums, means) = emit.registers(2, columns, lanes)

    def pixel(block: Any, column: int) -> Any:
        return emit.load(data, image, block, 0, first + column, lanes=lanes)

    def over_channels(value: Any) -> None:
        """Accumulate ``value(block, column)`` into ``sums``, without unused lanes of the last block."""
        for column in range(columns):
            emit.store(sums[column], emit.splat(0.0, lanes), lanes=lanes)
        with emit.loop(count) as block:
            mask = T.bind(emit.load(constants, 2 * count + block, lanes=lanes)) if partial_block else None
            for column in range(columns):
                term = value(block, column)
                term = term if mask is None else term * mask
                emit.store(sums[column], emit.load(sums[column], lanes=lanes) + term, lanes=lanes)

    over_channels(pixel)
    for column in range(columns):
        emit.store(means[column], emit.total(emit.load(sums[column], lanes=lanes), lanes) * share, lanes=lanes)

    def square(block: Any, column: int) -> Any:
        difference = T.bind(pixel(block, column) - emit.load(means[column], lanes=lanes))
        return difference * difference

    over_channels(square)
    for column in range(columns):
        variance = emit.total(emit.load(sums[column], lanes=lanes), lanes) * share + emit.splat(norm.epsilon, lanes)
        emit.store(sums[column], emit.splat(1.0, lanes) / tirx.sqrt(variance), lanes=lanes)
    with emit.loop(count) as block:
        weight = T.bind(emit.load(constants, block, lanes=lanes))
        bias = T.bind(emit.load(constants, count + block, lanes=lanes))
        for column in range(columns):
            unit = (pixel(block, column) - emit.load(means[column], lanes=lanes)) * emit.load(sums[column], lanes=lanes)
            emit.store(output, unit * weight + bias, image, block, 0, first + column, lanes=lanes)


def _extent(norm: ChannelNorm, knobs: ChannelNormKnobs) -> TiledExtent:
    return TiledExtent(norm.height * norm.width, knobs.columns, knobs.pixel_tasks)


def _candidates(norm: ChannelNorm, cpu: CpuTarget) -> Iterator[Config]:
    pixels = norm.height * norm.width
    for columns in sorted({*tile_widths(pixels, cpu.registers // 2 - 2), *tile_widths(pixels, 4), 1}):
        for _, pixel_tasks in task_splits(1, -(-pixels // columns), cpu, is_small(norm.flops)):
            yield ChannelNormKnobs(columns, pixel_tasks)._asdict()
