"""Window pooling on blocked tensors, and global pooling from blocked to plain."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Operator, Pool2d
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import (
    Config,
    Parameters,
    Signature,
    Template,
    TensorSpec,
    blocked_shape,
    blocks,
    tensor_dtype,
)
from schedules.loops import emit
from schedules.loops.config_space import (
    PORTS,
    TILE_CYCLES,
    cheapest_first,
    equal_tiles,
    parallel_cycles,
    task_splits,
    tile_widths,
)
from schedules.loops.emit import Axis
from schedules.loops.loop_nests import TiledExtent, task_index

# Maximum number of unrolled loads in a row of windows.
_WRITTEN_OUT = 256
_LOWEST = float(np.finfo(np.float32).min)


class PoolKnobs(NamedTuple):
    """Knobs: ``columns`` of the register tile, ``channel_tasks`` x ``row_tasks`` parallel tasks."""

    columns: int
    channel_tasks: int
    row_tasks: int


class Pool(Template):
    """Pooling with tasks of channel blocks x rows. Global pooling writes NCHW."""

    family = "pool2d"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        # Averages of bytes are not covered.
        return isinstance(operator, Pool2d) and (operator.kind == "max" or operator.dtype != "int8")

    def signature(self, operator: Pool2d, cpu: CpuTarget) -> Signature:
        data = TensorSpec(blocked_shape(operator.input_shape, cpu.lanes), "blocked", operator.dtype)
        if operator.is_global:
            return Signature(data, (), None, TensorSpec(operator.output_shape, dtype=operator.dtype))
        output = TensorSpec(blocked_shape(operator.output_shape, cpu.lanes), "blocked", operator.dtype)
        return Signature(data, (), None, output)

    def space(self, operator: Pool2d, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Pool2d, config: Config, cpu: CpuTarget) -> float:
        pool, knobs = operator, PoolKnobs(**config)
        channels, bands = _extents(pool, knobs, cpu)
        taps = pool.kernel[0] * pool.kernel[1]
        row = sum(
            tiles.count * (tiles.width * taps / PORTS + TILE_CYCLES)
            for tiles in equal_tiles(pool.out_width, knobs.columns)
        )
        tasks = pool.batch * channels.tasks * bands.tasks
        return parallel_cycles(cpu, tasks, channels.per_task * bands.size * row)

    def pack(self, operator: Pool2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[np.ndarray]:
        return []

    def build(self, operator: Pool2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        knobs = PoolKnobs(**config)
        if operator.is_global:
            body = _global_body(operator, knobs, cpu)
        else:
            body = window_body(operator, knobs, cpu, partial(_arithmetic, operator, cpu.lanes))
        return emit.kernel("pool2d", self.signature(operator, cpu), body)


def _extents(pool: Pool2d, knobs: PoolKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Channel blocks, and one band of rows per task."""
    rows = -(-pool.out_height // knobs.row_tasks)
    return (
        TiledExtent(blocks(pool.channels, cpu.lanes), 1, knobs.channel_tasks),
        TiledExtent(pool.out_height, rows, knobs.row_tasks),
    )


def _candidates(pool: Pool2d, cpu: CpuTarget) -> Iterator[Config]:
    widest = max(1, min(cpu.registers // 2, _WRITTEN_OUT // pool.kernel[1]))
    widths = [1] if pool.is_global else tile_widths(pool.out_width, widest)
    for columns in widths:
        splits = task_splits(blocks(pool.channels, cpu.lanes), pool.out_height, cpu, small=True)
        for channel_tasks, row_tasks in splits:
            yield PoolKnobs(columns, channel_tasks, row_tasks)._asdict()


def _combine(pool: Pool2d, left: Any, right: Any) -> Any:
    return tirx.max(left, right) if pool.kind == "max" else left + right


def _global_body(pool: Pool2d, knobs: PoolKnobs, cpu: CpuTarget) -> Any:
    lanes, pixels = cpu.lanes, pool.height * pool.width
    channels, _ = _extents(pool, knobs, cpu)
    # Several accumulators hide the latency of the additions.
    ways = next(ways for ways in (8, 7, 5, 4, 3, 2, 1) if pixels % ways == 0)

    def body(data: Any, output: Any) -> None:
        with emit.tasks(pool.batch * channels.tasks) as task:
            image, channel_task = task_index(task, pool.batch, channels.tasks)
            with emit.loop(channels.per_task) as index:
                block = channels.start(channel_task, index)
                (values,) = emit.registers(1, ways, lanes)
                for way in range(ways):
                    emit.store(values[way], emit.load(data, image, block, 0, way, lanes=lanes), lanes=lanes)
                if pixels > ways:
                    with T.serial(1, pixels // ways) as step:
                        for way in range(ways):
                            pixel = emit.load(data, image, block, 0, step * ways + way, lanes=lanes)
                            joined = _combine(pool, emit.load(values[way], lanes=lanes), pixel)
                            emit.store(values[way], joined, lanes=lanes)
                total = emit.load(values[0], lanes=lanes)
                for way in range(1, ways):
                    total = _combine(pool, total, emit.load(values[way], lanes=lanes))
                if pool.kind == "average":
                    total = total * emit.splat(1.0 / pixels, lanes)
                _store_channels(pool, output, image, block, total, lanes)

    return body


def average_of_sums(pool: Pool2d, parts: int, cpu: CpuTarget) -> tirx.PrimFunc:
    """Global average ``pool`` from FP32 sums over ``parts`` of an image.

    Input (N, blocks, parts, V), plain output (N, C, 1, 1).
    """
    lanes, count = cpu.lanes, blocks(pool.channels, cpu.lanes)
    sums = TensorSpec((pool.batch, count, parts, lanes))
    output = TensorSpec(pool.output_shape, dtype=pool.dtype)

    def body(data: Any, output: Any) -> None:
        with emit.loop(pool.batch) as image, emit.loop(count) as block:
            total = emit.load(data, image, block, 0, lanes=lanes)
            for part in range(1, parts):
                total = total + emit.load(data, image, block, part, lanes=lanes)
            total = total * emit.splat(1.0 / (pool.height * pool.width), lanes)
            _store_channels(pool, output, image, block, total, lanes)

    return emit.kernel("average_of_sums", Signature(sums, (), None, output), body)


def _store_channels(pool: Pool2d, output: Any, image: Any, block: Any, value: Any, lanes: int) -> None:
    """Store one block of channels into a plain (N, C, 1, 1) tensor."""
    scratch = T.alloc_buffer((lanes,), tensor_dtype(pool.dtype), scope="local")
    emit.store(scratch, value, lanes=lanes)
    # The block index is known at run time only, so a partial last block needs a check.
    partial = pool.channels > lanes and pool.channels % lanes != 0
    for lane in range(min(lanes, pool.channels)):
        channel = block * lanes + lane
        with ExitStack() as guard:
            if partial:
                guard.enter_context(T.If(channel < pool.channels))
                guard.enter_context(T.Then())
            T.buffer_store(output, scratch[lane], [image, channel, 0, 0])


@dataclass(frozen=True)
class WindowArithmetic:
    """Arithmetic of a window on FP32 vectors."""

    # Initial value of every lane.
    first: float
    # ``add(value, pixel)`` for each pixel of the window, row by row.
    add: Callable[[Any, Any], Any]
    # ``finish(value, count)`` with the number of averaged pixels, a number or an expression.
    finish: Callable[[Any, Any], Any]


def _arithmetic(pool: Pool2d, lanes: int) -> WindowArithmetic:
    if pool.kind == "max":
        return WindowArithmetic(_LOWEST, partial(_combine, pool), lambda value, count: value)
    return WindowArithmetic(
        0.0, partial(_combine, pool), lambda value, count: value * emit.splat(_inverse(count), lanes)
    )


def window_body(
    pool: Pool2d, knobs: PoolKnobs, cpu: CpuTarget, arithmetic: Callable[..., WindowArithmetic]
) -> Callable[..., None]:
    """Body of a kernel (data, constants, output), blocked; ``arithmetic(*constants)`` is called in each task."""
    lanes = cpu.lanes
    vertical = Axis(pool.height, pool.kernel[0], pool.stride[0], pool.padding[0])
    horizontal = Axis(pool.width, pool.kernel[1], pool.stride[1], pool.padding[1])
    channels, bands = _extents(pool, knobs, cpu)

    def body(data: Any, *others: Any) -> None:
        *constants, output = others
        with emit.tasks(pool.batch * channels.tasks * bands.tasks) as task:
            rule = arithmetic(*constants)
            image, channel_task, band = task_index(task, pool.batch, channels.tasks, bands.tasks)
            first_row = bands.start(band, 0)
            with emit.loop(channels.per_task) as index, emit.loop(bands.size) as row:
                block = channels.start(channel_task, index)
                out_row = emit.bind(first_row + row)
                taps = vertical.taps(out_row, pool.out_height)
                for segment in emit.segments(pool.out_width, knobs.columns, horizontal):
                    with emit.column_tile(segment) as start:
                        _window_tile(
                            pool, rule, lanes, data, output, image, block, out_row, taps, segment, start, horizontal,
                            vertical,
                        )  # fmt: skip

    return body


def _window_tile(
    pool: Pool2d, rule: WindowArithmetic, lanes: int, data: Any, output: Any, image: Any, block: Any, out_row: Any,
    taps: Any, segment: emit.ColumnSegment, start: Any, horizontal: Axis, vertical: Axis,
) -> None:  # fmt: skip
    (values,) = emit.registers(1, segment.width, lanes)
    for column in range(segment.width):
        emit.store(values[column], emit.splat(rule.first, lanes), lanes=lanes)
    with emit.span(*taps) as ky:
        source_row = emit.bind(vertical.source(out_row, ky))
        for column in range(segment.width):
            for kx in range(pool.kernel[1]):
                position = horizontal.source(start + column, kx)
                if segment.border and not 0 <= position < pool.width:
                    continue
                pixel = emit.load(data, image, block, source_row, position, lanes=lanes)
                emit.store(values[column], rule.add(emit.load(values[column], lanes=lanes), pixel), lanes=lanes)
    for column in range(segment.width):
        count = _counted(pool, taps, segment, start, column, horizontal)
        value = rule.finish(emit.load(values[column], lanes=lanes), count)
        emit.store(output, value, image, block, out_row, start + column, lanes=lanes)


def _counted(pool: Pool2d, taps: Any, segment: emit.ColumnSegment, start: Any, column: int, horizontal: Axis) -> Any:
    """Number of averaged pixels."""
    if pool.count_include_pad:
        return pool.kernel[0] * pool.kernel[1]
    columns = pool.kernel[1]
    if segment.border:
        columns = sum(horizontal.inside(start + column, kx) for kx in range(pool.kernel[1]))
    return (taps[1] - taps[0]) * columns


def _inverse(count: Any) -> Any:
    if isinstance(count, int):
        return 1.0 / count
    return tirx.FloatImm("float32", 1.0) / count.astype("float32")
