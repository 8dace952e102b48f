"""Multiply-add of the dense register tile, by the dtype in which data and weights are stored.

A step takes a group of adjacent input channels: one of float32, or as many of a narrower dtype as fill 32 bits, whose
products one instruction adds to a 32-bit lane. A blocked tensor stores them together, and the weights of a step are
packed lane by lane: (.., steps, V x group), all of a group for an output, then the next output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from costmodel.operators.layers import element_bytes
from schedules.contract.template import stored
from schedules.contract.vector_operations import DOT_BFLOAT16, DOT_UINT8
from schedules.loops import emit
from schedules.loops.emit import Expr


@dataclass(frozen=True)
class DotProduct:
    """Dot product instruction and its dtypes."""

    # Dtype of data and weights.
    storage: str
    # Channels of a step.
    group: int
    # Dtype of one operand: a value, or a word of adjacent values.
    word: str
    # Dtype of the accumulators.
    sums: str
    # Cycles until its result can be added to.
    latency: float
    # ``multiply_add(sums, x, weights, lanes)`` of vectors.
    multiply_add: Callable[[Any, Any, Any, int], Any]

    def steps(self, channels: int) -> int:
        """Return the number of steps for ``channels`` input channels."""
        return -(-channels // self.group)

    def operand(self, buffer: Any, *indices: Expr) -> Any:
        """Return the operand that a step multiplies the weights of all outputs by: the group that begins at
        ``indices``.
        """
        if self.group == 1:
            return buffer[indices]
        return tirx.reinterpret(self.word, buffer[(*indices[:-1], tirx.Ramp(indices[-1], 1, self.group))])

    def last_operand(self, buffer: Any, *indices: Expr, count: int) -> Any:
        """Return the operand of a partial group: its first ``count`` values, followed by zeros; nothing after them is
        read.
        """
        if count == self.group:
            return self.operand(buffer, *indices)
        return self.neighbours([buffer[(*indices[:-1], indices[-1] + index)] for index in range(count)], 1)

    def weights(self, buffer: Any, *indices: Expr, lanes: int, ahead: int = 0) -> Any:
        """Return the weights of one step, packed by :func:`pack_steps`; ``ahead`` as in :func:`emit.ask_ahead`."""
        emit.ask_ahead(buffer, *indices, ahead=ahead)
        vector = buffer[(*indices, tirx.Ramp(0, 1, lanes * self.group))]
        return vector if self.group == 1 else tirx.reinterpret(f"{self.word}x{lanes}", vector)

    def neighbours(self, values: Sequence[Any], lanes: int) -> Any:
        """Return a vector of ``lanes`` words (a scalar for one lane) from up to ``group`` vectors of storage, one per
        position in a word; zeros for the others.
        """
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
        """Pack FP32 (.., inputs, V) to storage (.., steps, V x group); the last group is filled up with zeros."""
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
    """Return the dot product of data and weights stored as ``dtype``; ``KeyError`` for a dtype without kernels."""
    return _BY_STORAGE[dtype]
