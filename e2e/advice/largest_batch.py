"""The largest batch whose memory fits: by memory alone, no step is priced or simulated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from e2e.explain.alternatives import LargestBatch

# Batches that are tried at most. Memory grows nearly evenly with the batch: a straight line through two of them is off
# by a few samples, which the rest finds.
TRIES = 14
# Beyond, a step is no longer what anybody runs on one GPU.
LARGEST = 1 << 20
# As long as one end alone is known, so many times as much (or as little) is tried at most.
_FARTHEST = 64
# Times as much after two batches that take the same.
_FLAT = 8
# Ends that are so near each other are told apart by halves: between them memory grows in blocks.
_NEAR = 16
Point = tuple[int, int]


def largest_batch(
    needed: Callable[[int], int], capacity: int, known: Point, stop: Callable[[], bool] = lambda: False
) -> LargestBatch | None:
    """``needed``: bytes of a batch on the fullest GPU; ``known``: a batch and its bytes. The search ends where ``stop``
    says so; ``None``: by then no batch was known to fit, though a smaller one may.
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
    """``fitting``: the largest batch that is known to fit; ``failing``: the smallest known not to. ``before``: the
    point in front of the ``last`` one. ``room`` and ``excess``: by how far both ends are off ``capacity``, of an end
    that stays where it is halved each time (Illinois algorithm), so that the other one moves too.
    """

    capacity: int
    fitting: Point | None = None
    failing: Point | None = None
    last: Point | None = None
    before: Point | None = None
    room: float = 0.0
    excess: float = 0.0

    def learn(self, point: Point) -> None:
        """What a batch takes."""
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
        """No batch up to here has to be tried."""
        return self.fitting[0] if self.fitting else 0

    @property
    def high(self) -> int:
        """No batch from here on has to be tried."""
        return self.failing[0] if self.failing else LARGEST + 1

    @property
    def width(self) -> int:
        """Between batches that fit and do not; 1: they are neighbours."""
        return self.high - self.low

    def next_batch(self) -> int | None:
        """Where a straight line meets the capacity: through both ends, or as long as one of them is not known through
        the last two points; after the first one twice or half of it. ``None``: nothing is left to try.
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
        """By the line through the last two points; ``otherwise`` where there is none that rises."""
        if self.before is None or self.last is None:
            return otherwise
        rise, run = self.last[1] - self.before[1], self.last[0] - self.before[0]
        if rise * run <= 0:
            return otherwise
        return self.last[0] + (self.capacity - self.last[1]) * run // rise
