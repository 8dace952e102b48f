"""Operator records of embedding lookups, and the popularity of a table's rows, on which their cost depends.

A statistic holds for any number of lookups: it stores probabilities, not counts.

Reuse is computed for arrays of tables. Rows of a table form groups of equal probability; lookups are independent
(independent reference model). All arrays have shape (tables, groups) or (tables,); a group of no rows is padding.

- distinct rows of n lookups: U(n) = sum over rows of 1 - (1 - p)^n;
- an LRU cache of C rows holds the rows of the last T lookups, U(T) = C (the characteristic time of Che, Tung, Wang,
  IEEE JSAC 20(7), 2002; exact in the limit of many rows: Fagin, 1977). It starts empty, so that the first T lookups
  miss U(T) times; every later one misses with the probability U(T + 1) - U(T) that its row is not among the last T.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from costmodel.operators.layers import CountedWork, element_bytes

_HALVINGS = 32  # bisections of the interval that holds log T: to less than a part in 10^8
_CERTAIN = 1 - 1e-12


def expected_unique(rows: np.ndarray, probability: np.ndarray, lookups: np.ndarray) -> np.ndarray:
    """Expected distinct rows of ``lookups`` (tables,); ``rows`` per group and the ``probability`` of one of them."""
    never = np.asarray(lookups, dtype=float)[:, None] * np.log1p(-np.minimum(probability, _CERTAIN))
    unique: np.ndarray = -(rows * np.expm1(never)).sum(axis=1)
    return unique


def miss_chance(rows: np.ndarray, probability: np.ndarray, lookups: np.ndarray) -> np.ndarray:
    """Probability that a lookup's row is not among those of the ``lookups`` before it, (tables,)."""
    never = np.asarray(lookups, dtype=float)[:, None] * np.log1p(-np.minimum(probability, _CERTAIN))
    chance: np.ndarray = (rows * probability * np.exp(never)).sum(axis=1)
    return chance


def characteristic_time(
    rows: np.ndarray, probability: np.ndarray, cache_rows: np.ndarray, most: np.ndarray
) -> np.ndarray:
    """Number of lookups after which a cache of ``cache_rows`` is full, at most ``most``, (tables,)."""
    low = np.log(np.clip(cache_rows, 1e-9, most))  # U(n) <= n: not full before
    high = np.log(most)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        full = expected_unique(rows, probability, np.exp(middle)) >= cache_rows
        low, high = np.where(full, low, middle), np.where(full, middle, high)
    return np.asarray(np.exp(high))


def lru_misses(rows: np.ndarray, probability: np.ndarray, cache_rows: np.ndarray, lookups: np.ndarray) -> np.ndarray:
    """Misses of ``lookups`` in an LRU cache of ``cache_rows`` that starts empty, (tables,)."""
    lookups = np.asarray(lookups, dtype=float)
    cache = np.broadcast_to(np.asarray(cache_rows, dtype=float), lookups.shape)
    unique = expected_unique(rows, probability, lookups)
    small = np.flatnonzero((unique > cache) & (lookups > 0))
    misses = unique.copy()
    if small.size:
        group_rows, chances, size = rows[small], probability[small], cache[small]
        time = characteristic_time(group_rows, chances, size, lookups[small])
        later = (lookups[small] - time) * miss_chance(group_rows, chances, time)
        misses[small] = expected_unique(group_rows, chances, time) + later
    return np.asarray(np.minimum(misses, lookups))


# Bins of the reuse factor, lookups of one row by a batch: (0, 1], (1, 2], (2, 4] ... (2^14, 2^15], above (Lin et al.,
# IEEE TPDS 2024; facebookresearch/dlrm_datasets prints the same bins).
REUSE_EDGES = (0.0, *(2.0**power for power in range(16)), math.inf)
REUSE_BINS = len(REUSE_EDGES) - 1
_TOLERANCE = 1e-6


