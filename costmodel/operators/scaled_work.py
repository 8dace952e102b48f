"""Work in 8-bit dtypes with scales: products, and the casts that make their operands.

``scaling``: the values that share a scale: ``tensor`` (all of it), ``row`` (each row of the first operand, each column
of the second), ``block`` (1 x 128 of activations, 128 x 128 of weights: DeepSeek-V3, arXiv 2412.19437), ``mx`` (32
along a row: OCP Microscaling Formats 1.0).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from costmodel.operators.counted_work import CountedWork
from costmodel.operators.layers import element_bytes

SCALINGS = ("tensor", "row", "block", "mx")
# Elements that share a scale along a row, and bytes of a scale: FP32, one byte for ``mx``.
_SHARED = {"block": (128, 4), "mx": (32, 1)}


@dataclass(frozen=True)
class ScaledGemm(CountedWork):
    """Product (m, k) x (k, n) of 8-bit operands, summed in FP32 (``int8``: in int32) and written as
    ``output_dtype``.
    """

    m: int
    n: int
    k: int
    dtype: str = "float8"
    scaling: str = "tensor"
    output_dtype: str = "bfloat16"
    # Not in the repr, whose checksum assigns the rows of a table to splits (`split_of`).
    # Dtype of existing values to which the result is added; empty: none.
    accumulates: str = field(default="", repr=False)
    # Partial sums are promoted to FP32 outside the tensor cores, the default for gradients (``use_split_accumulator``
    # of Transformer Engine, ``use_fast_accum=False`` of torchao) but not for forward products.
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
    """Cast of ``rows`` x ``columns`` values of ``dtype`` to 8 bits in one kernel."""

    rows: int
    columns: int
    dtype: str = "bfloat16"
    scaling: str = "tensor"
    # 1; 2 if the transposed copy for the gradients is written too; 0 for only a search of the largest absolute value
    # (the pass before a cast with one scale of the present tensor).
    outputs: int = 1
    # The kernel computes its scales itself, for the rows or blocks that it holds.
    dynamic: bool = False
    output_dtype: str = "float8"

    @property
    def elements(self) -> int:
        """Number of values to cast."""
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
