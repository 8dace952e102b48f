"""Seconds of kernels as a table over their sizes, non-decreasing along every axis and interpolated between points.

Trees predict step functions, and adding them to a model that rises with a size may make the sum fall. So where tables
are grids of sizes, trees are evaluated only at the points of a lattice. Their values are changed as little as possible
to make them non-decreasing in every size, and the seconds between points are interpolated linearly in the sizes, which
is exact for arithmetic, for traffic and for a fixed cost. Beyond the last point the rate of that point holds.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.gpu.residuals.forest import packed, unpacked

_STEPS = 1e4  # resolution of stored seconds: steps per unit of a logarithm
_LONGEST = 20.0  # largest log seconds in a file
_ROUNDS = 20  # projections, after which little is left to raise


@dataclass(frozen=True)
class Lattice:
    """Lattice of seconds. ``axes``: ascending sizes of each axis; ``seconds`` (points of each axis ...)
    non-decreasing.
    """

    axes: tuple[np.ndarray, ...]
    seconds: np.ndarray

    def points(self) -> np.ndarray:
        """Sizes at every point (points, axes), the last axis fastest."""
        return np.stack(np.meshgrid(*self.axes, indexing="ij"), axis=-1).reshape(-1, len(self.axes))

    def scaled(self, shares: np.ndarray) -> Lattice:
        """The lattice multiplied by ``shares`` (points,), made non-decreasing."""
        return Lattice(self.axes, raised(self.seconds * shares.reshape(self.seconds.shape)))

    def at(self, sizes: np.ndarray) -> np.ndarray:
        """Seconds at ``sizes`` (rows, axes)."""
        lower, shares, beyond = [], [], np.ones(len(sizes))
        for points, column in zip(self.axes, np.asarray(sizes, dtype=float).T, strict=True):
            beyond *= np.maximum(column / points[-1], 1.0)
            inside = np.clip(column, points[0], points[-1])
            place = np.clip(np.searchsorted(points, inside, side="right") - 1, 0, len(points) - 2)
            lower.append(place)
            shares.append((inside - points[place]) / (points[place + 1] - points[place]))
        total = np.zeros(len(sizes))
        for corner in itertools.product((0, 1), repeat=len(self.axes)):
            weight = np.prod([share if up else 1 - share for share, up in zip(shares, corner, strict=True)], axis=0)
            total += weight * self.seconds[tuple(place + up for place, up in zip(lower, corner, strict=True))]
        return np.asarray(total * beyond)


def raised(seconds: np.ndarray) -> np.ndarray:
    """Smallest array that is nowhere below ``seconds`` and non-decreasing along all axes."""
    for axis in range(seconds.ndim):
        seconds = np.maximum.accumulate(seconds, axis=axis)
    return seconds


def rising(seconds: np.ndarray) -> np.ndarray:
    """Array nearest to ``seconds`` (least squares of logarithms) that is non-decreasing along all axes.

    Alternating projections of Dykstra (1983) onto the convex sets of each axis, then :func:`raised` for the remainder.
    """
    from scipy.optimize import isotonic_regression

    logs, owed = np.log(seconds), [np.zeros(seconds.shape) for _ in range(seconds.ndim)]
    for _ in range(_ROUNDS):
        for axis in range(seconds.ndim):
            wanted = logs + owed[axis]
            logs = np.apply_along_axis(lambda row: isotonic_regression(row).x, axis, wanted)
            owed[axis] = wanted - logs
    return raised(np.exp(logs))


def to_record(lattice: Lattice) -> dict[str, Any]:
    """JSON-able content of ``lattice``."""
    logs = np.round(np.log(lattice.seconds) * _STEPS).astype(np.int32)
    changes = np.diff(logs.ravel(), prepend=0).astype(np.int32)
    return {"axes": [[float(size) for size in axis] for axis in lattice.axes], "log_seconds": packed(changes)}


def from_record(record: dict[str, Any]) -> Lattice:
    """Inverse of :func:`to_record`; ``ValueError`` or ``KeyError`` for invalid records."""
    axes = tuple(np.array(axis, dtype=float) for axis in record["axes"])
    if not all(
        len(axis) > 1 and np.isfinite(axis).all() and axis[0] > 0 and (np.diff(axis) > 0).all() for axis in axes
    ):
        raise ValueError("the sizes of a lattice do not ascend")
    logs = np.cumsum(unpacked(record["log_seconds"], np.int32).astype(np.int64)) / _STEPS
    if len(logs) != np.prod([len(axis) for axis in axes]) or not (np.abs(logs) < _LONGEST).all():
        raise ValueError("the seconds of a lattice do not fit its sizes")
    return Lattice(axes, raised(np.exp(logs).reshape([len(axis) for axis in axes])))


def axes_of(*sizes: Sequence[float]) -> tuple[np.ndarray, ...]:
    """Axes with the given sizes."""
    return tuple(np.array(each, dtype=float) for each in sizes)
