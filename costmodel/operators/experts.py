"""Mixtures of experts on one GPU: their work, and the number of token rows per expert for unknown router outputs.

Work: products of many experts in one kernel, and whole fused layers. ``counts``: token rows of each expert of this
GPU, 0 for experts without rows. Multiply-accumulates count as two flops.

Routing: ``balanced``: equal shares, as with forced balancing or a well-trained router. ``power-law``: a few experts
get most rows, much as in the tables of aiconfigurator (``collector/helper.py`` of ai-dynamo/aiconfigurator,
Apache-2.0), with the density x^-alpha from 1 on; up to 0.8 of the rows here, of the tokens there. The shares are the
quantiles of that density instead of random numbers, in a fixed shuffled order, so that results are deterministic.
``drawn``: each row draws its expert by popularities that are the same for any number of rows: the quantiles of a
log-normal distribution. Few rows then meet at popular experts, and others get none: the counts are the quantiles of a
Poisson number of rows over all experts.

Requests name a routing at the start of a command line: NumPy is imported only for counting.
"""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass, field
from functools import lru_cache
from statistics import NormalDist
from typing import TYPE_CHECKING, Literal

from costmodel.operators.layers import CountedWork, element_bytes, stored_bytes

if TYPE_CHECKING:
    import numpy as np


# Implementation: CUTLASS's grouped products (PyTorch, TensorRT-LLM; Transformer Engine's many streams come near it), or
# the Triton kernel of vLLM and SGLang, which gathers rows itself. An engine's name stands for the kernels that it
# selects by GPU, type and number of rows (Triton, CUTLASS, Marlin).
ExpertKernel = Literal["cutlass", "triton", "vllm", "sglang", "trtllm"]


@dataclass(frozen=True)
class GroupedGemm(CountedWork):
    """Products of the rows of each expert with its matrix.

    ``wrt`` ``rows``: (counts[e], k) x (k, n) for every expert, forward or the gradient of the rows; ``weight``: the
    gradients of the matrices, (k, counts[e]) x (counts[e], n). ``scaling`` of 8-bit products as in
    :class:`costmodel.operators.device_work.ScaledGemm`; results then have 16 bits.
    """

    counts: tuple[int, ...]
    n: int
    k: int
    dtype: str = "bfloat16"
    wrt: Literal["rows", "weight"] = "rows"
    scaling: str = ""
    # Type in which the matrices are stored if in fewer bits (STORED_BITS); no part of the text by which rows are drawn.
    stored: str = field(default="", repr=False)

    @property
    def weight_bytes(self) -> float:
        """Bytes of the matrices of experts with rows."""
        return self.active * self.n * self.k * stored_bytes(self.stored, self.dtype)

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
        return self.rows * self.k * element_bytes(self.dtype) + math.ceil(self.weight_bytes)

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
    # As in :class:`GroupedGemm`.
    stored: str = field(default="", repr=False)

    @property
    def products(self) -> tuple[GroupedGemm, GroupedGemm]:
        """Both products of the layer."""
        first = self.inner * (2 if self.gated else 1)
        return (
            GroupedGemm(self.counts, first, self.hidden, self.dtype, scaling=self.scaling, stored=self.stored),
            GroupedGemm(self.counts, self.hidden, self.inner, self.dtype, scaling=self.scaling, stored=self.stored),
        )

    @property
    def flops(self) -> int:
        return sum(each.flops for each in self.products)

    @property
    def read_bytes(self) -> int:
        return self.tokens * self.hidden * 2 + math.ceil(sum(each.weight_bytes for each in self.products))

    @property
    def write_bytes(self) -> int:
        return self.tokens * self.hidden * 2


ExpertOperator = GroupedGemm | ExpertLayer


@dataclass(frozen=True)
class ExpertRouting:
    """Routing of tokens. ``alpha``: exponent of the power law, ``None`` for equal shares. ``capacity``: multiple of the
    equal share beyond which an expert drops rows, ``None`` without dropping. ``spread``: experts are drawn, with this
    standard deviation of the logarithm of their popularity.
    """

    alpha: float | None = None
    capacity: float | None = None
    spread: float | None = None

    def counts(self, rows: int, experts: int) -> tuple[int, ...]:
        """Rows of each of ``experts`` experts; without a capacity they add up to ``rows``."""

        return shares(rows, experts, self)

    def slowest(self, rows: int, experts: int, ranks: int) -> tuple[int, ...]:
        """Rows of each expert of the busiest rank, if ``ranks`` hold ``experts / ranks`` each and share ``rows`` in
        all: the mean over several orders of the experts, largest expert first.
        """

        return slowest_shares(rows, experts, ranks, self)

    def imbalance(self, experts: int, ranks: int, rows: int = 2**20) -> float:
        """Rows of the busiest rank relative to the mean of all ``ranks``."""
        return sum(self.slowest(rows, experts, ranks)) * ranks / rows


