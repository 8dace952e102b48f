"""Vectorised kernels of the byte steps of :mod:`fusion.relax.integer_calls`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from fusion.relax.integer_calls import (
    FACTORS,
    RESIZE_FACTORS,
    ByteMean,
    BytePair,
    ByteResize,
    ByteTable,
    ByteWindow,
    PairKind,
)
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.kernel_compilation import VECTOR_ATTRIBUTE
from schedules.contract.template import Signature, TensorSpec, blocked_shape, blocks
from schedules.contract.vector_operations import ADD_PRODUCT, LOOK_UP, MULTIPLY_ADD, TABLES
from schedules.kernels.pool_kernel import Pool, PoolKnobs, WindowArithmetic, window_body
from schedules.loops import emit

# One thread looks up, or computes with, fewer bytes than this before other threads have started.
_SERIAL_LOOKUPS = 65536
_SERIAL_BYTES = 16384
_TASKS_PER_THREAD = 4
_WAYS = 8


def table_kernel(count: int, cpu: CpuTarget) -> tirx.PrimFunc:
    """Build the table look-up kernel: (``count`` bytes, table of 256, result)."""
    lanes, wide = cpu.lanes, 2 * cpu.lanes
    data, table = TensorSpec((count,), dtype="uint8"), TensorSpec((256,), dtype="uint8")

    def body(source: Any, entries: Any, output: Any) -> None:
        if count < wide:
            with emit.loop(count) as place:
                T.buffer_store(output, entries[source[place].astype("int32")], [place])
            return
        with _vectors(-(-count // wide), count < _SERIAL_LOOKUPS, cpu) as part:
            words = [T.bind(tirx.reinterpret("uint16x32", entries[tirx.Ramp(64 * i, 1, 64)])) for i in range(4)]
            with emit.span(*part) as vector:
                at = tirx.Ramp(emit.clamp_start(vector * wide, wide, count), 1, wide)
                T.buffer_store(output, emit.operation(LOOK_UP, lanes, source[at], *words), [at])

    function = emit.kernel("byte_table", Signature(data, (table,), None, data), body)
    return function.with_attr(VECTOR_ATTRIBUTE, f"{TABLES},uint8")


def pair_kernel(kind: PairKind, count: int, cpu: CpuTarget) -> tirx.PrimFunc:
    """Build the kernel of a sum or product: (``count`` bytes, ``count`` bytes, factors, result), ``count`` at least a
    vector.
    """
    lanes, data = cpu.lanes, TensorSpec((count,), dtype="uint8")

    def body(left: Any, right: Any, factors: Any, output: Any) -> None:
        with _vectors(-(-count // lanes), count < _SERIAL_BYTES, cpu) as part:
            shared = [T.bind(emit.splat(factors[place], lanes)) for place in range(FACTORS[BytePair])]
            with emit.span(*part) as vector:
                at = tirx.Ramp(emit.clamp_start(vector * lanes, lanes, count), 1, lanes)
                first, second = (emit.load_at(each, at, lanes=lanes) for each in (left, right))
                emit.store_at(output, _paired(kind, first, second, shared, lanes), at, lanes=lanes)

    return emit.kernel("byte_pair", Signature(data, (data, TensorSpec((FACTORS[BytePair],))), None, data), body)


def gate_kernel(step: BytePair, cpu: CpuTarget) -> tirx.PrimFunc:
    """Build the kernel of a product per channel: (blocked image, blocked (N, C, 1, 1), factors, blocked result)."""
    assert len(step.shape) == 4
    lanes = cpu.lanes
    data, gate = (TensorSpec(blocked_shape(shape, lanes), "blocked", "uint8") for shape in (step.shape, step.right))

    def body(image: Any, right: Any, factors: Any, output: Any) -> None:
        with _pixels(data.shape, cpu) as (sample, block, pixels):
            shared = [T.bind(emit.splat(factors[place], lanes)) for place in range(FACTORS[BytePair])]
            factor = T.bind(emit.load(right, sample, block, 0, 0, lanes=lanes))
            with emit.span(*pixels) as pixel:
                value = emit.load(image, sample, block, 0, pixel, lanes=lanes)
                result = _paired(step.kind, value, factor, shared, lanes)
                emit.store(output, result, sample, block, 0, pixel, lanes=lanes)

    return emit.kernel("byte_gate", Signature(data, (gate, TensorSpec((FACTORS[BytePair],))), None, data), body)


def channel_table_kernel(step: ByteTable, cpu: CpuTarget) -> tirx.PrimFunc:
    """Build the kernel of look-ups per channel: (blocked image, tables of :func:`pack_channel_tables`,
    blocked result).
    """
    assert len(step.shape) == 4
    lanes = cpu.lanes
    data = TensorSpec(blocked_shape(step.shape, lanes), "blocked", "uint8")
    tables = TensorSpec((data.shape[1], lanes, 256), dtype="uint8")

    def body(image: Any, entries: Any, output: Any) -> None:
        with _pixels(data.shape, cpu) as (sample, block, pixels), emit.span(*pixels) as pixel:
            for lane in range(lanes):
                at = [sample, block, 0, pixel, lane]
                place = image[tuple(at)].astype("int32")
                T.buffer_store(output, entries[block, lane, place], at)

    return emit.kernel("byte_channel_table", Signature(data, (tables,), None, data), body)


def pack_channel_tables(tables: np.ndarray, lanes: int) -> np.ndarray:
    """Return tables (C, 256) as (blocks of channels, ``lanes``, 256), with zeros beyond the channels."""
    count = blocks(len(tables), lanes)
    packed = np.zeros((count * lanes, 256), np.uint8)
    packed[: len(tables)] = tables
    return packed.reshape(count, lanes, 256)


def window_kernel(step: ByteWindow, cpu: CpuTarget) -> tirx.PrimFunc:
    """Build the average pooling kernel: (blocked image, factors, blocked result), with the loops of float pooling."""
    lanes, pool = cpu.lanes, step.pool
    data = TensorSpec(blocked_shape(step.shape, lanes), "blocked", "uint8")
    target = TensorSpec(blocked_shape(step.result, lanes), "blocked", "uint8")

    def arithmetic(factors: Any) -> WindowArithmetic:
        shared = [T.bind(emit.splat(factors[place], lanes)) for place in range(FACTORS[ByteWindow])]
        zero, scale, result_scale, result_zero, low, high, offset = shared

        def finish(value: Any, count: Any) -> Any:
            number = emit.splat(float(count) if isinstance(count, int) else count.astype("float32"), lanes)
            return _bytes(value / number / result_scale + result_zero, low, high, offset, lanes)

        return WindowArithmetic(
            0.0, lambda value, pixel: emit.operation(ADD_PRODUCT, lanes, pixel - zero, scale, value), finish
        )

    knobs = PoolKnobs(**Pool().space(pool, cpu)[0])
    signature = Signature(data, (TensorSpec((FACTORS[ByteWindow],)),), None, target)
    return emit.kernel("byte_window", signature, window_body(pool, knobs, cpu, arithmetic))


def byte_resize_kernel(step: ByteResize, cpu: CpuTarget) -> tirx.PrimFunc:
    """Build the resize kernel: (blocked image, row pixels, column pixels, row weights, column weights, factors, blocked
    result).
    """
    lanes = cpu.lanes
    data = TensorSpec(blocked_shape(step.shape, lanes), "blocked", "uint8")
    target = TensorSpec(blocked_shape(step.result, lanes), "blocked", "uint8")
    tables = [TensorSpec(table.shape, dtype=str(table.dtype)) for table in step.tables()]
    batch, count, rows, columns, _ = target.shape
    bands = min(rows, max(1, -(-_TASKS_PER_THREAD * cpu.threads // (batch * count))))
    band, tasks = -(-rows // bands), batch * count * bands

    def body(image: Any, *rest: Any) -> None:
        row_pixels, column_pixels, down, across, factors, output = rest
        serial = tasks * band * columns * lanes < _SERIAL_BYTES
        with emit.loop(tasks) if serial else emit.tasks(tasks) as task:
            zero, scale, result_scale, result_zero, low, high = (
                T.bind(emit.splat(factors[place], lanes)) for place in range(RESIZE_FACTORS)
            )
            others, first = emit.quotient(task, bands), emit.bind(emit.remainder(task, bands) * band)
            sample, block = emit.bind(emit.quotient(others, count)), emit.bind(emit.remainder(others, count))
            with emit.span(first, emit.bind(emit.smaller(first + band, rows))) as y:
                lines = [(T.bind(row_pixels[tap, y]), T.bind(down[tap, y])) for tap in range(2)]
                with emit.loop(columns) as x:
                    places = [(T.bind(column_pixels[tap, x]), T.bind(across[tap, x])) for tap in range(2)]
                    total = emit.splat(0.0, lanes)
                    for row, below in lines:
                        for column, beside in places:
                            pixel = emit.load(image, sample, block, row, column, lanes=lanes)
                            weight = emit.splat(T.bind(beside * below), lanes)
                            total = emit.operation(ADD_PRODUCT, lanes, weight, (pixel - zero) * scale, total)
                    if step.cut_off:
                        result = (total.astype(f"int32x{lanes}") + result_zero.astype(f"int32x{lanes}")).astype(
                            f"float32x{lanes}"
                        )
                        result = tirx.min(tirx.max(result, low), high)
                        result = result.astype(f"int32x{lanes}").astype(f"uint8x{lanes}")
                    else:
                        result = _bytes(total / result_scale, low - result_zero, high - result_zero, result_zero, lanes)
                    emit.store(output, result, sample, block, y, x, lanes=lanes)

    signature = Signature(data, (*tables, TensorSpec((RESIZE_FACTORS,))), None, target)
    return emit.kernel("byte_resize", signature, body)


def mean_kernel(step: ByteMean, cpu: CpuTarget) -> tirx.PrimFunc:
    """Build the kernel of a global average: (blocked image, factors, blocked (N, C, 1, 1))."""
    lanes = cpu.lanes
    data = TensorSpec(blocked_shape(step.shape, lanes), "blocked", "uint8")
    target = TensorSpec(blocked_shape(step.result, lanes), "blocked", "uint8")
    batch, count, height, width, _ = data.shape
    pixels = height * width
    ways = min(_WAYS, pixels)

    def body(image: Any, factors: Any, output: Any) -> None:
        tasks = batch * count
        serial = tasks * pixels * lanes < _SERIAL_BYTES
        with emit.loop(tasks) if serial else emit.tasks(tasks) as task:
            shared = [T.bind(emit.splat(factors[place], lanes)) for place in range(FACTORS[ByteMean])]
            sample, block = emit.bind(emit.quotient(task, count)), emit.bind(emit.remainder(task, count))
            (sums,) = emit.registers(1, ways, lanes)
            for each in sums:
                emit.store(each, emit.splat(0.0, lanes), lanes=lanes)

            def add(register: Any, pixel: Any) -> None:
                value = emit.load(image, sample, block, 0, pixel, lanes=lanes)
                emit.store(register, emit.load(register, lanes=lanes) + value, lanes=lanes)

            with emit.loop(pixels // ways) as step_:
                for way, each in enumerate(sums):
                    add(each, step_ * ways + way)
            for rest in range(pixels // ways * ways, pixels):
                add(sums[0], rest)
            total = emit.load(sums[0], lanes=lanes)
            for each in sums[1:]:
                total = total + emit.load(each, lanes=lanes)
            zeros, ratio, zero, low, high = shared
            result = _bytes((total - zeros) * ratio, low, high, zero, lanes)
            emit.store(output, result, sample, block, 0, 0, lanes=lanes)

    return emit.kernel("byte_mean", Signature(data, (TensorSpec((FACTORS[ByteMean],)),), None, target), body)


def _paired(kind: PairKind, left: Any, right: Any, factors: list[Any], lanes: int) -> Any:
    """Return a vector of sums or products, as :func:`fusion.relax.integer_calls.compute_pair` specifies them."""
    first, second, fixed, low, high, ratio, offset = factors
    if kind == "add":
        value = emit.operation(MULTIPLY_ADD, lanes, right - offset, second, fixed)
        value = emit.operation(MULTIPLY_ADD, lanes, left - offset, first, value)
    else:
        value = emit.operation(ADD_PRODUCT, lanes, (left - first) * (right - second), ratio, fixed)
    return _bytes(value, low, high, offset, lanes)


def _bytes(value: Any, low: Any, high: Any, added: Any, lanes: int) -> Any:
    """Return an FP32 vector clipped to the bounds, rounded to nearest, plus an integer, as bytes."""
    whole = emit.nearest(tirx.min(tirx.max(value, low), high), lanes) + added.astype(f"int32x{lanes}")
    return whole.astype(f"uint8x{lanes}")


@contextmanager
def _pixels(shape: tuple[int, ...], cpu: CpuTarget) -> Iterator[tuple[Any, Any, tuple[Any, Any]]]:
    """Open parallel tasks over a blocked image of ``shape``; yield sample, block, and (first pixel, end pixel) of the
    task.
    """
    batch, count, height, width, lanes = shape
    pixels = height * width
    size = max(1, -(-pixels * batch * count // (_TASKS_PER_THREAD * cpu.threads)))
    chunks = -(-pixels // min(size, pixels))
    chunk = -(-pixels // chunks)
    tasks = batch * count * chunks
    serial = batch * count * pixels * lanes < _SERIAL_BYTES
    with emit.loop(tasks) if serial else emit.tasks(tasks) as task:
        rest, first = emit.quotient(task, chunks), emit.bind(emit.remainder(task, chunks) * chunk)
        sample, block = emit.bind(emit.quotient(rest, count)), emit.bind(emit.remainder(rest, count))
        yield sample, block, (first, emit.bind(emit.smaller(first + chunk, pixels)))


@contextmanager
def _vectors(count: int, serial: bool, cpu: CpuTarget) -> Iterator[tuple[Any, Any]]:
    """Open parallel tasks over ``count`` vectors; yield the first vector and the end of each task."""
    tasks = 1 if serial else min(count, _TASKS_PER_THREAD * cpu.threads)
    size = -(-count // tasks)
    with emit.tasks(-(-count // size)) as task:
        first = emit.bind(task * size)
        yield first, emit.bind(emit.smaller(first + size, count))
