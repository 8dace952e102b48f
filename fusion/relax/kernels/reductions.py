"""Kernels that reduce: softmax, layer norm and products of two computed tensors along the rows of plain tensors,
softmax along their columns, and group and instance norms of blocked images.

A row that is not a whole number of vectors ends with a vector that overlaps the one before it; the values in the
overlap are computed twice, with equal results, and count once.

A group norm has two kernels, one for the statistics of every channel and one that normalises. The statistics are
means and sums of squared differences from them, over bands of pixels; they are combined by the method of Chan, Golub
and LeVeque (1979), so that a mean far from zero costs no digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Signature, TensorSpec, blocked_shape, blocks
from schedules.loops import emit
from schedules.loops.config_space import RegisterTile, dense_cycles, register_tiles
from schedules.loops.loop_nests import TiledExtent
from schedules.loops.register_kernels import DenseTile

# Starting a parallel region costs about as much as this many values of a softmax on one core.
_SERIAL_VALUES = 4096
_SERIAL_FLOPS = 200_000
_TASKS_PER_THREAD = 4
_UNROLL = 4
_LOWEST = -float("inf")


@dataclass(frozen=True)
class RowSoftmax:
    """Softmax of ``rows`` rows of ``width`` values."""

    rows: int
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of input and output."""
        return (self.rows, self.width)


@dataclass(frozen=True)
class ColumnSoftmax:
    """Softmax of the ``columns`` columns, of ``width`` values each, of ``outer`` matrices."""

    outer: int
    width: int
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of input and output."""
        return (self.outer, self.width, self.columns)


@dataclass(frozen=True)
class RowNorm:
    """Layer norm of ``rows`` rows of ``width`` values."""

    rows: int
    width: int
    epsilon: float

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of input and output."""
        return (self.rows, self.width)


@dataclass(frozen=True)
class BatchedProduct:
    """``batch`` products (rows, inner) x (inner, columns)."""

    batch: int
    rows: int
    inner: int
    columns: int


RowWork: TypeAlias = RowSoftmax | ColumnSoftmax | RowNorm | BatchedProduct


def row_kernel(work: RowWork, cpu: CpuTarget) -> tirx.PrimFunc:
    """Build the kernel of ``work``."""
    if isinstance(work, RowSoftmax):
        return row_softmax(work.rows, work.width, cpu)
    if isinstance(work, ColumnSoftmax):
        return column_softmax(work.outer, work.width, work.columns, cpu)
    if isinstance(work, RowNorm):
        return row_norm(work.rows, work.width, work.epsilon, cpu)
    return batched_product(work.batch, work.rows, work.inner, work.columns, cpu)


@dataclass(frozen=True)
class _Row:
    """Row of ``width`` values in vectors of ``lanes``."""

    width: int
    lanes: int

    @property
    def whole(self) -> int:
        return self.width // self.lanes

    @property
    def again(self) -> int:
        """Lanes of the last vector that overlap the one before it; 0 if the row ends with a whole vector."""
        return -self.width % self.lanes

    def each(self, step: Callable[[Any, bool], None]) -> None:
        """Emit ``step(start of a vector, True for the overlapping one)`` for all vectors, the overlapping one last."""
        with emit.loop(self.whole) as index:
            step(index * self.lanes, False)
        if self.again:
            step(self.width - self.lanes, True)

    def counted(self, value: Any, last: bool, nothing: float = 0.0) -> Any:
        """Return ``value`` with ``nothing`` in the lanes that the vector before it also holds."""
        if not last:
            return value
        new = range(self.again, self.lanes)
        kept = [self.lanes + lane if lane in new else lane for lane in range(self.lanes)]
        return emit.shuffle([emit.splat(nothing, self.lanes), T.bind(value)], kept)

    def at(self, start: Any) -> Any:
        """Return the index of the vector from ``start`` on."""
        return tirx.Ramp(tirx.const(start, "int32") if isinstance(start, int) else start, 1, self.lanes)


def vector_lanes(width: int, cpu: CpuTarget) -> int:
    """Return the lanes of the vectors of a row: as many as the CPU has, or the largest power of two that fits."""
    return min(cpu.lanes, 1 << (width.bit_length() - 1))


