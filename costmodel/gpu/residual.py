"""What measurements add to the analytic model of a kernel family: log(measured / analytic), learned with an interval.

- :class:`Residual`: boosted trees over the features of a family on one GPU, as plain arrays (:class:`Forest`): small
  files, reproducible predictions, no xgboost needed to predict.
- :class:`Lattice`: seconds of kernels as a table over their sizes, non-decreasing along every axis and interpolated
  between points. Trees predict step functions, and adding them to a model that rises with a size may make the sum
  fall. So where tables are grids of sizes, trees are evaluated only at the points of a lattice. Their values are
  changed as little as possible to make them non-decreasing in every size, and the seconds between points are
  interpolated linearly in the sizes, which is exact for arithmetic, for traffic and for a fixed cost. Beyond the last
  point the rate of that point holds.
- :class:`Adaptation`: a few measurements of another GPU, as a level and slopes over the features. Ridge regression
  with Huber weights: the level is free, each slope (per standard deviation of its feature) has a normal prior around
  zero. With very few points only the level, their median.
"""

from __future__ import annotations

import base64
import itertools
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_LARGEST_BASE = 50.0  # largest base, as a logarithm


@dataclass(frozen=True)
class Forest:
    """Complete binary trees of equal depth d. ``columns`` and ``thresholds``: (trees, 2^d - 1) in heap order, a row
    goes right if its value is not below the threshold; ``leaves``: (trees, 2^d). The prediction is the sum of leaves
    plus ``base``.
    """

    columns: np.ndarray
    thresholds: np.ndarray
    leaves: np.ndarray
    base: float

    def predict(self, features: np.ndarray) -> np.ndarray:
        """Prediction for each row of ``features`` (rows, columns), shape (rows,)."""
        rows = np.asarray(features, dtype=np.float32)
        total = np.full(len(rows), self.base, dtype=float)
        depth = int(self.leaves.shape[1]).bit_length() - 1
        every = np.arange(len(rows))
        for columns, thresholds, leaves in zip(self.columns, self.thresholds, self.leaves, strict=True):
            node = np.zeros(len(rows), dtype=np.int64)
            for _ in range(depth):
                right = rows[every, columns[node]] >= thresholds[node]
                node = 2 * node + 1 + right
            total += leaves[node - (len(leaves) - 1)]
        return total


def forest_to_record(forest: Forest) -> dict[str, Any]:
    """JSON-able content; leaves keep 16 bits, a relative error of 0.0005 in a small addend."""
    return {
        "trees": len(forest.leaves),
        "base": round(forest.base, 7),
        "columns": pack_array(forest.columns),
        "thresholds": pack_array(forest.thresholds),
        "leaves": pack_array(forest.leaves.astype(np.float16)),
    }


def forest_from_record(record: dict[str, Any]) -> Forest:
    """Inverse of :func:`to_record`; ``ValueError`` or ``KeyError`` for invalid records."""
    trees = int(record["trees"])
    inner = unpack_array(record["columns"], np.uint8).size // trees if trees else 1
    columns = unpack_array(record["columns"], np.uint8).reshape(trees, inner)
    thresholds = unpack_array(record["thresholds"], np.float32).reshape(trees, inner)
    leaves = unpack_array(record["leaves"], np.float16).reshape(trees, inner + 1).astype(np.float32)
    if columns.shape != thresholds.shape or leaves.shape[1] != columns.shape[1] + 1:
        raise ValueError("the arrays of a forest do not fit together")
    if not (np.isfinite(leaves).all() and abs(float(record["base"])) < _LARGEST_BASE):
        raise ValueError("what a forest adds up is no logarithm of a ratio")
    return Forest(columns, thresholds, leaves, float(record["base"]))


