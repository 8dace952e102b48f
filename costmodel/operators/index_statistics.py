"""Popularity statistics of a table's rows, the data dependence of a lookup's cost.

A statistic holds for any number of lookups: it stores probabilities, not counts.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from costmodel.operators import index_reuse as reuse

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
        return float(reuse.expected_unique(*self.arrays, np.array([lookups]))[0])

    def misses(self, lookups: float, cache_rows: float) -> float:
        """Expected misses of ``lookups`` in an LRU cache of ``cache_rows`` rows that starts empty."""
        return float(reuse.lru_misses(*self.arrays, np.array([cache_rows]), np.array([lookups]))[0])

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
