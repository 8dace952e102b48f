"""Work in number types of 8 bits whose values carry scales: products, and the casts that make their operands.

``scaling`` says what shares a scale: ``tensor`` (all of it), ``row`` (each row of the first operand, each column of
the second), ``block`` (1 x 128 of activations, 128 x 128 of weights: DeepSeek-V3, arXiv 2412.19437), ``mx`` (32 along a
row: OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodel.operators.counted_work import CountedWork
from costmodel.operators.layers import element_bytes

SCALINGS = ("tensor", "row", "block", "mx")
# Elements that share a scale along a row; scales are FP32, of ``mx`` one byte.
_SHARED = {"block": (128, 4), "mx": (32, 1)}


@dataclass(frozen=True)
class ScaledGemm(CountedWork):
    """(m, k) x (k, n) of 8-bit operands, summed in FP32 (``int8``: in int32) and written as ``output_dtype``.
    ``accumulates``: the number type of values that are there and that the result is added to; empty: none.
    ``split_sums``: partial sums are promoted to FP32 outside the tensor cores, as gradients are computed by default
    (``use_split_accumulator`` of Transformer Engine, ``use_fast_accum=False`` of torchao); forward products are not.
    """

    m: int
    n: int
    k: int
    dtype: str = "float8"
    scaling: str = "tensor"
    output_dtype: str = "bfloat16"
    # Not shown: which operators of a table fits may read is drawn by how they are written (`split_of`).
    accumulates: str = field(default="", repr=False)
    split_sums: bool = field(default=False, repr=False)

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k

    @property
    def read_bytes(self) -> int:
        elements = (self.m + self.n) * self.k
        shared, size = _SHARED.get(self.scaling, (0, 0))
        read = elements * element_bytes(self.dtype) + (elements // shared * size if shared else 0)
        return read + (self.write_bytes if self.accumulates else 0)

    @property
    def write_bytes(self) -> int:
        return self.m * self.n * element_bytes(self.accumulates or self.output_dtype)


@dataclass(frozen=True)
class ScaledCast(CountedWork):
    """``rows`` x ``columns`` values of ``dtype`` cast to 8 bits in one kernel.

    ``outputs``: 1, 2 where the transposed copy for the gradients is written with it, 0 where only the largest absolute
    value is sought (the pass before a cast with one scale of the present tensor). ``dynamic``: the kernel finds its
    scales itself, of the rows or blocks that it holds.
    """

    rows: int
    columns: int
    dtype: str = "bfloat16"
    scaling: str = "tensor"
    outputs: int = 1
    dynamic: bool = False
    output_dtype: str = "float8"

    @property
    def elements(self) -> int:
        """How many values are cast."""
        return self.rows * self.columns

    @property
    def flops(self) -> int:
        return 2 * self.elements

    @property
    def read_bytes(self) -> int:
        return self.elements * element_bytes(self.dtype)

    @property
    def write_bytes(self) -> int:
        return self.outputs * self.elements * element_bytes(self.output_dtype)
