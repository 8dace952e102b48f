"""Largest batch whose memory fits; needs only memory estimates, no pricing or simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from e2e.explain.alternatives import LargestBatch

# Most batches that are tried. Memory is nearly linear in the batch: interpolation of two of them is off by a few
# samples, which the remaining tries find.
TRIES = 14
# Largest batch of practical use on one GPU.
LARGEST = 1 << 20
# Largest factor of an extrapolation while only one bound is known.
_FARTHEST = 64
# Factor of the next batch after two that need the same memory.
_FLAT = 8
# Width below which the search bisects: there memory grows in blocks.
_NEAR = 16
Point = tuple[int, int]


def largest_batch(
    needed: Callable[[int], int], capacity: int, known: Point, stop: Callable[[], bool] = lambda: False
) -> LargestBatch | None:
    """Search for the largest batch that fits.

    ``needed``: function from a batch to its bytes on the fullest GPU; ``known``: a batch and its bytes; ``stop``: ends
    the search. ``None``: no batch was known to fit by then, though a smaller one may.
    """
    search = _Search(capacity)
    search.learn(known)
    for _ in range(TRIES):
        batch = search.next_batch()
        if batch is None or stop():
            break
        search.learn((batch, needed(batch)))
    if search.fitting is None:
        assert search.failing is not None
        return LargestBatch(0, search.failing[1]) if search.failing[0] == 1 else None
    return LargestBatch(*search.fitting, at_least=search.failing is None or search.width > 1)


@dataclass
class _Search:
    """State of the search: root finding by regula falsi."""

    capacity: int
    # Largest batch that is known to fit.
    fitting: Point | None = None
    # Smallest batch that is known not to fit.
    failing: Point | None = None
    # The latest point; `before`: the one before it.
    last: Point | None = None
    before: Point | None = None
    # Distance of both bounds from `capacity`; that of a bound that does not move is halved each time (Illinois
    # algorithm), so that the other one moves too.
    room: float = 0.0
    excess: float = 0.0

    def learn(self, point: Point) -> None:
        """Add a batch and its bytes."""
        fits = point[1] <= self.capacity
        again = self.last is not None and (self.last[1] <= self.capacity) == fits
        if fits:
            self.fitting, self.room = point, float(self.capacity - point[1])
            self.excess /= 2 if again else 1
        else:
            self.failing, self.excess = point, float(point[1] - self.capacity)
            self.room /= 2 if again else 1
        self.before, self.last = self.last, point

    @property
    def low(self) -> int:
        """Lower limit of the search: no batch up to this one needs to be tried."""
        return self.fitting[0] if self.fitting else 0

    @property
    def high(self) -> int:
        """Upper limit of the search: no batch from this one on needs to be tried."""
        return self.failing[0] if self.failing else LARGEST + 1

    @property
    def width(self) -> int:
        """Distance between the batches that fit and do not; 1: they are neighbours."""
        return self.high - self.low

    def next_batch(self) -> int | None:
        """Return the next batch to try, ``None`` if none is left.

        Interpolates to the capacity between both bounds, or extrapolates through the last two points while only one is
        known; after the first point the batch is doubled or halved.
        """
        assert self.last is not None
        if self.width <= 1 or self.low >= LARGEST:
            return None
        if self.fitting and self.failing:
            share = self.room / (self.room + self.excess) if self.width > _NEAR else 0.5
            batch = self.low + int(self.width * share)
        elif self.fitting:
            batch = min(self._extended((2 if self.before is None else _FLAT) * self.low), _FARTHEST * self.low)
        else:
            batch = max(self._extended(self.high // 2), self.high // _FARTHEST)
        return min(max(batch, self.low + 1), self.high - 1, LARGEST)

    def _extended(self, otherwise: int) -> int:
        """Extrapolate through the last two points; return ``otherwise`` if their line does not rise."""
        if self.before is None or self.last is None:
            return otherwise
        rise, run = self.last[1] - self.before[1], self.last[0] - self.before[0]
        if rise * run <= 0:
            return otherwise
        return self.last[0] + (self.capacity - self.last[1]) * run // rise
