"""What the analytic model of a family misses on one GPU: log(measured / analytic), learned with an interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.gpu.residuals import forest
from costmodel.gpu.residuals.forest import Forest

QUANTILES = (0.1, 0.9)


@dataclass(frozen=True)
class Residual:
    """``names``: the features in order, with the range seen of each. ``margin`` (log units) widens quantiles so that
    held-out rows fall inside as often as they should (conformalised quantile regression, Romano et al., NeurIPS 2019).
    """

    names: tuple[str, ...]
    lowest: np.ndarray
    highest: np.ndarray
    middle: Forest
    lower: Forest
    upper: Forest
    margin: float
    rows: int

    def predict(self, features: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Middle, lower and upper log residual of each row."""
        middle = self.middle.predict(features)
        bounds = np.sort(np.stack([self.lower.predict(features), self.upper.predict(features)]), axis=0)
        low, high = bounds[0] - self.margin, bounds[1] + self.margin
        return middle, np.minimum(low, middle), np.maximum(high, middle)

    def outside(self, row: np.ndarray) -> tuple[str, ...]:
        """Names of the features of ``row`` beyond what was seen, by more than half a doubling (or half a unit)."""
        beyond = (row < self.lowest - 0.5) | (row > self.highest + 0.5)
        return tuple(name for name, out in zip(self.names, beyond, strict=True) if out)


@dataclass(frozen=True)
class TreeEffort:
    """Size of the trees. Chosen on the selection split; families with few rows need small ones."""

    depth: int
    rounds: int
    quantile_depth: int = 4
    quantile_rounds: int = 60


_MOST_MARGIN = 50.0  # of a logarithm: beyond it nothing is known
LARGE, SMALL = TreeEffort(6, 160), TreeEffort(4, 80, 3, 40)
MANY_ROWS = 3000


def train(
    features: Mapping[str, np.ndarray], log_ratio: np.ndarray, held_out: np.ndarray, effort: TreeEffort | None = None
) -> Residual:
    """Learns ``log_ratio`` (rows,). Rows where ``held_out`` set the interval's margin and train the middle only."""
    matrix = np.stack([np.asarray(column, dtype=np.float32) for column in features.values()], axis=1)
    effort = effort or (LARGE if len(matrix) >= MANY_ROWS else SMALL)
    middle = boost(matrix, log_ratio, effort.depth, effort.rounds, {"objective": "reg:squarederror"})
    bounds = [
        boost(
            matrix[~held_out],
            log_ratio[~held_out],
            effort.quantile_depth,
            effort.quantile_rounds,
            {"objective": "reg:quantileerror", "quantile_alpha": alpha},
        )
        for alpha in QUANTILES
    ]
    low, high = np.sort(np.stack([each.predict(matrix[held_out]) for each in bounds]), axis=0)
    missed = np.maximum(low - log_ratio[held_out], log_ratio[held_out] - high)
    level = min((QUANTILES[1] - QUANTILES[0]) * (1 + 1 / len(missed)), 1.0)
    margin = max(float(np.quantile(missed, level, method="higher")), 0.0)
    lowest, highest = matrix.min(axis=0), matrix.max(axis=0)
    return Residual(tuple(features), lowest, highest, middle, bounds[0], bounds[1], margin, len(matrix))


def boost(features: np.ndarray, targets: np.ndarray, depth: int, rounds: int, objective: dict[str, Any]) -> Forest:
    """Boosted trees of ``targets`` (rows,) over ``features`` (rows, columns); ``objective``: for xgboost."""
    import xgboost

    parameters: dict[str, Any] = {"max_depth": depth, "eta": 0.1, "min_child_weight": 4}
    parameters |= {"subsample": 0.8, "colsample_bytree": 0.8}
    parameters |= {"tree_method": "hist", "seed": 0, "nthread": 2, "verbosity": 0, **objective}
    booster = xgboost.train(parameters, xgboost.QuantileDMatrix(features, targets, nthread=2), num_boost_round=rounds)
    return forest.from_booster(booster, depth)


def to_record(residual: Residual) -> dict[str, Any]:
    """JSON-able content of ``residual``."""
    return {
        "features": list(residual.names),
        "lowest": [round(float(value), 3) for value in residual.lowest],
        "highest": [round(float(value), 3) for value in residual.highest],
        "margin": round(residual.margin, 5),
        "rows": residual.rows,
        "middle": forest.to_record(residual.middle),
        "lower": forest.to_record(residual.lower),
        "upper": forest.to_record(residual.upper),
    }


def from_record(record: dict[str, Any]) -> Residual:
    """Inverse of :func:`to_record`; ``ValueError`` or ``KeyError`` for anything else."""
    trees = {name: forest.from_record(record[name]) for name in ("middle", "lower", "upper")}
    if not all(isinstance(name, str) for name in record["features"]):
        raise ValueError("features are not names")
    if not 0 <= float(record["margin"]) < _MOST_MARGIN:
        raise ValueError(f"margin {record['margin']}")
    lowest, highest = (np.array(record[name], dtype=np.float32) for name in ("lowest", "highest"))
    if not len(record["features"]) == len(lowest) == len(highest):
        raise ValueError("features and their ranges do not fit together")
    return Residual(
        tuple(record["features"]), lowest, highest, margin=float(record["margin"]), rows=int(record["rows"]), **trees
    )