@dataclass(frozen=True)
class IndexStatistics:
    """Row popularity by group: ``group_rows`` rows each (not necessarily whole numbers) share ``group_shares`` of the
    lookups evenly.

    ``rows``: of the table; those in no group are never accessed. ``origin``: source of the numbers. ``ValueError``
    unless groups have rows, shares are not negative and add up to 1, and groups fit the table.
    """

    rows: int
    group_rows: tuple[float, ...]
    group_shares: tuple[float, ...]
    origin: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        rows, shares = np.array(self.group_rows, dtype=float), np.array(self.group_shares, dtype=float)
        if self.rows < 1 or rows.shape != shares.shape or not rows.size:
            raise ValueError("a statistic needs a table of at least one row, and as many shares as groups")
        if not (np.isfinite(rows).all() and np.isfinite(shares).all() and (rows > 0).all() and (shares >= 0).all()):
            raise ValueError("rows of a group must be above zero and shares not below")
        if abs(shares.sum() - 1) > _TOLERANCE:
            raise ValueError(f"shares of the lookups add up to {shares.sum():.6g}, not 1")
        if rows.sum() > self.rows * (1 + _TOLERANCE):
            raise ValueError(f"groups have {rows.sum():.6g} rows, the table {self.rows}")

    @cached_property
    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        """Rows of every group and the probability of one of its rows, each of shape (1, groups)."""
        rows = np.array([self.group_rows], dtype=float)
        return rows, np.array([self.group_shares], dtype=float) / rows

    def unique_rows(self, lookups: float) -> float:
        """Expected number of distinct rows among ``lookups``."""
        return float(expected_unique(*self.arrays, np.array([lookups]))[0])

    def misses(self, lookups: float, cache_rows: float) -> float:
        """Expected misses of ``lookups`` in an LRU cache of ``cache_rows`` rows that starts empty."""
        return float(lru_misses(*self.arrays, np.array([cache_rows]), np.array([lookups]))[0])

    def hit_rate(self, lookups: float, cache_rows: float) -> float:
        """Share of ``lookups`` that hit such a cache."""
        return 1.0 - self.misses(lookups, cache_rows) / lookups if lookups else 0.0

    def reuse_factors(self, lookups: float) -> np.ndarray:
        """Share of the distinct rows in each bin of :data:`REUSE_EDGES`, (17,)."""
        from scipy.special import pdtr

        rows, mean = self.arrays[0][0], lookups * self.arrays[1][0]
        seen = np.diff([(rows * pdtr(edge, mean)).sum() for edge in REUSE_EDGES[:-1]], append=rows.sum())
        return np.asarray(seen / max(seen.sum(), 1e-300))

    def lookup_shares(self, lookups: float) -> np.ndarray:
        """Share of the lookups that access the rows of each bin, (17,)."""
        from scipy.special import pdtr

        mean, shares = lookups * self.arrays[1][0], np.array(self.group_shares)
        # E[X; X <= k] = mean * P(X <= k - 1) of a Poisson number X.
        below = [0.0, *((shares * pdtr(edge - 1, mean)).sum() for edge in REUSE_EDGES[1:-1]), 1.0]
        return np.diff(below)

    def of_row_shard(self, share: float) -> IndexStatistics:
        """Statistics of a random ``share`` of the rows, for the lookups that fall into it."""
        rows = max(round(self.rows * share), 1)
        return replace(self, rows=rows, group_rows=self._scaled(rows))

    def resized(self, rows: int) -> IndexStatistics:
        """The same shape of popularity over a table of ``rows`` rows."""
        return replace(self, rows=rows, group_rows=self._scaled(rows))

    def _scaled(self, rows: int) -> tuple[float, ...]:
        return tuple(float(each) * rows / self.rows for each in self.group_rows)


def uniform(rows: int) -> IndexStatistics:
    """Statistics with equally likely rows."""
    return IndexStatistics(rows, (float(rows),), (1.0,), "uniform")


def zipf(rows: int, exponent: float) -> IndexStatistics:
    """Zipf statistics: the k-th most popular of ``rows`` rows has a probability proportional to k^-exponent (0:
    uniform).

    The most popular rows are groups of their own; further rows share a group with ranks up to 9 % less popular.
    """
    if not (math.isfinite(exponent) and exponent >= 0):
        raise ValueError(f"a Zipf exponent is not below zero, got {exponent}")
    if exponent == 0:
        return replace(uniform(rows), origin="zipf 0")
    edges = _rank_edges(rows)
    weight = np.array([_power_sum(first, last, exponent) for first, last in zip(edges, edges[1:], strict=False)])
    shares = weight / weight.sum()
    return IndexStatistics(rows, tuple(np.diff(edges).tolist()), tuple(shares.tolist()), f"zipf {exponent:g}")


_SINGLE_RANKS, _RANKS_PER_OCTAVE = 16, 4


def _rank_edges(rows: int) -> np.ndarray:
    """Ranks that separate groups, from 0 to ``rows``: the first ones alone, then four groups per doubling."""
    if rows <= _SINGLE_RANKS:
        return np.arange(rows + 1, dtype=float)
    count = max(math.ceil(_RANKS_PER_OCTAVE * math.log2(rows / _SINGLE_RANKS)), 1)
    tail = np.unique(np.round(np.geomspace(_SINGLE_RANKS, rows, count + 1)))
    return np.concatenate([np.arange(_SINGLE_RANKS, dtype=float), tail])


