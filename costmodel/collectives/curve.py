"""Time over size of one collective among one number of ranks, from measurements: increasing and continuous.

t(size) = latency + excess. The excess is kept over the ideal seconds of :mod:`costmodel.collectives.physics`, in which
curves of several rank counts, and of several systems, are alike; between measured sizes it follows a monotone cubic
(Fritsch and Carlson, 1980) in logarithms, beyond them it is proportional to the size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from scipy.interpolate import PchipInterpolator
from scipy.optimize import isotonic_regression

# Knots are added until every measured size is met within this, or there are so many.
KNOT_ERROR, MOST_KNOTS = 0.01, 24
# Of the time of the smallest size, what may be latency.
_LEAST_LATENCY, _MOST_LATENCY = 0.05, 0.97


@dataclass(frozen=True)
class Knots:
    """Smoothed measurements: ascending sizes in bytes (as ``CollectiveTransfer.size_bytes``), seconds that rise."""

    sizes: tuple[float, ...]
    seconds: tuple[float, ...]

    def __post_init__(self) -> None:
        if len(self.sizes) != len(self.seconds) or not self.sizes:
            raise ValueError(f"as many times as sizes, one at least; got {len(self.sizes)}, {len(self.seconds)}")
        if not (min(self.sizes) > 0 and min(self.seconds) > 0 and all(map(math.isfinite, self.seconds))):
            raise ValueError("sizes and times must be above zero and finite")
        if not (np.diff(self.sizes) > 0).all() or not (np.diff(self.seconds) >= 0).all():
            raise ValueError("sizes must ascend, times must not fall")


def smooth(sizes: Sequence[float], seconds: Sequence[float]) -> Knots:
    """Knots of measurements, any order, sizes more than once: the median of each size, spikes of a single size taken
    off (median of three, which leaves rising data as it is), then the nearest rising sequence of logarithms.
    """
    known = np.unique(np.asarray(sizes, dtype=float))
    groups: dict[float, list[float]] = {size: [] for size in known.tolist()}
    for size, time in zip(sizes, seconds, strict=True):
        groups[float(size)].append(float(time))
    logs = np.log([np.median(groups[size]) for size in known.tolist()])
    if len(logs) > 2:
        inner = np.median(np.stack([logs[:-2], logs[1:-1], logs[2:]]), axis=0)
        logs = np.concatenate([logs[:1], inner, logs[-1:]])
    rising = np.asarray(isotonic_regression(logs).x)
    kept = _thin(np.log(known), rising)
    times = np.maximum.accumulate([float(f"{value:.4e}") for value in np.exp(rising[kept])])
    return Knots(tuple(known[kept].tolist()), tuple(times.tolist()))


def _thin(places: np.ndarray, logs: np.ndarray) -> list[int]:
    """Indices of the points that a monotone cubic needs to meet the others."""
    kept = sorted({0, len(places) - 1})
    while len(kept) < min(len(places), MOST_KNOTS):
        errors = np.abs(_between(places[kept], logs[kept], places) - logs)
        worst = int(errors.argmax())
        if errors[worst] <= KNOT_ERROR:
            break
        kept = sorted({*kept, worst})
    return kept


def _between(places: np.ndarray, logs: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    if len(places) == 1:
        return np.full(len(wanted), logs[0])
    return np.asarray(PchipInterpolator(places, logs)(wanted))


@dataclass(frozen=True)
class Curve:
    """``ideal``: seconds of the bytes alone at each knot; ``start``, ``first``: the analytic time of the smallest
    message and of the first knot. ``latency``: seconds that do not depend on the size. By as much as they are the first
    knot's analytic time, they are off by what that knot is off: one of many bytes says little of them. ``usable``:
    share of the links' rate that its ranks reach, in ``ideal`` already, where NCCL does not know of it (1 but through a
    host). ``slower``: how many times longer starts and hops take where the curve is used than where it was measured.
    """

    ranks: int
    nodes: int
    ideal: tuple[float, ...]
    seconds: tuple[float, ...]
    start: float
    first: float
    usable: float = 1.0
    slower: float = 1.0
    latency: float = field(init=False)
    _cubic: Any = field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        share = min(max(self.start / self.first, _LEAST_LATENCY), _MOST_LATENCY)
        off = (self.seconds[0] / self.first) ** share
        cubic = None
        if len(self.ideal) > 1:
            cubic = PchipInterpolator(np.log(self.ideal), np.log(self.seconds))
        object.__setattr__(self, "latency", min(share * self.first * off, _MOST_LATENCY * self.seconds[0]))
        object.__setattr__(self, "_cubic", cubic)

    def excess(self, ideal: float) -> float:
        """Seconds beyond the latency for bytes that take ``ideal`` seconds alone."""
        if ideal <= 0:
            return 0.0
        first, last = self.ideal[0], self.ideal[-1]
        inside = min(max(ideal, first), last)
        time = self.seconds[0] if self._cubic is None else math.exp(float(self._cubic(math.log(inside))))
        time = min(max(time, self.seconds[0]), self.seconds[-1])
        return (time - self.latency) * (ideal / inside)

    def holds(self, ideal: float) -> bool:
        """Whether ``ideal`` lies between the measured sizes, a factor of two beyond them included."""
        return self.ideal[0] / 2 <= ideal <= self.ideal[-1] * 2


def between_curves(
    curves: Sequence[Curve], ranks: int, nodes: int, start: float, ideal: float, usable: float = 1.0
) -> float:
    """Seconds among ``ranks`` ranks from ``curves`` of other, or the same, numbers of ranks. ``usable``: as a curve's.

    The latency keeps its ratio to the analytic ``start``, the excess at equal ``ideal`` seconds is interpolated; both
    geometrically over the logarithm of ranks. Beyond the outermost counts their ratios stay. Across nodes, curves of
    one node keep their latency, and what the network adds to the analytic one is added.
    """
    below, above, weight = bracket(curves, ranks, nodes)
    if nodes > 1 and below.nodes == 1:
        slower = max(0.0, start - _mean(below.start, above.start, weight))
        latency = _mean(below.latency, above.latency, weight) + slower
    else:
        latency = start * _mean(below.latency / below.start, above.latency / above.start, weight)
    low, high = (_excess(each, ranks, nodes, ideal, usable) for each in (below, above))
    return latency + _mean(low, high, weight)


def _excess(curve: Curve, ranks: int, nodes: int, ideal: float, usable: float) -> float:
    """What ``curve`` says of the excess among ``ranks`` ranks: where starts and hops take k times as long, bytes of k
    times the ideal seconds have k times the excess.

    Fixed costs are over at equal seconds; NCCL changes its protocol at equal bytes, for it reckons with links that
    nobody shares. Where the ranks share what the host passes on, these are two places; what is over at one of them is
    not carried to other numbers of ranks, so that the lesser slowdown counts.
    """
    if curve.slower != 1.0:
        same = dataclasses.replace(curve, slower=1.0)
        return curve.slower * _excess(same, ranks, nodes, ideal / curve.slower, usable)
    if ranks == curve.ranks:
        return curve.excess(ideal)
    shift = usable / curve.usable if nodes == curve.nodes == 1 else 1.0
    return min(curve.excess(ideal), curve.excess(ideal * shift) / shift)


def _mean(low: float, high: float, weight: float) -> float:
    """Geometric mean with ``weight`` on ``high``; zero only where both are, for both are as soon as one is."""
    return low ** (1 - weight) * high**weight if low > 0 and high > 0 else 0.0


def bracket(curves: Sequence[Curve], ranks: int, nodes: int) -> tuple[Curve, Curve, float]:
    """The curves of the nearest counts below and above, and the weight of the upper one. Of curves with as many ranks,
    the one whose number of nodes is nearest counts.
    """
    chosen: dict[int, Curve] = {}
    for each in sorted(curves, key=lambda curve: abs(math.log(curve.nodes / nodes)), reverse=True):
        chosen[each.ranks] = each
    counts = sorted(chosen)
    low = max((count for count in counts if count <= ranks), default=counts[0])
    high = min((count for count in counts if count >= ranks), default=counts[-1])
    if low >= high:
        return chosen[low], chosen[low], 0.0
    return chosen[low], chosen[high], math.log(ranks / low) / math.log(high / low)
