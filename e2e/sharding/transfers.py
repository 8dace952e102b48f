"""Seconds of the exchanges of a step, as functions of bytes: tabulated once, read by the thousand."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from costmodel.collective_operators import CollectiveKind, CollectiveTransfer
from costmodel.interface import CostModel

Floats = NDArray[np.float64]
KINDS: tuple[CollectiveKind, ...] = ("all_to_all", "reduce_scatter", "all_gather", "all_reduce")
# Sizes at which the model is asked, eight to an octave; straight lines between them.
SMALLEST, LARGEST, PER_OCTAVE = 2**8, 2**38, 8


class TransferTimes:
    """Collectives among all ``ranks`` on ``nodes``. Sizes as :class:`CollectiveTransfer` counts them; of an
    all_to_all: what the busiest rank receives (or sends) with its own part. One rank moves nothing.

    ``factors``: kind -> what its times are multiplied by (for experiments on wrong models).
    """

    def __init__(self, model: CostModel, ranks: int, nodes: int, factors: Mapping[str, float] | None = None) -> None:
        octaves = (LARGEST // SMALLEST).bit_length() - 1
        self.sizes: Floats = np.concatenate([[0.0], SMALLEST * 2.0 ** (np.arange(octaves * PER_OCTAVE + 1) / PER_OCTAVE)])
        self.seconds: dict[str, Floats] = {}
        for kind in KINDS:
            if ranks == 1:
                self.seconds[kind] = np.zeros_like(self.sizes)
                continue
            transfers = [_transfer(kind, float(size), ranks, nodes) for size in self.sizes]
            times = np.array([estimate.seconds for estimate in model.estimate(transfers)])
            self.seconds[kind] = times * (factors or {}).get(kind, 1.0)

    def of(self, kind: CollectiveKind, size_bytes: ArrayLike) -> Floats:
        """Seconds, in the shape of ``size_bytes``; in proportion beyond the largest size."""
        size = np.asarray(size_bytes, dtype=float)
        table = self.seconds[kind]
        beyond = np.maximum(size / LARGEST, 1.0)
        return np.asarray(np.interp(size, self.sizes, table) * beyond)

    def line(self, kind: CollectiveKind, low: float, high: float) -> tuple[float, float]:
        """Start and slope of the straight line through two sizes."""
        high = max(high, low + 1.0)
        first, last = (float(self.of(kind, size)) for size in (low, high))
        slope = max((last - first) / (high - low), 0.0)
        return max(first - slope * low, 0.0), slope

    def floor_line(self, kind: CollectiveKind, highest: float) -> tuple[float, float]:
        """The steepest line from the time of no bytes that is nowhere above the times up to ``highest``."""
        start = float(self.seconds[kind].min())
        places = (self.sizes > 0) & (self.sizes <= max(highest, SMALLEST) * 2)
        return start, float(((self.seconds[kind][places] - start) / self.sizes[places]).min())


def _transfer(kind: CollectiveKind, size: float, ranks: int, nodes: int) -> CollectiveTransfer:
    busiest = size * (ranks - 1) / ranks if kind == "all_to_all" else None
    return CollectiveTransfer(kind, size, ranks, nodes, busiest)
