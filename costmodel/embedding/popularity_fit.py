"""Row popularity from the access counts of one batch: a mixture of Poisson rates, by maximum likelihood.

A row of rate r (lookups per batch) is accessed a Poisson number of times. The number of rows accessed once, twice, ...
determines the distribution of rates (the nonparametric maximum likelihood estimate of Laird, JASA 73, 1978, on a grid,
by expectation maximisation), and with it the distinct rows of a smaller or larger batch. For frequently accessed rows
the count itself is the rate. If the table's size is known, rows never accessed count too; if not, only rows that could
have been seen are found (zero-truncated), and larger batches are extrapolated from them alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.operators.index_statistics import IndexStatistics

_MIXED_BELOW = 64  # counts up to here are modelled by the mixture: above, a count is its rate within 13 %
_RATES_PER_DOUBLING, _SLOWEST, _SLOWEST_TRUNCATED = 4, 1 / 64, 1 / 8
_ROUNDS = 4000
_NEGLIGIBLE = 1e-9


@dataclass(frozen=True)
class CountBin:
    """``rows`` rows that were accessed ``above`` < count <= ``up_to`` times, ``mean`` times on average."""

    above: float
    up_to: float
    rows: float
    mean: float


def statistics_of_counts(bins: Sequence[CountBin], rows: int | None, origin: str) -> IndexStatistics:
    """Row popularity estimated from the counts of one batch; ``rows`` of the table, ``None`` if unknown.

    ``ValueError`` if no row was accessed, or more rows than the table has.
    """
    touched = [each for each in bins if each.rows > 0]
    unique = sum(each.rows for each in touched)
    if not unique:
        raise ValueError("no row is looked up; give batches with indices")
    if rows is not None and unique > rows * (1 + 1e-9):
        raise ValueError(f"{unique:.0f} different rows are looked up in a table of {rows}; correct its rows")
    often = [each for each in touched if each.above >= _MIXED_BELOW]
    seldom = [each for each in touched if each.above < _MIXED_BELOW]
    group_rows, rates = [each.rows for each in often], [each.mean for each in often]
    unseen = None if rows is None else max(rows - unique, 0.0)
    if seldom:
        grid, weight = _mixture(seldom, unseen)
        group_rows += weight.tolist()
        rates += grid.tolist()
    return _statistics(np.array(group_rows), np.array(rates), rows, origin)


def _mixture(bins: Sequence[CountBin], unseen: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Rates and number of rows of each, preserving the total lookups of the bins."""
    slowest = _SLOWEST_TRUNCATED if unseen is None else _SLOWEST
    fastest = max(max(each.up_to for each in bins if np.isfinite(each.up_to)), 2.0)
    count = int(np.ceil(_RATES_PER_DOUBLING * np.log2(fastest / slowest))) + 1
    grid = np.geomspace(slowest, fastest, count)
    observed = np.array([each.rows for each in bins])
    likely = _bin_chances(bins, grid)
    missed = np.exp(-grid)
    if unseen is None:
        weight = _expectation_maximisation(likely / (1 - missed), observed) / (1 - missed)
    else:
        never = np.concatenate([[1.0], missed])  # a rate of 0: rows that are never accessed
        likely = np.vstack([never, np.hstack([np.zeros((len(bins), 1)), likely])])
        weight = _expectation_maximisation(likely, np.concatenate([[unseen], observed]))[1:]
    lookups = sum(each.rows * each.mean for each in bins)
    kept = weight > _NEGLIGIBLE * weight.sum()
    grid, weight = grid[kept], weight[kept]
    return grid * (lookups / (grid * weight).sum()), weight


def _bin_chances(bins: Sequence[CountBin], rates: np.ndarray) -> np.ndarray:
    """Probability that a row of each rate falls into each bin, (bins, rates)."""
    from scipy.special import pdtr

    return np.array([pdtr(each.up_to, rates) - pdtr(each.above, rates) for each in bins])


def _expectation_maximisation(likely: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Rows of each component, with the same sum as ``observed``; ``likely`` (bins, components) has probabilities as
    columns.
    """
    weight = np.full(likely.shape[1], observed.sum() / likely.shape[1])
    for _ in range(_ROUNDS):
        expected = np.maximum(likely @ weight, 1e-300)
        weight = weight * (likely.T @ (observed / expected))
    return np.asarray(weight)


def _statistics(group_rows: np.ndarray, rates: np.ndarray, rows: int | None, origin: str) -> IndexStatistics:
    order = np.argsort(-rates)
    group_rows, rates = group_rows[order], rates[order]
    total = rows if rows is not None else int(np.ceil(group_rows.sum()))
    group_rows = group_rows * min(1.0, total / group_rows.sum())  # rounding
    shares = group_rows * rates
    shares = shares / shares.sum()
    return IndexStatistics(total, tuple(group_rows.tolist()), tuple(shares.tolist()), origin)