BALANCED = ExpertRouting()


_LARGEST_SHARE = 0.8  # of the rows: upper end of the density, before shares are scaled to add up
_MEAN_OF = 16  # number of shuffled orders whose busiest rank is averaged


@lru_cache(maxsize=4096)
def shares(rows: int, experts: int, routing: ExpertRouting) -> tuple[int, ...]:
    """Rows of each expert."""
    import numpy as np

    if routing.spread is not None:
        found = _drawn(rows, experts, routing.spread)
    else:
        found = _even(rows, experts) if routing.alpha is None else _power_law(rows, experts, routing.alpha)
    if routing.capacity is not None:
        limit = int(np.ceil(routing.capacity * rows / experts))
        found = np.minimum(found, limit)
    return tuple(int(each) for each in found)


def _even(rows: int, experts: int) -> np.ndarray:
    """Equal shares of whole rows; few rows are spread over the experts."""
    import numpy as np

    return np.diff(np.round(np.arange(experts + 1) * rows / experts)).astype(int)


def _power_law(rows: int, experts: int, alpha: float) -> np.ndarray:
    import numpy as np

    # Below one row per expert the tables draw between 0.01 and 2.
    low, high = (1.0, max(_LARGEST_SHARE * rows, 2.0)) if rows > experts else (0.01, 2.0)
    places = (np.arange(experts) + 0.5) / experts
    power = 1 - alpha
    if abs(power) < 1e-9:
        shares = low * (high / low) ** places
    else:
        shares = ((high**power - low**power) * places + low**power) ** (1 / power)
    return _whole(rows, shares[::-1])


_MOST_DRAWN = 64  # rows of an expert on average, beyond which how they are drawn no longer matters


def _drawn(rows: int, experts: int, spread: float) -> np.ndarray:
    import numpy as np

    normal = NormalDist()
    popular = np.exp([spread * normal.inv_cdf((place + 0.5) / experts) for place in range(experts)])
    means = rows * popular / popular.sum()
    if rows > _MOST_DRAWN * experts:
        return _whole(rows, means[::-1])
    # Shares of the experts with 0, 1, 2 ... rows; by logarithms, as no row at all is too unlikely for a number.
    chances, total, reached = np.log(means), list[float](), 0.0
    while reached < 1 - 0.5 / experts:
        count = len(total)
        reached += float(np.exp(count * chances - means - math.lgamma(count + 1)).mean())
        total.append(reached)
    counts = np.searchsorted(total, (np.arange(experts) + 0.5) / experts).astype(float)
    return _whole(rows, counts[::-1])


def _whole(rows: int, shares: np.ndarray) -> np.ndarray:
    """Whole numbers in proportion to ``shares``, largest first, that add up to ``rows``; in shuffled order."""
    import numpy as np

    exact = np.cumsum(shares) * rows / max(shares.sum(), 1e-9)
    counts = np.diff(np.round(np.concatenate([[0.0], exact]))).astype(int)
    return np.asarray(counts[_order(len(shares), 0)])


@lru_cache(maxsize=4096)
def slowest_shares(rows: int, experts: int, ranks: int, routing: ExpertRouting) -> tuple[int, ...]:
    """Rows of each expert of the busiest rank, largest first."""
    import numpy as np

    descending = np.sort(np.array(shares(rows, experts, routing)))[::-1]
    local, heaviest = experts // ranks, []
    for place in range(1 if routing.alpha is None and routing.spread is None else _MEAN_OF):
        shared = descending[_order(experts, place + 1)][: local * ranks].reshape(ranks, local)
        heaviest.append(np.sort(shared[np.argmax(shared.sum(axis=1))])[::-1])
    return tuple(round(float(each)) for each in np.stack(heaviest).mean(axis=0).tolist())


def _order(experts: int, place: int) -> np.ndarray:
    import numpy as np

    return np.random.default_rng(zlib.crc32(f"{experts} {place}".encode())).permutation(experts)
