"""Work of mixtures of experts on one GPU: products of many experts in one kernel, and whole fused layers.

``counts``: token rows of each expert of this GPU (:mod:`costmodel.operators.expert_routing`), 0 for experts without
rows. Multiply-accumulates count as two flops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from costmodel.operators.counted_work import CountedWork
from costmodel.operators.layers import element_bytes

# Implementation: CUTLASS's grouped products (PyTorch, TensorRT-LLM; Transformer Engine's many streams come near it), or
# the Triton kernel of vLLM and SGLang, which gathers rows itself.
ExpertKernel = Literal["cutlass", "triton"]


@dataclass(frozen=True)
class GroupedGemm(CountedWork):
    """Products of the rows of each expert with its matrix.

    ``wrt`` ``rows``: (counts[e], k) x (k, n) for every expert, forward or the gradient of the rows; ``weight``: the
    gradients of the matrices, (k, counts[e]) x (counts[e], n). ``scaling`` of 8-bit products as in
    :class:`costmodel.operators.scaled_work.ScaledGemm`; results then have 16 bits.
    """

    counts: tuple[int, ...]
    n: int
    k: int
    dtype: str = "bfloat16"
    wrt: Literal["rows", "weight"] = "rows"
    scaling: str = ""

    @property
    def rows(self) -> int:
        """Rows of all experts together."""
        return sum(self.counts)

    @property
    def active(self) -> int:
        """Number of experts with rows."""
        return sum(1 for each in self.counts if each)

    @property
    def output_bytes(self) -> int:
        """Bytes of an element of the result."""
        return max(element_bytes(self.dtype), 2)

    @property
    def flops(self) -> int:
        return 2 * self.rows * self.n * self.k

    @property
    def read_bytes(self) -> int:
        if self.wrt == "weight":
            return self.rows * (self.n + self.k) * element_bytes(self.dtype)
        return (self.rows * self.k + self.active * self.n * self.k) * element_bytes(self.dtype)

    @property
    def write_bytes(self) -> int:
        if self.wrt == "weight":
            return len(self.counts) * self.n * self.k * self.output_bytes
        return self.rows * self.n * self.output_bytes


@dataclass(frozen=True)
class ExpertLayer(CountedWork):
    """Fused layer of experts as in inference engines: rows gathered, first product, activation, second product, results
    summed. ``tokens``: inputs, of which ``sum(counts)`` rows are computed; ``inner``: width between the products;
    ``gated``: the first product gives gate and value.
    """

    counts: tuple[int, ...]
    tokens: int
    hidden: int
    inner: int
    dtype: str = "bfloat16"
    kernel: ExpertKernel = "cutlass"
    gated: bool = True
    scaling: str = ""

    @property
    def products(self) -> tuple[GroupedGemm, GroupedGemm]:
        """Both products of the layer."""
        first = self.inner * (2 if self.gated else 1)
        return (
            GroupedGemm(self.counts, first, self.hidden, self.dtype, scaling=self.scaling),
            GroupedGemm(self.counts, self.hidden, self.inner, self.dtype, scaling=self.scaling),
        )

    @property
    def flops(self) -> int:
        return sum(each.flops for each in self.products)

    @property
    def read_bytes(self) -> int:
        return self.tokens * self.hidden * 2 + sum(
            each.active * each.n * each.k * element_bytes(each.dtype) for each in self.products
        )

    @property
    def write_bytes(self) -> int:
        return self.tokens * self.hidden * 2


ExpertOperator = GroupedGemm | ExpertLayer
