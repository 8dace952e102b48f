"""Arithmetic of :mod:`costmodel.operators.expert_routing`: quantiles of a power law, orders of experts."""

from __future__ import annotations

import zlib
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

_LARGEST_SHARE = 0.8  # of the rows: upper end of the density, before shares are scaled to add up
_MEAN_OF = 16  # number of shuffled orders whose busiest rank is averaged


@lru_cache(maxsize=4096)
def shares(rows: int, experts: int, alpha: float | None, capacity: float | None) -> tuple[int, ...]:
    """Rows of each expert; arguments as in :class:`costmodel.operators.expert_routing.ExpertRouting`."""
    import numpy as np

    found = _even(rows, experts) if alpha is None else _power_law(rows, experts, alpha)
    if capacity is not None:
        limit = int(np.ceil(capacity * rows / experts))
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
    exact = np.cumsum(shares[::-1]) * rows / shares.sum()
    sorted_counts = np.diff(np.round(np.concatenate([[0.0], exact]))).astype(int)
    return np.asarray(sorted_counts[_order(experts, 0)])


@lru_cache(maxsize=4096)
def slowest_shares(rows: int, experts: int, ranks: int, alpha: float | None, capacity: float | None) -> tuple[int, ...]:
    """Rows of each expert of the busiest rank, largest first."""
    import numpy as np

    counts = np.sort(np.array(shares(rows, experts, alpha, capacity)))[::-1]
    local = experts // ranks
    heaviest = []
    for place in range(_MEAN_OF if alpha is not None else 1):
        shared = counts[_order(experts, place + 1)][: local * ranks].reshape(ranks, local)
        heaviest.append(np.sort(shared[np.argmax(shared.sum(axis=1))])[::-1])
    return tuple(round(float(each)) for each in np.stack(heaviest).mean(axis=0).tolist())


def _order(experts: int, place: int) -> np.ndarray:
    import numpy as np

    return np.random.default_rng(zlib.crc32(f"{experts} {place}".encode())).permutation(experts)
