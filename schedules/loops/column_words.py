"""Rows of a depthwise window by dot products: 32-bit words of adjacent columns, one channel per lane.

A vector of bfloat16 and that of the next column are interleaved to words of two, four of bytes to words of four. The
weights, shifted to the positions of the taps, select which bytes of a word belong to which output: one word serves
several outputs, and nothing is read outside the row: at its ends a word is moved inwards and the weights are shifted
with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from costmodel.operators.layers import Conv2d
from schedules.contract.blocked_layout import blocks
from schedules.loops import emit
from schedules.loops.dot_products import INT8
from schedules.loops.emit import Axis, Expr

_BYTES = INT8.group
# Limit of the window width: for wider windows the registers cannot hold the weights of a row.
_WIDEST = 7


def sums_pairs(conv: Conv2d) -> bool:
    """True if a depthwise convolution of bfloat16 has adjacent columns in its window, two of which one dot product
    multiplies.
    """
    return conv.dtype == "bfloat16" and conv.kernel[1] > 1 and conv.dilation[1] == 1


def sums_quads(conv: Conv2d) -> bool:
    """True if a depthwise convolution of bytes multiplies up to four adjacent columns at a time; the row must hold
    four.
    """
    small = max(conv.kernel) <= _WIDEST and conv.width >= _BYTES
    return conv.dtype == "int8" and conv.is_depthwise and small and conv.kernel[1] > 1 and conv.dilation[1] == 1


@dataclass(frozen=True)
class TapPlaces:
    """Position of taps of a row in a word: ``count`` taps from ``first`` on, the first at byte ``place``."""

    place: int
    first: int
    count: int


@dataclass(frozen=True)
class QuadWord:
    """Word of four columns that is used by several outputs of a tile."""

    # Start of the word in columns from the first column that the first output of the tile reads.
    offset: int
    # Outputs of the tile that use the word, and their taps in it.
    users: tuple[tuple[int, TapPlaces], ...]


@dataclass(frozen=True)
class QuadPlan:
    """Division of the outputs of a row, with a window of ``kernel`` taps, into groups of ``outputs`` that share
    ``words`` words.
    """

    kernel: int
    stride: int
    outputs: int
    words: int

    @property
    def reach(self) -> int:
        """Columns from the first tap of an output on that its words may cover."""
        return _BYTES * self.words

    @property
    def products(self) -> float:
        """Dot products per output."""
        return sum(len(word.users) for word in self.tile(self.outputs)) / self.outputs

    def tile(self, width: int, start: int | None = None, axis: Axis | None = None) -> list[QuadWord]:
        """Return the words of ``width`` outputs: inside the row (``start`` None), or from the output ``start`` of
        ``axis`` on, where the words stay within its columns.
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
        """Return the taps of the output whose window begins at column ``window`` in ``columns`` of the word at
        ``offset``, or None.
        """
        begin, end = max(window, columns.start), min(window + self.kernel, columns.stop)
        return TapPlaces(begin - offset, begin - window, end - begin) if begin < end else None


def quad_plan(conv: Conv2d) -> QuadPlan:
    """Return the groups with the fewest words and products per output."""
    kernel, stride = conv.kernel[1], conv.stride[1]

    def plans() -> Iterator[tuple[float, int, QuadPlan]]:
        for outputs in range(1, _BYTES + 1):
            words = -(-((outputs - 1) * stride + kernel) // _BYTES)
            plan = QuadPlan(kernel, stride, outputs, words)
            yield plan.products + words / outputs, outputs, plan

    return min(plans(), key=lambda each: each[:2])[2]


def pack_depthwise_quads(weight: np.ndarray, lanes: int) -> np.ndarray:
    """Pack integers (C, 1, KH, KW) to int8 (ceil(C/V), KH, ceil(KW/4), V x 4): the taps of a row, four to a word,
    followed by zeros.
    """
    channels, _, kernel_height, kernel_width = weight.shape
    count, words = blocks(channels, lanes), -(-kernel_width // _BYTES)
    packed = np.zeros((count * lanes, kernel_height, words * _BYTES), np.int8)
    packed[:channels, :, :kernel_width] = weight[:, 0]
    split = packed.reshape(count, lanes, kernel_height, words, _BYTES).transpose(0, 2, 3, 1, 4)
    return np.ascontiguousarray(split).reshape(count, kernel_height, words, lanes * _BYTES)


def quad_weights_shape(conv: Conv2d, lanes: int) -> tuple[int, ...]:
    """Return the shape of the result of :func:`pack_depthwise_quads`."""
    count, words = blocks(conv.in_channels, lanes), -(-conv.kernel[1] // _BYTES)
    return (count, conv.kernel[0], words, lanes * _BYTES)


def quads(buffer: Any, *indices: Expr, lanes: int) -> Any:
    """Return the byte vectors at ``indices`` (the last of them a column) and at the next three columns as 32-bit words,
    the first in the lowest bits.
    """
    vector = buffer[(*indices, tirx.Ramp(0, 1, _BYTES * lanes))]
    # Transpose four channels by four columns at a time, first as words, then inside the words.
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
    """Return the words of weights with ``taps`` in their places, and zeros elsewhere. ``vector(index)``: the words of
    the taps from 4 x ``index`` on, packed by :func:`pack_depthwise_quads`.
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
