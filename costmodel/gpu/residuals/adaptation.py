"""Adaptation of a family to a GPU by a few measurements: log(measured / predicted) as a level and slopes over its
features.

Ridge regression with Huber weights: the level is free, each slope (per standard deviation of its feature) has a normal
prior around zero. With very few points only the level, their median.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

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


def to_record(adaptation: Adaptation) -> dict[str, Any]:
    """JSON-able content of ``adaptation``."""
    return {
        "features": list(adaptation.names),
        "centre": [round(float(value), 4) for value in adaptation.centre],
        "scale": [round(float(value), 4) for value in adaptation.scale],
        "weights": [round(float(value), 5) for value in adaptation.weights],
        "points": adaptation.points,
    }


def from_record(record: dict[str, Any]) -> Adaptation:
    """Inverse of :func:`to_record`; ``ValueError`` or ``KeyError`` for invalid records."""
    centre, scale, weights = (np.array(record[name], dtype=float) for name in ("centre", "scale", "weights"))
    names = tuple(record["features"])
    if not len(names) == len(centre) == len(scale) == len(weights) - 1:
        raise ValueError("features and weights of an adaptation do not fit together")
    return Adaptation(names, centre, scale, weights, int(record["points"]))