@contextmanager
def _rows(count: int, values: int, cpu: CpuTarget) -> Iterator[Any]:
    """Loop over every row once, in parallel tasks if there are enough ``values``."""
    tasks = 1 if values < _SERIAL_VALUES else min(count, _TASKS_PER_THREAD * cpu.threads)
    size = -(-count // tasks)
    with emit.tasks(tasks) as task:
        first = emit.bind(task * size)
        with emit.span(first, emit.bind(emit.smaller(first + size, count))) as row:
            yield row


def row_softmax(rows: int, width: int, cpu: CpuTarget) -> tirx.PrimFunc:
    """Build softmax along the last dimension of (rows, width), in three passes: maximum, sum of exponentials,
    quotients.
    """
    row = _Row(width, vector_lanes(width, cpu))
    lanes, spec = row.lanes, TensorSpec((rows, width))

    def body(data: Any, output: Any) -> None:
        with _rows(rows, rows * width, cpu) as at:
            ((best, sums),) = emit.registers(1, 2, lanes)
            emit.store(best, emit.splat(_LOWEST, lanes), lanes=lanes)
            emit.store(sums, emit.splat(0.0, lanes), lanes=lanes)
            row.each(
                lambda start, _: emit.store(
                    best, tirx.max(emit.load(best, lanes=lanes), data[at, row.at(start)]), lanes=lanes
                )
            )
            largest = emit.across(emit.load(best, lanes=lanes), lanes, tirx.max)

            def power(start: Any, last: bool) -> None:
                value = T.bind(emit.exp(data[at, row.at(start)] - largest, lanes))
                T.buffer_store(output, value, [at, row.at(start)])
                emit.store(sums, emit.load(sums, lanes=lanes) + row.counted(value, last), lanes=lanes)

            row.each(power)
            share = T.bind(emit.splat(1.0, lanes) / emit.total(emit.load(sums, lanes=lanes), lanes))
            # Read before its first lanes are multiplied by the previous vector.
            end = T.bind(output[at, row.at(width - lanes)]) if row.again else None

            def divide(start: Any, last: bool) -> None:
                value = end if last else output[at, row.at(start)]
                T.buffer_store(output, value * share, [at, row.at(start)])

            row.each(divide)

    return emit.kernel("row_softmax", Signature(spec, (), None, spec), body)


def column_softmax(outer: int, width: int, columns: int, cpu: CpuTarget) -> tirx.PrimFunc:
    """Build softmax along the middle dimension of (outer, width, columns), a vector of columns at a time.

    The last vector of a matrix overlaps the one before it, which may belong to another task: so nothing that is written
    is read again, and exponentials are computed twice.
    """
    row = _Row(columns, vector_lanes(columns, cpu))
    lanes, spec = row.lanes, TensorSpec((outer, width, columns))
    vectors = -(-columns // lanes)

    def body(data: Any, output: Any) -> None:
        with _rows(outer * vectors, outer * width * columns, cpu) as at:
            matrix = emit.bind(emit.quotient(at, vectors))
            place = row.at(emit.bind(emit.smaller(emit.remainder(at, vectors) * lanes, columns - lanes)))
            ((best, sums),) = emit.registers(1, 2, lanes)
            emit.store(best, emit.splat(_LOWEST, lanes), lanes=lanes)
            emit.store(sums, emit.splat(0.0, lanes), lanes=lanes)
            with emit.loop(width) as index:
                emit.store(best, tirx.max(emit.load(best, lanes=lanes), data[matrix, index, place]), lanes=lanes)
            largest = T.bind(emit.load(best, lanes=lanes))
            with emit.loop(width) as index:
                power = emit.exp(data[matrix, index, place] - largest, lanes)
                emit.store(sums, emit.load(sums, lanes=lanes) + power, lanes=lanes)
            share = T.bind(emit.splat(1.0, lanes) / emit.load(sums, lanes=lanes))
            with emit.loop(width) as index:
                power = emit.exp(data[matrix, index, place] - largest, lanes)
                T.buffer_store(output, power * share, [matrix, index, place])

    return emit.kernel("column_softmax", Signature(spec, (), None, spec), body)


def row_norm(rows: int, width: int, epsilon: float, cpu: CpuTarget) -> tirx.PrimFunc:
    """Build layer norm along the last dimension of (rows, width); its second argument holds weights and biases, (2,
    width).

    The variance is computed from the differences from the mean: a sum of squares would lose the significant digits.
    """
    row = _Row(width, vector_lanes(width, cpu))
    lanes, spec = row.lanes, TensorSpec((rows, width))
    share = 1.0 / width

    def body(data: Any, constants: Any, output: Any) -> None:
        def over_row(sums: Any, value: Callable[[Any], Any]) -> Any:
            emit.store(sums, emit.splat(0.0, lanes), lanes=lanes)
            row.each(
                lambda start, last: emit.store(
                    sums, emit.load(sums, lanes=lanes) + row.counted(value(start), last), lanes=lanes
                )
            )
            return emit.total(emit.load(sums, lanes=lanes), lanes)

        with _rows(rows, rows * width, cpu) as at:
            ((sums,),) = emit.registers(1, 1, lanes)
            mean = T.bind(over_row(sums, lambda start: data[at, row.at(start)]) * emit.splat(share, lanes))

            def square(start: Any) -> Any:
                difference = T.bind(data[at, row.at(start)] - mean)
                return difference * difference

            variance = over_row(sums, square) * emit.splat(share, lanes) + emit.splat(epsilon, lanes)
            factor = T.bind(emit.splat(1.0, lanes) / tirx.sqrt(variance))

            def finish(start: Any, _: bool) -> None:
                place = row.at(start)
                unit = (data[at, place] - mean) * factor
                T.buffer_store(output, unit * constants[0, place] + constants[1, place], [at, place])

            row.each(finish)

    return emit.kernel("row_norm", Signature(spec, (TensorSpec((2, width)),), None, spec), body)


def batched_product(batch: int, rows: int, inner: int, columns: int, cpu: CpuTarget) -> tirx.PrimFunc:
    """Build (batch, rows, inner) x (batch, inner, columns): tiles of rows x vectors of columns in registers.

    The last tile of rows, and the last vector of columns, overlap those before them.
    """
    lanes = vector_lanes(columns, cpu)
    vectors = -(-columns // lanes)
    tile = _product_tile(vectors, rows, inner, lanes, cpu)
    flops = 2 * batch * rows * inner * columns
    bands = 1 if flops < _SERIAL_FLOPS else max(1, -(-_TASKS_PER_THREAD * cpu.threads // batch))
    tiles = TiledExtent(rows, tile.columns, min(bands, -(-rows // tile.columns)))
    groups = TiledExtent(vectors, tile.out_blocks, 1)
    left, right = TensorSpec((batch, rows, inner)), TensorSpec((batch, inner, columns))

    def body(data: Any, other: Any, output: Any) -> None:
        count = batch * tiles.tasks
        with emit.loop(count) if flops < _SERIAL_FLOPS else emit.tasks(count) as task:
            matrix, band = emit.quotient(task, tiles.tasks), emit.remainder(task, tiles.tasks)
            with emit.loop(groups.per_task) as group, emit.loop(tiles.per_task) as index:
                first_vector, first_row = groups.start(0, group), tiles.start(band, index)

                def place(vector: int) -> Any:
                    start = emit.smaller((first_vector + vector) * lanes, columns - lanes)
                    return tirx.Ramp(tirx.const(start, "int32") if isinstance(start, int) else start, 1, lanes)

                DenseTile(
                    out_blocks=tile.out_blocks,
                    width=tile.columns,
                    lanes=lanes,
                    unroll=tile.unroll,
                    x=lambda block, lane, _ky, _kx, row: data[matrix, first_row + row, block * cpu.lanes + lane],
                    weight=lambda o, block, lane, _ky, _kx: other[matrix, block * cpu.lanes + lane, place(o)],
                    initial=lambda _o, _column: emit.splat(0.0, lanes),
                    finish=lambda o, row, sums: T.buffer_store(output, sums[0], [matrix, first_row + row, place(o)]),
                ).emit(inner, (0, 1), 1, cpu.lanes)

    return emit.kernel("batched_product", Signature(left, (right,), None, TensorSpec((batch, rows, columns))), body)


def _product_tile(vectors: int, rows: int, inner: int, lanes: int, cpu: CpuTarget) -> RegisterTile:
    """Return the register tile of least analytic cost for the whole matrix."""

    def cost(tile: RegisterTile) -> float:
        weight_bytes = 4 * lanes * tile.out_blocks * inner
        one = dense_cycles(cpu, tile, rows, inner, data_bytes=4 * rows * inner, weight_bytes=weight_bytes)
        return -(-vectors // tile.out_blocks) * one

    tiles = [RegisterTile(*size, _UNROLL) for size in register_tiles(vectors, rows, cpu)]
    return min(tiles, key=cost)


_LEAST_PIXELS = 64
_SERIAL_NORM_VALUES = 8192
# Independent running sums, to hide the latency of an addition.
_WAYS = 4


@dataclass(frozen=True)
class GroupNorm2d:
    """Group norm of images of NCHW ``shape`` in ``groups`` of channels; with as many groups as channels,
    instance norm.
    """

    shape: tuple[int, int, int, int]
    groups: int
    epsilon: float

    @property
    def group_channels(self) -> int:
        """Channels of a group."""
        return self.shape[1] // self.groups

    @property
    def pixels(self) -> int:
        """Pixels of an image."""
        return self.shape[2] * self.shape[3]

    def is_covered(self, lanes: int) -> bool:
        """True if groups are whole vectors, or vectors whole groups."""
        return self.group_channels % lanes == 0 or lanes % self.group_channels == 0


@dataclass(frozen=True)
class _Bands:
    """Pixels of an image in ``count`` bands of ``size``, the last of which may have fewer."""

    pixels: int
    size: int

    @classmethod
    def of(cls, norm: GroupNorm2d, cpu: CpuTarget) -> _Bands:
        wanted = -(-_TASKS_PER_THREAD * cpu.threads // (norm.shape[0] * blocks(norm.shape[1], cpu.lanes)))
        return cls(norm.pixels, max(-(-norm.pixels // wanted), min(_LEAST_PIXELS, norm.pixels)))

    @property
    def count(self) -> int:
        return -(-self.pixels // self.size)

    def holds(self, band: int) -> int:
        """Return the number of pixels of ``band``."""
        return min(self.size, self.pixels - band * self.size)

    @contextmanager
    def each(self, norm: GroupNorm2d, cpu: CpuTarget) -> Iterator[tuple[Any, Any, Any, Any, Any]]:
        """Open a task per image, block of channels and band; yield these three, the first pixel and the end of the
        band.
        """
        count = blocks(norm.shape[1], cpu.lanes)
        tasks = norm.shape[0] * count * self.count
        serial = tasks * self.size * cpu.lanes < _SERIAL_NORM_VALUES
        with emit.loop(tasks) if serial else emit.tasks(tasks) as task:
            rest, band = emit.quotient(task, self.count), emit.bind(emit.remainder(task, self.count))
            image, block = emit.bind(emit.quotient(rest, count)), emit.bind(emit.remainder(rest, count))
            first = emit.bind(band * self.size)
            yield image, block, band, first, emit.bind(emit.smaller(first + self.size, self.pixels))


def statistics_shape(norm: GroupNorm2d, cpu: CpuTarget) -> tuple[int, ...]:
    """Return the shape of the result of :func:`channel_statistics`: (image, block, band, mean and sum of squares,
    lane).
    """
    return (norm.shape[0], blocks(norm.shape[1], cpu.lanes), _Bands.of(norm, cpu).count, 2, cpu.lanes)


def pack_group_norm(norm: GroupNorm2d, weight: np.ndarray, bias: np.ndarray, lanes: int) -> np.ndarray:
    """Return weights, then biases, (2, blocks, lanes), with zeros beyond the channels."""
    count = blocks(norm.shape[1], lanes)
    packed = np.zeros((2, count * lanes), np.float32)
    packed[:, : norm.shape[1]] = weight.reshape(-1), bias.reshape(-1)
    return packed.reshape(2, count, lanes)


def channel_statistics(norm: GroupNorm2d, cpu: CpuTarget, dtype: str = "float32") -> tirx.PrimFunc:
    """Build the kernel of the statistics: (data of ``dtype``, statistics). It reads every band twice, the second time
    from a cache.
    """
    lanes, bands = cpu.lanes, _Bands.of(norm, cpu)
    data_spec = TensorSpec(blocked_shape(norm.shape, lanes), "blocked", dtype)
    signature = Signature(data_spec, (), None, TensorSpec(statistics_shape(norm, cpu)))

    def body(data: Any, output: Any) -> None:
        with bands.each(norm, cpu) as (image, block, band, first, last):
            (sums,) = emit.registers(1, _WAYS, lanes)

            def total(value: Callable[[Any], Any]) -> Any:
                for each in sums:
                    emit.store(each, emit.splat(0.0, lanes), lanes=lanes)
                steps = emit.bind(emit.quotient(last - first, _WAYS))
                with emit.span(0, steps) as step:
                    for way, each in enumerate(sums):
                        pixel = emit.load(data, image, block, 0, first + step * _WAYS + way, lanes=lanes)
                        emit.store(each, emit.load(each, lanes=lanes) + value(pixel), lanes=lanes)
                with emit.span(first + steps * _WAYS, last) as rest:
                    pixel = emit.load(data, image, block, 0, rest, lanes=lanes)
                    emit.store(sums[0], emit.load(sums[0], lanes=lanes) + value(pixel), lanes=lanes)
                found = emit.load(sums[0], lanes=lanes)
                for each in sums[1:]:
                    found = found + emit.load(each, lanes=lanes)
                return T.bind(found)

            number = last - first
            number = float(number) if isinstance(number, int) else number.astype("float32")
            mean = T.bind(total(lambda pixel: pixel) / emit.splat(number, lanes))

            def square(pixel: Any) -> Any:
                difference = T.bind(pixel - mean)
                return difference * difference

            emit.store(output, total(square), image, block, band, 1, lanes=lanes)
            emit.store(output, mean, image, block, band, 0, lanes=lanes)

    return emit.kernel("channel_statistics", signature, body)


def group_norm(norm: GroupNorm2d, cpu: CpuTarget, dtype: str = "float32") -> tirx.PrimFunc:
    """Build the normalising kernel: (data, statistics, weights and biases, result), with data and result of
    ``dtype``.
    """
    lanes, bands = cpu.lanes, _Bands.of(norm, cpu)
    count = blocks(norm.shape[1], lanes)
    spec = TensorSpec(blocked_shape(norm.shape, lanes), "blocked", dtype)
    constants = (TensorSpec(statistics_shape(norm, cpu)), TensorSpec((2, count, lanes)))
    wide = max(1, norm.group_channels // lanes)  # blocks of a group
    inside = min(lanes, norm.group_channels)  # lanes of a group in one block
    values = norm.group_channels * norm.pixels

    def body(data: Any, statistics: Any, given: Any, output: Any) -> None:
        with bands.each(norm, cpu) as (image, block, _, first, last):
            start = emit.bind(emit.quotient(block, wide) * wide)
            (sums,) = emit.registers(1, 1, lanes)

            def total(value: Callable[[Any, int], Any]) -> Any:
                emit.store(sums[0], emit.splat(0.0, lanes), lanes=lanes)
                with emit.loop(wide) as offset:
                    for band in range(bands.count):
                        found = value((image, start + offset, band), band)
                        emit.store(sums[0], emit.load(sums[0], lanes=lanes) + found, lanes=lanes)
                return emit.total(emit.load(sums[0], lanes=lanes), lanes, inside)

            def weighted(at: Any, band: int) -> Any:
                return emit.load(statistics, *at, 0, lanes=lanes) * emit.splat(bands.holds(band), lanes)

            mean = T.bind(total(weighted) * emit.splat(1.0 / values, lanes))

            def squares(at: Any, band: int) -> Any:
                difference = T.bind(emit.load(statistics, *at, 0, lanes=lanes) - mean)
                own = emit.load(statistics, *at, 1, lanes=lanes)
                return own + difference * difference * emit.splat(bands.holds(band), lanes)

            variance = total(squares) * emit.splat(1.0 / values, lanes) + emit.splat(norm.epsilon, lanes)
            weight, bias = (T.bind(emit.load(given, row, block, lanes=lanes)) for row in (0, 1))
            factor = T.bind(weight / tirx.sqrt(variance))
            with emit.span(first, last) as pixel:
                value = emit.load(data, image, block, 0, pixel, lanes=lanes)
                emit.store(output, (value - mean) * factor + bias, image, block, 0, pixel, lanes=lanes)

    return emit.kernel("group_norm", Signature(spec, constants, None, spec), body)
