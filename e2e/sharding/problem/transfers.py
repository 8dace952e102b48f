"""Seconds of the exchanges of a step as functions of bytes, tabulated once for many look-ups."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike

from costmodel.model.cost_model import CostModel
from costmodel.operators.collective_transfer import CollectiveKind, CollectiveTransfer
from e2e.step.arrays import Floats

KINDS: tuple[CollectiveKind, ...] = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
# Range and density of the tabulated sizes, with linear interpolation between them.
SMALLEST, LARGEST, PER_OCTAVE = 2**8, 2**38, 8


class TransferTimes:
    """Tabulated collectives among all ``ranks`` on ``nodes``; zero for one rank.

    Sizes as in :class:`CollectiveTransfer`; for an all_to_all: bytes that the busiest rank receives (or sends), its own
    part included.

    ``factors``: kind -> multiplier of its times (for experiments with wrong models). ``half_width``: kind -> half-width
    of the model's 80 % interval in log units, the median over the sizes.
    """

    def __init__(self, model: CostModel, ranks: int, nodes: int, factors: Mapping[str, float] | None = None) -> None:
        octaves = (LARGEST // SMALLEST).bit_length() - 1
        self.sizes: Floats = np.concatenate(
            [[0.0], SMALLEST * 2.0 ** (np.arange(octaves * PER_OCTAVE + 1) / PER_OCTAVE)]
        )
        self.seconds: dict[str, Floats] = {}
        self.half_width: dict[str, float] = dict.fromkeys(KINDS, 0.0)
        for kind in KINDS:
            if ranks == 1:
                self.seconds[kind] = np.zeros_like(self.sizes)
                continue
            transfers = [_transfer(kind, float(size), ranks, nodes) for size in self.sizes]
            estimates = model.estimate(transfers)
            times = np.array([estimate.seconds for estimate in estimates])
            self.seconds[kind] = times * (factors or {}).get(kind, 1.0)
            widths = [math.log(each.upper / each.lower) / 2 for each in estimates if each.lower > 0]
            self.half_width[kind] = float(np.median(widths)) if widths else 0.0

    def of(self, kind: CollectiveKind, size_bytes: ArrayLike) -> Floats:
        """Seconds, in the shape of ``size_bytes``; proportional to the size beyond the largest one."""
        size = np.asarray(size_bytes, dtype=float)
        table = self.seconds[kind]
        beyond = np.maximum(size / LARGEST, 1.0)
        return np.asarray(np.interp(size, self.sizes, table) * beyond)

    def line(self, kind: CollectiveKind, low: float, high: float) -> tuple[float, float]:
        """Return intercept and slope of the straight line through two sizes."""
        high = max(high, low + 1.0)
        first, last = (float(self.of(kind, size)) for size in (low, high))
        slope = max((last - first) / (high - low), 0.0)
        return max(first - slope * low, 0.0), slope

    def floor_lines(self, kind: CollectiveKind, seconds: float) -> tuple[tuple[float, float], ...]:
        """Return (intercept, slope) of a few lines that bound the times up to ``seconds`` from below.

        They are edges of the lower convex hull, near the largest such size and fractions of it.
        """
        table = self.seconds[kind]
        last = max(int((table <= seconds).sum()), 2)
        sizes, times = self.sizes[:last], np.minimum.accumulate(table[:last][::-1])[::-1]
        corners = _lower_hull(sizes, times)
        wanted = {
            int(np.searchsorted(sizes[corners], sizes[-1] * share))
            for share in (0.0, 1 / 64, 1 / 16, 1 / 4, 1 / 2, 1.0)
        }
        edges = sorted({min(max(at, 1), len(corners) - 1) for at in wanted})
        found = []
        for at in edges:
            low, high = corners[at - 1], corners[at]
            slope = float((times[high] - times[low]) / (sizes[high] - sizes[low]))
            found.append((float(times[low] - slope * sizes[low]), slope))
        return tuple(found)


def _lower_hull(sizes: Floats, times: Floats) -> list[int]:
    """Indices of the corners of the lower convex hull (Andrew's monotone chain)."""
    hull: list[int] = []
    for at in range(len(sizes)):
        while len(hull) > 1 and _above(sizes, times, hull[-2], hull[-1], at):
            hull.pop()
        hull.append(at)
    return hull


def _above(sizes: Floats, times: Floats, first: int, middle: int, last: int) -> bool:
    """True if the middle point is on or above the line between the others."""
    rise = (times[middle] - times[first]) * (sizes[last] - sizes[first])
    return bool(rise >= (times[last] - times[first]) * (sizes[middle] - sizes[first]))


def _transfer(kind: CollectiveKind, size: float, ranks: int, nodes: int) -> CollectiveTransfer:
    busiest = size * (ranks - 1) / ranks if kind == "all_to_all" else None
    return CollectiveTransfer(kind, size, ranks, nodes, busiest)
