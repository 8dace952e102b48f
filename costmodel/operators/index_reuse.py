"""Distinct rows and LRU misses of random lookups, over arrays of tables.

Rows of a table form groups of equal probability; lookups are independent (independent reference model). All arrays have
shape (tables, groups) or (tables,); a group of no rows is padding.

- distinct rows of n lookups: U(n) = sum over rows of 1 - (1 - p)^n;
- an LRU cache of C rows holds the rows of the last T lookups, U(T) = C (the characteristic time of Che, Tung, Wang,
  IEEE JSAC 20(7), 2002; exact in the limit of many rows: Fagin, 1977). It starts empty, so that the first T lookups
  miss U(T) times; every later one misses with the probability U(T + 1) - U(T) that its row is not among the last T.
"""

from __future__ import annotations

import numpy as np

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