def pack_array(array: np.ndarray) -> str:
    """``array`` compressed and encoded as text."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode("ascii")


def unpack_array(text: str, dtype: Any) -> np.ndarray:
    """Inverse of :func:`pack_array`, one-dimensional; ``ValueError`` for invalid text."""
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=dtype)
    except zlib.error as error:
        raise ValueError(f"compressed array: {error}") from None


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
        return Lattice(self.axes, raise_to_monotone(self.seconds * shares.reshape(self.seconds.shape)))

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


def raise_to_monotone(seconds: np.ndarray) -> np.ndarray:
    """Smallest array that is nowhere below ``seconds`` and non-decreasing along all axes."""
    for axis in range(seconds.ndim):
        seconds = np.maximum.accumulate(seconds, axis=axis)
    return seconds


def fit_monotone(seconds: np.ndarray) -> np.ndarray:
    """Array nearest to ``seconds`` (least squares of logarithms) that is non-decreasing along all axes.

    Alternating projections of Dykstra (1983) onto the convex sets of each axis, then :func:`raise_to_monotone` for the
    remainder.
    """
    from scipy.optimize import isotonic_regression

    logs, owed = np.log(seconds), [np.zeros(seconds.shape) for _ in range(seconds.ndim)]
    for _ in range(_ROUNDS):
        for axis in range(seconds.ndim):
            wanted = logs + owed[axis]
            logs = np.apply_along_axis(lambda row: isotonic_regression(row).x, axis, wanted)
            owed[axis] = wanted - logs
    return raise_to_monotone(np.exp(logs))


def lattice_to_record(lattice: Lattice) -> dict[str, Any]:
    """JSON-able content of ``lattice``."""
    logs = np.round(np.log(lattice.seconds) * _STEPS).astype(np.int32)
    changes = np.diff(logs.ravel(), prepend=0).astype(np.int32)
    return {"axes": [[float(size) for size in axis] for axis in lattice.axes], "log_seconds": pack_array(changes)}


def lattice_from_record(record: dict[str, Any]) -> Lattice:
    """Inverse of :func:`to_record`; ``ValueError`` or ``KeyError`` for invalid records."""
    axes = tuple(np.array(axis, dtype=float) for axis in record["axes"])
    if not all(
        len(axis) > 1 and np.isfinite(axis).all() and axis[0] > 0 and (np.diff(axis) > 0).all() for axis in axes
    ):
        raise ValueError("the sizes of a lattice do not ascend")
    logs = np.cumsum(unpack_array(record["log_seconds"], np.int32).astype(np.int64)) / _STEPS
    if len(logs) != np.prod([len(axis) for axis in axes]) or not (np.abs(logs) < _LONGEST).all():
        raise ValueError("the seconds of a lattice do not fit its sizes")
    return Lattice(axes, raise_to_monotone(np.exp(logs).reshape([len(axis) for axis in axes])))


def axes_of(*sizes: Sequence[float]) -> tuple[np.ndarray, ...]:
    """Axes with the given sizes."""
    return tuple(np.array(each, dtype=float) for each in sizes)


@dataclass(frozen=True)
class Residual:
    """Learned residual. ``names``: the features in order, with their observed ranges ``lowest`` to ``highest``.
    ``margin`` (log units) widens quantiles so that held-out rows are covered as often as intended (conformalised
    quantile regression, Romano et al., NeurIPS 2019).

    ``lattice``: seconds on the GPU itself, for families with sizes of their own; the forests then add to its logarithm
    rather than to that of the analytic time, and the middle adds nothing.
    """

    names: tuple[str, ...]
    lowest: np.ndarray
    highest: np.ndarray
    middle: Forest
    lower: Forest
    upper: Forest
    margin: float
    rows: int
    lattice: Lattice | None = None

    def predict(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Middle, lower and upper log residual of each row."""
        middle = self.middle.predict(features)
        bounds = np.sort(np.stack([self.lower.predict(features), self.upper.predict(features)]), axis=0)
        low, high = bounds[0] - self.margin, bounds[1] + self.margin
        return middle, np.minimum(low, middle), np.maximum(high, middle)

    def outside(self, row: np.ndarray) -> tuple[str, ...]:
        """Names of the features of ``row`` outside their observed range by more than half a doubling (or half a
        unit).
        """
        beyond = (row < self.lowest - 0.5) | (row > self.highest + 0.5)
        return tuple(name for name, out in zip(self.names, beyond, strict=True) if out)


_MOST_MARGIN = 50.0  # largest margin, as a logarithm


def residual_to_record(residual: Residual) -> dict[str, Any]:
    """JSON-able content of ``residual``."""
    known = {} if residual.lattice is None else {"lattice": lattice_to_record(residual.lattice)}
    return {
        "features": list(residual.names),
        "lowest": [round(float(value), 3) for value in residual.lowest],
        "highest": [round(float(value), 3) for value in residual.highest],
        "margin": round(residual.margin, 5),
        "rows": residual.rows,
        "middle": forest_to_record(residual.middle),
        "lower": forest_to_record(residual.lower),
        "upper": forest_to_record(residual.upper),
        **known,
    }


