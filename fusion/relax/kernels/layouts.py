"""Kernels between the plain (NCHW) and the blocked layout, by V x V transpositions in vector registers; and between
rows of pixels (N, H W, C), the layout of attention, and the blocked layout, by copies of vectors. Source and target may
have different dtypes.

A tile is V pixels of V channels: V vector loads, ``log2 V`` stages of shuffles, V vector stores. The last tile of an
image is moved back to end with it, so that every access is a whole vector; images smaller than V pixels are copied by
scalars.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.contract.template import Signature, TensorSpec, blocked_shape
from schedules.loops import emit

# Starting a parallel region costs about as much as moving this many values on one core.
_SERIAL_VALUES = 4096
_TILES_PER_TASK = 8

Shape = tuple[int, int, int, int]


def to_blocked(shape: Shape, lanes: int, source: str = "float32", target: str = "float32") -> tirx.PrimFunc:
    """Build the kernel from NCHW of dtype ``source`` to (N, ceil(C/V), H, W, V) of ``target``; lanes beyond the
    channels become zero.
    """
    geometry = _Geometry(shape, lanes)

    def body(data: Any, output: Any) -> None:
        def tile(image: Any, block: Any, pixel: Any, channels: int) -> None:
            rows = [
                T.bind(_vector(data, image, block * lanes + lane, 0, _pixels(pixel, lanes), lanes=lanes))
                if lane < channels
                else emit.splat(0.0, lanes)
                for lane in range(lanes)
            ]
            for offset, row in enumerate(_transpose(rows, lanes)):
                emit.store(output, row, image, block, 0, pixel + offset, lanes=lanes)

        def scalars(image: Any, block: Any, channels: int) -> None:
            with emit.loop(geometry.pixels) as pixel:
                places = [(image, block * lanes + lane, 0, pixel) for lane in range(channels)]
                emit.store(output, _gathered(data, places, source, lanes), image, block, 0, pixel, lanes=lanes)

        geometry.emit(tile, scalars)

    return emit.kernel("to_blocked", _signature(shape, lanes, source, target, blocked_output=True), body)


def to_plain(shape: Shape, lanes: int, source: str = "float32", target: str = "float32") -> tirx.PrimFunc:
    """Build the kernel from (N, ceil(C/V), H, W, V) of dtype ``source`` to NCHW of ``shape`` and dtype ``target``."""
    geometry = _Geometry(shape, lanes)

    def body(data: Any, output: Any) -> None:
        def tile(image: Any, block: Any, pixel: Any, channels: int) -> None:
            pixels = [T.bind(emit.load(data, image, block, 0, pixel + offset, lanes=lanes)) for offset in range(lanes)]
            for lane, row in enumerate(_transpose(pixels, lanes)[:channels]):
                place = [image, block * lanes + lane, 0, _pixels(pixel, lanes)]
                emit.store_at(output, row, *place, lanes=lanes)

        def scalars(image: Any, block: Any, channels: int) -> None:
            with emit.loop(geometry.pixels) as pixel:
                places = [(image, block * lanes + lane, 0, pixel) for lane in range(channels)]
                _scatter(output, emit.load(data, image, block, 0, pixel, lanes=lanes), places, target, lanes)

        geometry.emit(tile, scalars)

    return emit.kernel("to_plain", _signature(shape, lanes, source, target, blocked_output=False), body)


def rows_to_blocked(shape: Shape, lanes: int, dtype: str = "float32") -> tirx.PrimFunc:
    """Build the kernel from (N, H W, C) of ``dtype`` to (N, ceil(C/V), H, W, V) of float32 for an image of NCHW
    ``shape``; lanes beyond the channels become zero.
    """
    geometry = _Geometry(shape, lanes)

    def body(data: Any, output: Any) -> None:
        def pixel(image: Any, block: Any, at: Any, channels: int) -> None:
            if channels == lanes:
                value = _vector(data, image, at, _pixels(block * lanes, lanes), lanes=lanes)
                emit.store(output, value, image, block, 0, at, lanes=lanes)
                return
            places = [(image, at, block * lanes + lane) for lane in range(channels)]
            emit.store(output, _gathered(data, places, dtype, lanes), image, block, 0, at, lanes=lanes)

        geometry.emit_pixels(pixel)

    rows, blocked = TensorSpec(_rows(shape), "plain", dtype), TensorSpec(blocked_shape(shape, lanes), "blocked")
    return emit.kernel("rows_to_blocked", Signature(rows, (), None, blocked), body)


def blocked_to_rows(shape: Shape, lanes: int, dtype: str = "float32") -> tirx.PrimFunc:
    """Build the kernel from (N, ceil(C/V), H, W, V) of ``dtype`` to (N, H W, C) of float32 for an image of NCHW
    ``shape``.
    """
    geometry = _Geometry(shape, lanes)

    def body(data: Any, output: Any) -> None:
        def pixel(image: Any, block: Any, at: Any, channels: int) -> None:
            if channels == lanes:
                value = emit.load(data, image, block, 0, at, lanes=lanes)
                emit.store_at(output, value, image, at, _pixels(block * lanes, lanes), lanes=lanes)
                return
            places = [(image, at, block * lanes + lane) for lane in range(channels)]
            _scatter(output, emit.load(data, image, block, 0, at, lanes=lanes), places, "float32", lanes)

        geometry.emit_pixels(pixel)

    rows, blocked = TensorSpec(_rows(shape)), TensorSpec(blocked_shape(shape, lanes), "blocked", dtype)
    return emit.kernel("blocked_to_rows", Signature(blocked, (), None, rows), body)


def _rows(shape: Shape) -> tuple[int, int, int]:
    batch, channels, height, width = shape
    return (batch, height * width, channels)


def _signature(shape: Shape, lanes: int, source: str, target: str, blocked_output: bool) -> Signature:
    blocked = blocked_shape(shape, lanes)
    if blocked_output:
        return Signature(TensorSpec(shape, "plain", source), (), None, TensorSpec(blocked, "blocked", target))
    return Signature(TensorSpec(blocked, "blocked", source), (), None, TensorSpec(shape, "plain", target))


@dataclass(frozen=True)
class _Geometry:
    """Division of an image into tiles and tasks."""

    shape: Shape
    lanes: int

    @property
    def pixels(self) -> int:
        return self.shape[2] * self.shape[3]

    def emit(self, tile: Callable[..., None], scalars: Callable[..., None]) -> None:
        """Emit loops over whole channel blocks, and over the last block if it is partial."""
        whole, rest = divmod(self.shape[1], self.lanes)
        for first, count, channels in ((0, whole, self.lanes), (whole, min(rest, 1), rest)):
            if count and self.pixels < self.lanes:
                with self._tasks(count, 1) as task:
                    image, block = _split(task, count)
                    scalars(image, first + block, channels)
            elif count:
                self._emit_tiles(first, count, channels, tile)

    def _emit_tiles(self, first: int, count: int, channels: int, tile: Callable[..., None]) -> None:
        tiles = -(-self.pixels // self.lanes)
        chunks = -(-tiles // _TILES_PER_TASK)
        with self._tasks(count, chunks) as task:
            rest, chunk = _split(task, chunks)
            image, block = _split(rest, count)
            with emit.loop(min(tiles, _TILES_PER_TASK)) as index:
                start = (chunk * _TILES_PER_TASK + index) * self.lanes
                pixel = emit.clamp_start(start, self.lanes, self.pixels)
                tile(image, first + block, pixel, channels)

    def emit_pixels(self, pixel: Callable[..., None]) -> None:
        """Emit ``pixel(image, block, pixel, channels of the block)`` for every pixel of every block."""
        whole, rest = divmod(self.shape[1], self.lanes)
        size = _TILES_PER_TASK * self.lanes
        chunks = -(-self.pixels // size)
        for first, count, channels in ((0, whole, self.lanes), (whole, min(rest, 1), rest)):
            if not count:
                continue
            with self._tasks(count, chunks) as task:
                others, chunk = _split(task, chunks)
                image, block = _split(others, count)
                start = emit.bind(chunk * size)
                with emit.span(start, emit.bind(emit.smaller(start + size, self.pixels))) as at:
                    pixel(image, first + block, at, channels)

    def _tasks(self, count: int, chunks: int) -> Any:
        number = self.shape[0] * count * chunks
        return emit.loop(number) if math.prod(self.shape) < _SERIAL_VALUES else emit.tasks(number)


def _vector(buffer: Any, *indices: Any, lanes: int) -> Any:
    """Return the vector at ``indices``, the last of which is a ramp, in float32."""
    value = buffer[indices]
    return value if buffer.dtype == "float32" else emit.widened(value, lanes)


def _gathered(buffer: Any, places: Sequence[tuple[Any, ...]], dtype: str, lanes: int) -> Any:
    """Return a vector of the scalars at ``places`` of ``buffer`` (of ``dtype``), followed by zeros."""
    ((register,),) = emit.registers(1, 1, lanes, dtype)
    zero: Any = tirx.FloatImm("float32", 0.0)
    if dtype != "float32":
        zero = tirx.const(0, "uint8") if dtype == "uint8" else tirx.reinterpret(dtype, tirx.const(0, "uint16"))
    for lane in range(lanes):
        T.buffer_store(register, buffer[places[lane]] if lane < len(places) else zero, [lane])
    return emit.load(register, lanes=lanes)


def _scatter(buffer: Any, value: Any, places: Sequence[tuple[Any, ...]], dtype: str, lanes: int) -> None:
    """Store the first lanes of ``value`` to ``places`` of ``buffer`` (of ``dtype``)."""
    ((register,),) = emit.registers(1, 1, lanes, dtype)
    emit.store(register, value, lanes=lanes)
    for lane, place in enumerate(places):
        T.buffer_store(buffer, register[lane], list(place))


def _pixels(first: Any, lanes: int) -> Any:
    return tirx.Ramp(tirx.const(first, "int32") if isinstance(first, int) else first, 1, lanes)


def _split(index: Any, extent: int) -> tuple[Any, Any]:
    return emit.quotient(index, extent), emit.remainder(index, extent)


def _transpose(rows: Sequence[Any], lanes: int) -> list[Any]:
    """Return the columns of a square of vectors: at each stage, pairs of vectors exchange halves."""
    current = list(rows)
    step = 1
    while step < lanes:
        following = list(current)
        low = [lane if not lane & step else lanes + lane - step for lane in range(lanes)]
        high = [lane + step if not lane & step else lanes + lane for lane in range(lanes)]
        for index in range(lanes):
            if not index & step:
                pair = [current[index], current[index + step]]
                following[index] = T.bind(emit.shuffle(pair, low))
                following[index + step] = T.bind(emit.shuffle(pair, high))
        current = following
        step *= 2
    return current
