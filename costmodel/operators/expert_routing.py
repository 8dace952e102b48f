"""How many rows of tokens each expert of a mixture gets, where the values that decide it are not known.

``balanced``: equal shares, as with forced balancing or a well-trained router. ``power-law``: a few experts get most,
drawn as the tables of aiconfigurator draw them (``collector/helper.py`` of ai-dynamo/aiconfigurator, Apache-2.0), with
the density x^-alpha between 1 and 0.8 of the tokens. Here the shares are the quantiles of that density instead of
random numbers, in a fixed shuffled order, so that the same question has the same answer.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

_LARGEST_SHARE = 0.8  # of the tokens, that the most wanted expert can get
_MEAN_OF = 16  # shuffled orders whose slowest rank is averaged


@dataclass(frozen=True)
class ExpertRouting:
    """``alpha``: exponent of the power law, ``None`` for equal shares. ``capacity``: factor of the equal share beyond
    which an expert drops rows, ``None`` where none are dropped.
    """

    alpha: float | None = None
    capacity: float | None = None

    def counts(self, rows: int, experts: int) -> tuple[int, ...]:
        """Rows of each of ``experts`` that share ``rows``; without a capacity they add up to ``rows``."""
        return _counts(rows, experts, self.alpha, self.capacity)

    def slowest(self, rows: int, experts: int, ranks: int) -> tuple[int, ...]:
        """Rows of each expert of the rank that gets most, where ``ranks`` hold ``experts / ranks`` each and ``rows``
        is what all of them share: the mean over several orders of the experts, largest expert first.
        """
        return _slowest(rows, experts, ranks, self.alpha, self.capacity)

    def imbalance(self, experts: int, ranks: int, rows: int = 2**20) -> float:
        """Rows of the rank that gets most over the mean of all ``ranks``."""
        return sum(self.slowest(rows, experts, ranks)) * ranks / rows


BALANCED = ExpertRouting()


@lru_cache(maxsize=4096)
def _counts(rows: int, experts: int, alpha: float | None, capacity: float | None) -> tuple[int, ...]:
    found = _even(rows, experts) if alpha is None else _power_law(rows, experts, alpha)
    if capacity is not None:
        limit = int(np.ceil(capacity * rows / experts))
        found = np.minimum(found, limit)
    return tuple(int(each) for each in found)


def _even(rows: int, experts: int) -> np.ndarray:
    """Equal shares of whole rows; few rows go to experts apart from each other."""
    return np.diff(np.round(np.arange(experts + 1) * rows / experts)).astype(int)


def _power_law(rows: int, experts: int, alpha: float) -> np.ndarray:
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
def _slowest(rows: int, experts: int, ranks: int, alpha: float | None, capacity: float | None) -> tuple[int, ...]:
    counts = np.sort(np.array(_counts(rows, experts, alpha, capacity)))[::-1]
    local = experts // ranks
    heaviest = []
    for place in range(_MEAN_OF if alpha is not None else 1):
        shared = counts[_order(experts, place + 1)][: local * ranks].reshape(ranks, local)
        heaviest.append(np.sort(shared[np.argmax(shared.sum(axis=1))])[::-1])
    return tuple(round(float(each)) for each in np.stack(heaviest).mean(axis=0).tolist())


def _order(experts: int, place: int) -> np.ndarray:
    return np.random.default_rng(zlib.crc32(f"{experts} {place}".encode())).permutation(experts)
