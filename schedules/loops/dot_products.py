"""Multiply-accumulate operations of the register tiles, by storage dtype of data and weights.

**Dense**: a step takes a group of adjacent input channels, one of float32, or as many of a narrower dtype as fill 32
bits, whose products one instruction adds to a 32-bit lane. Groups are contiguous in a blocked tensor, and the weights
of a step are packed lane by lane: (.., steps, V x group), a whole group for one output, then the next output.

**Depthwise**: a row of the window by dot products of 32-bit words of neighbouring columns, one channel per lane. A
bfloat16 vector and that of the next column are interleaved to words of two values, four vectors of bytes to words of
four. The weights define which bytes of a word are taps of which output: they are shifted to the position of the taps,
so that one word serves several outputs. Nothing is read beyond the row: at its ends words are shifted inwards, with
weights shifted accordingly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from costmodel.operators.layers import Conv2d, element_bytes
from schedules.contract.template import blocks, stored
from schedules.contract.vector_operations import DOT_BFLOAT16, DOT_UINT8
from schedules.loops import emit
from schedules.loops.emit import Axis, Expr


@dataclass(frozen=True)
class DotProduct:
    """Multiply-accumulate operation of one storage dtype."""

    # Dtype of data and weights.
    storage: str
    # Channels of a step.
    group: int
    # Dtype of one operand: a value or a word of adjacent values.
    word: str
    # Dtype of the accumulators.
    sums: str
    # Cycles until the result can be accumulated again.
    latency: float
    # ``multiply_add(sums, x, weights, lanes)`` on vectors.
    multiply_add: Callable[[Any, Any, Any, int], Any]

    def steps(self, channels: int) -> int:
        """Number of steps for ``channels`` input channels."""
        return -(-channels // self.group)

    def operand(self, buffer: Any, *indices: Expr) -> Any:
        """Operand of a step that multiplies the weights of all outputs: the group that begins at ``indices``."""
        if self.group == 1:
            return buffer[indices]
        return tirx.reinterpret(self.word, buffer[(*indices[:-1], tirx.Ramp(indices[-1], 1, self.group))])

    def last_operand(self, buffer: Any, *indices: Expr, count: int) -> Any:
        """Operand of the first ``count`` channels of a group, padded with zeros, without reading beyond them."""
        if count == self.group:
            return self.operand(buffer, *indices)
        return self.neighbours([buffer[(*indices[:-1], indices[-1] + index)] for index in range(count)], 1)

    def weights(self, buffer: Any, *indices: Expr, lanes: int, ahead: int = 0) -> Any:
        """Weights of one step, packed by :func:`pack_steps`; ``ahead``: see :func:`emit.ask_ahead`."""
        emit.ask_ahead(buffer, *indices, ahead=ahead)
        vector = buffer[(*indices, tirx.Ramp(0, 1, lanes * self.group))]
        return vector if self.group == 1 else tirx.reinterpret(f"{self.word}x{lanes}", vector)

    def neighbours(self, values: Sequence[Any], lanes: int) -> Any:
        """Vector of ``lanes`` words (a scalar for one) from up to ``group`` storage vectors, padded with zeros."""
        size = 8 * element_bytes(self.storage)
        suffix = "" if lanes == 1 else f"x{lanes}"
        total: Any = None
        for index, value in enumerate(values):
            word = tirx.reinterpret(f"uint{size}{suffix}", value).astype(f"{self.word}{suffix}")
            if total is None:
                total = word
                continue
            shift = tirx.const(index * size, self.word)
            shifted = tirx.shift_left(word, shift if lanes == 1 else tirx.Broadcast(shift, lanes))
            total = tirx.bitwise_or(total, shifted)
        return total

    def pack_steps(self, weight: np.ndarray) -> np.ndarray:
        """Pack FP32 (.., inputs, V) to storage (.., steps, V x group), padding the last group with zeros."""
        if self.group == 1:
            return stored(weight, self.storage)
        *outer, inputs, lanes = weight.shape
        padded = np.zeros((*outer, self.steps(inputs) * self.group, lanes), np.float32)
        padded[..., :inputs, :] = weight
        split = padded.reshape(*outer, self.steps(inputs), self.group, lanes)
        packed = np.swapaxes(split, -1, -2).reshape(*outer, self.steps(inputs), lanes * self.group)
        return stored(packed, self.storage)


def _fused_multiply_add(sums: Any, x: Any, weights: Any, lanes: int) -> Any:
    return sums + x * weights


def _dot_bfloat16(sums: Any, x: Any, weights: Any, lanes: int) -> Any:
    return emit.operation(DOT_BFLOAT16, lanes, sums, x, weights)


def _dot_uint8(sums: Any, x: Any, weights: Any, lanes: int) -> Any:
    return emit.operation(DOT_UINT8, lanes, sums, x, weights)


FLOAT32 = DotProduct("float32", 1, "float32", "float32", 4.0, _fused_multiply_add)
BFLOAT16 = DotProduct("bfloat16", 2, "int32", "float32", 6.0, _dot_bfloat16)
INT8 = DotProduct("int8", 4, "int32", "int32", 4.0, _dot_uint8)
_BY_STORAGE = {each.storage: each for each in (FLOAT32, BFLOAT16, INT8)}


def dot_product(dtype: str) -> DotProduct:
    """Operation for data and weights stored as ``dtype``; raises ``KeyError`` for an unsupported one."""
    return _BY_STORAGE[dtype]


_BYTES = INT8.group
# Wider windows have too many weights per row for the registers.
_WIDEST = 7


def sums_pairs(conv: Conv2d) -> bool:
    """True if a bfloat16 depthwise convolution has adjacent columns in its window, two of which form a dot product."""
    return conv.dtype == "bfloat16" and conv.kernel[1] > 1 and conv.dilation[1] == 1


def sums_quads(conv: Conv2d) -> bool:
    """True if an int8 depthwise convolution uses words of four adjacent columns: rows are long enough."""
    small = max(conv.kernel) <= _WIDEST and conv.width >= _BYTES
    return conv.dtype == "int8" and conv.is_depthwise and small and conv.kernel[1] > 1 and conv.dilation[1] == 1


@dataclass(frozen=True)
class TapPlaces:
    """Taps of a row in a word: tap ``first`` at byte ``place``, the ``count - 1`` following ones at the next bytes."""

    place: int
    first: int
    count: int


@dataclass(frozen=True)
class QuadWord:
    """A word and its users."""

    # First column, relative to the first column read by the first output of the tile.
    offset: int
    # (Output of the tile, taps that it reads from the word).
    users: tuple[tuple[int, TapPlaces], ...]


@dataclass(frozen=True)
class QuadPlan:
    """Groups of ``outputs`` neighbours, of ``kernel`` taps along a row each, and the ``words`` that they all read."""

    kernel: int
    stride: int
    outputs: int
    words: int

    @property
    def reach(self) -> int:
        """Columns, from the first tap of an output on, that its words may cover."""
        return _BYTES * self.words

    @property
    def products(self) -> float:
        """Dot products per output."""
        return sum(len(word.users) for word in self.tile(self.outputs)) / self.outputs

    def tile(self, width: int, start: int | None = None, axis: Axis | None = None) -> list[QuadWord]:
        """Words of ``width`` outputs, inside the row (``start`` None) or from output ``start`` of ``axis`` on.

        In the latter case they stay within the columns of ``axis``.
        """
        found = []
        for group in range(0, width, self.outputs):
            members = range(group, min(group + self.outputs, width))
            first = group * self.stride
            last = members[-1] * self.stride + self.kernel
            for begin in range(first, last, _BYTES):
                columns = range(begin, min(begin + _BYTES, last))
                offset = begin
                if axis is not None and start is not None:
                    origin = start * axis.stride - axis.before
                    columns = range(max(columns.start, -origin), min(columns.stop, axis.size - origin))
                    if not columns:
                        continue
                    offset = min(max(begin, -origin), axis.size - _BYTES - origin)
                users = [(member, self._places(member * self.stride, columns, offset)) for member in members]
                found.append(QuadWord(offset, tuple((member, taps) for member, taps in users if taps is not None)))
        return [word for word in found if word.users]

    def _places(self, window: int, columns: range, offset: int) -> TapPlaces | None:
        """Taps in ``columns`` of the word at ``offset`` for the output whose window begins at column ``window``, or
        None.
        """
        begin, end = max(window, columns.start), min(window + self.kernel, columns.stop)
        return TapPlaces(begin - offset, begin - window, end - begin) if begin < end else None


def quad_plan(conv: Conv2d) -> QuadPlan:
    """Plan with the fewest words and products per output."""
    kernel, stride = conv.kernel[1], conv.stride[1]

    def plans() -> Iterator[tuple[float, int, QuadPlan]]:
        for outputs in range(1, _BYTES + 1):
            words = -(-((outputs - 1) * stride + kernel) // _BYTES)
            plan = QuadPlan(kernel, stride, outputs, words)
            yield plan.products + words / outputs, outputs, plan

    return min(plans(), key=lambda each: each[:2])[2]


def pack_depthwise_quads(weight: np.ndarray, lanes: int) -> np.ndarray:
    """Pack (C, 1, KH, KW) integers to int8 (ceil(C/V), KH, ceil(KW/4), V x 4).

    The taps of a row are packed four to a word, padded with zeros.
    """
    channels, _, kernel_height, kernel_width = weight.shape
    count, words = blocks(channels, lanes), -(-kernel_width // _BYTES)
    packed = np.zeros((count * lanes, kernel_height, words * _BYTES), np.int8)
    packed[:channels, :, :kernel_width] = weight[:, 0]
    split = packed.reshape(count, lanes, kernel_height, words, _BYTES).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(split).reshape(count, kernel_height, words, lanes * _BYTES)


def quad_weights_shape(conv: Conv2d, lanes: int) -> tuple[int, ...]:
    """Shape of the result of :func:`pack_depthwise_quads`."""
    count, words = blocks(conv.in_channels, lanes), -(-conv.kernel[1] // _BYTES)
    return (count, conv.kernel[0], words, lanes * _BYTES)


def quads(buffer: Any, *indices: Expr, lanes: int) -> Any:
    """32-bit words of four adjacent byte vectors, starting at ``indices`` with the column last.

    The first vector is in the lowest bits.
    """
    vector = buffer[(*indices, tirx.Ramp(0, 1, _BYTES * lanes))]
    # Transpose four channels x four columns at a time, first as words, then inside them.
    groups = lanes // _BYTES
    words = tirx.reinterpret(f"int32x{lanes}", vector)
    words = emit.shuffle([words], [column * groups + group for group in range(groups) for column in range(_BYTES)])
    single = tirx.reinterpret(f"uint8x{_BYTES * lanes}", words)
    order = [
        16 * group + 4 * column + channel
        for group in range(groups)
        for channel in range(_BYTES)
        for column in range(_BYTES)
    ]
    return tirx.reinterpret(f"int32x{lanes}", emit.shuffle([single], order))


def quad_weights(vector: Callable[[int], Any], taps: TapPlaces, kernel: int, lanes: int) -> Any:
    """Words of weights with ``taps`` at their positions, and zeros elsewhere.

    ``vector(index)``: weights of the taps from 4 x ``index`` on, from :func:`pack_depthwise_quads`.
    """
    total: Any = None
    inside = set(range(taps.place, taps.place + taps.count))
    beside: set[int] = set()
    for index in range(taps.first // _BYTES, (taps.first + taps.count - 1) // _BYTES + 1):
        word = tirx.reinterpret(f"uint32x{lanes}", vector(index))
        move = _BYTES * index - taps.first + taps.place
        beside |= {tap + move for tap in range(min(_BYTES, kernel - _BYTES * index))} & set(range(_BYTES))
        if move:
            shift = tirx.shift_left if move > 0 else tirx.shift_right
            word = shift(word, tirx.Broadcast(tirx.const(8 * abs(move), "uint32"), lanes))
        total = word if total is None else tirx.bitwise_or(total, word)
    if beside - inside:
        mask = sum(0xFF << (8 * byte) for byte in inside)
        total = tirx.bitwise_and(total, tirx.Broadcast(tirx.const(mask, "uint32"), lanes))
    return tirx.reinterpret(f"int32x{lanes}", total)