def _power_sum(first: float, last: float, exponent: float) -> float:
    """Sum of k^-exponent over first < k <= last: exact for few terms, else by midpoints (Euler-Maclaurin)."""
    if last - first <= 64:
        return float((np.arange(first + 1, last + 1) ** -exponent).sum())
    low, high = first + 0.5, last + 0.5
    if abs(exponent - 1) < 1e-9:
        return math.log(high / low)
    return float((high ** (1 - exponent) - low ** (1 - exponent)) / (1 - exponent))


Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class TableLookup:
    """Lookups of one table: ``indices`` lookups into ``rows`` x ``dim`` values, pooled to ``bags`` outputs.

    ``statistics``: row popularity; uniform if ``None``.
    """

    rows: int
    dim: int
    indices: int
    bags: int
    dtype: str = "float32"
    statistics: IndexStatistics | None = None

    def unique_rows(self) -> float:
        """Expected number of distinct rows."""
        return (self.statistics or uniform(self.rows)).unique_rows(self.indices)


@dataclass(frozen=True)
class EmbeddingLookup(CountedWork):
    """Lookup of table rows by index: ``indices`` lookups into ``rows`` x ``dim``; ``bags`` pooled outputs (``bags ==
    indices``: not pooled, ``nn.Embedding``).
    """

    rows: int
    dim: int
    indices: int
    bags: int
    # Number of identical tables in one kernel (table-batched).
    tables: int = 1
    dtype: str = "float32"
    direction: Direction = "forward"
    # Distinct rows per table, if known; else derived from `statistics`.
    unique_rows: int | None = None
    # Optimizer of a backward kernel that updates the rows itself (a key of
    # ``costmodel.gpu.embedding_tables.OPTIMIZER_STATE``).
    fused_optimizer: str = ""
    # Row popularity; uniform if None.
    statistics: IndexStatistics | None = None
    # Tables of any sizes (:meth:`of`); the preceding fields are then the sums (``dim``: the widest).
    mixed: tuple[TableLookup, ...] = ()
    # ``auto``: derived from the other fields.
    kernel: Literal["auto", "embedding", "embedding_bag", "table_batched"] = "auto"
    # For an unfused backward pass: ``dense`` like the table or ``sparse`` (a row per lookup).
    gradient: Literal["dense", "sparse"] = "dense"
    # Backward pass from end to end, with clearing the gradient and sorting the indices; else only its last step, with
    # separate operators for the rest.
    whole_pass: bool = False
    # Mode of the pooling.
    mode: Literal["sum", "mean", "max"] = "sum"
    index_dtype: Literal["int64", "int32"] = "int64"

    @classmethod
    def of(
        cls,
        tables: Sequence[TableLookup],
        direction: Direction = "forward",
        fused_optimizer: str = "",
        whole_pass: bool = False,
    ) -> EmbeddingLookup:
        """Lookup of any tables in one table-batched kernel."""
        rows, indices, bags = (sum(getattr(each, name) for each in tables) for name in ("rows", "indices", "bags"))
        return cls(
            rows,
            max(each.dim for each in tables),
            indices,
            bags,
            len(tables),
            tables[0].dtype,
            direction,
            fused_optimizer=fused_optimizer,
            mixed=tuple(tables),
            kernel="table_batched",
            whole_pass=whole_pass,
        )

    @property
    def parts(self) -> tuple[tuple[TableLookup, int], ...]:
        """Every distinct table and its count."""
        if self.mixed:
            return tuple((each, 1) for each in self.mixed)
        table = TableLookup(self.rows, self.dim, self.indices, self.bags, self.dtype, self.statistics)
        return ((table, self.tables),)

    @property
    def implementation(self) -> Literal["embedding", "embedding_bag", "table_batched"]:
        """Kernel type: several tables or a fused optimizer need a table-batched one; without pooling, a plain one."""
        if self.kernel != "auto":
            return self.kernel
        if self.tables > 1 or self.fused_optimizer:
            return "table_batched"
        return "embedding" if self.bags == self.indices else "embedding_bag"

    @property
    def flops(self) -> int:
        return sum(count * each.indices * each.dim for each, count in self.parts)

    @property
    def read_bytes(self) -> int:
        forward, size = self.direction == "forward", 0
        for each, count in self.parts:
            values = self._touched(each) if forward else each.bags
            index_bytes = each.indices * element_bytes(self.index_dtype)
            size += count * (values * each.dim * element_bytes(each.dtype) + index_bytes)
        return size

    @property
    def write_bytes(self) -> int:
        forward, size = self.direction == "forward", 0
        for each, count in self.parts:
            values = each.bags if forward else self._touched(each)
            size += count * values * each.dim * element_bytes(each.dtype)
        return size

    def _touched(self, table: TableLookup) -> int:
        """Rows that cross the chip's border: the distinct ones if known, else those of every lookup."""
        if self.unique_rows is not None:
            return self.unique_rows
        return table.indices if table.statistics is None else round(table.unique_rows())