def residual_from_record(record: dict[str, Any]) -> Residual:
    """Inverse of :func:`to_record`; ``ValueError`` or ``KeyError`` for invalid records."""
    trees = {name: forest_from_record(record[name]) for name in ("middle", "lower", "upper")}
    if not all(isinstance(name, str) for name in record["features"]):
        raise ValueError("features are not names")
    if not 0 <= float(record["margin"]) < _MOST_MARGIN:
        raise ValueError(f"margin {record['margin']}")
    lowest, highest = (np.array(record[name], dtype=np.float32) for name in ("lowest", "highest"))
    if not len(record["features"]) == len(lowest) == len(highest):
        raise ValueError("features and their ranges do not fit together")
    known = lattice_from_record(record["lattice"]) if "lattice" in record else None
    margin, rows = float(record["margin"]), int(record["rows"])
    return Residual(tuple(record["features"]), lowest, highest, margin=margin, rows=rows, lattice=known, **trees)


MINIMUM_POINTS = 3  # fewer are dominated by their own noise
# Chosen on the select split of left-out GPUs (20 random rows of each): slopes from 0.05 to 0.2, with and without.
_SLOPE, _NOISE, _POINTS_FOR_SLOPES = 0.05, 0.25, 8
_LEAST_SPREAD, _REACH, _SWEEPS = 0.3, 3.0, 6


@dataclass(frozen=True)
class Adaptation:
    """Adaptation of a family. ``weights``: level, then a slope per feature in units of ``scale`` around ``centre``;
    ``points``: number of measurements.
    """

    names: tuple[str, ...]
    centre: np.ndarray
    scale: np.ndarray
    weights: np.ndarray
    points: int

    def shift(self, features: np.ndarray) -> np.ndarray:
        """Shift of the log time of each row of ``features`` (rows, features); extrapolates by up to three
        deviations.
        """
        units = np.clip((features.astype(float) - self.centre) / self.scale, -_REACH, _REACH)
        shift: np.ndarray = self.weights[0] + units @ self.weights[1:]
        return shift


def adapt(names: tuple[str, ...], features: np.ndarray, log_errors: np.ndarray) -> Adaptation | None:
    """Fit an adaptation to ``log_errors`` (points,), log(measured / predicted), at ``features``; ``None`` for too few
    points.
    """
    points = len(log_errors)
    if points < MINIMUM_POINTS:
        return None
    rows = features.astype(float)
    centre, scale = rows.mean(axis=0), np.maximum(rows.std(axis=0), _LEAST_SPREAD)
    weights = np.zeros(1 + len(names))
    if points < _POINTS_FOR_SLOPES:
        weights[0] = float(np.median(log_errors))
    else:
        weights = _ridge(np.column_stack([np.ones(points), (rows - centre) / scale]), log_errors)
    return Adaptation(names, centre, scale, weights, points)


def _ridge(design: np.ndarray, targets: np.ndarray) -> np.ndarray:
    prior = np.diag([1e-6] + [_SLOPE**-2] * (design.shape[1] - 1))
    trust, solution = np.ones(len(targets)), np.zeros(design.shape[1])
    for _ in range(_SWEEPS):
        normal = design.T @ (design * trust[:, None]) / _NOISE**2 + prior
        solution = np.linalg.solve(normal, design.T @ (trust * targets) / _NOISE**2)
        trust = 1 / np.maximum(1.0, np.abs(targets - design @ solution) / _NOISE)
    return solution


def adaptation_to_record(adaptation: Adaptation) -> dict[str, Any]:
    """JSON-able content of ``adaptation``."""
    return {
        "features": list(adaptation.names),
        "centre": [round(float(value), 4) for value in adaptation.centre],
        "scale": [round(float(value), 4) for value in adaptation.scale],
        "weights": [round(float(value), 5) for value in adaptation.weights],
        "points": adaptation.points,
    }


def adaptation_from_record(record: dict[str, Any]) -> Adaptation:
    """Inverse of :func:`to_record`; ``ValueError`` or ``KeyError`` for invalid records."""
    centre, scale, weights = (np.array(record[name], dtype=float) for name in ("centre", "scale", "weights"))
    names = tuple(record["features"])
    if not len(names) == len(centre) == len(scale) == len(weights) - 1:
        raise ValueError("features and weights of an adaptation do not fit together")
    return Adaptation(names, centre, scale, weights, int(record["points"]))
