"""Group and instance norms of blocked images: a kernel for the statistics of every channel, and one that normalises.

The statistics are means and sums of squared differences from them, over bands of pixels; they are combined by the
method of Chan, Golub and LeVeque (1979), so that a mean far from zero costs no digits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.contract.blocked_layout import blocked_shape, blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Signature, TensorSpec
from schedules.loops import emit

_TASKS_PER_THREAD = 4
_LEAST_PIXELS = 64
_SERIAL_VALUES = 8192
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
        serial = tasks * self.size * cpu.lanes < _SERIAL_VALUES
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
