"""What the analytic model of a family misses on one GPU: log(measured / analytic), learned with an interval."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.gpu.residuals import forest, lattice
from costmodel.gpu.residuals.forest import Forest, constant, from_booster
from costmodel.gpu.residuals.lattice import Lattice

QUANTILES = (0.1, 0.9)


@dataclass(frozen=True)
class Residual:
    """``names``: the features in order, with the range seen of each. ``margin`` (log units) widens quantiles so that
    held-out rows fall inside as often as they should (conformalised quantile regression, Romano et al., NeurIPS 2019).

    ``lattice``: seconds on the GPU itself, of families with sizes of their own; the forests then add to its logarithm
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
    features: Mapping[str, np.ndarray],
    log_ratio: np.ndarray,
    held_out: np.ndarray,
    effort: TreeEffort | None = None,
    known: Lattice | None = None,
) -> Residual:
    """Learns ``log_ratio`` (rows,). Rows where ``held_out`` set the interval's margin and train the middle only.

    ``known``: the lattice that ``log_ratio`` is relative to; then only the interval is learned.
    """
    matrix = np.stack([np.asarray(column, dtype=np.float32) for column in features.values()], axis=1)
    effort = effort or effort_for(len(matrix))
    middle = constant(0.0) if known is not None else middle_of(matrix, log_ratio, effort)
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
    return Residual(tuple(features), lowest, highest, middle, bounds[0], bounds[1], margin, len(matrix), known)


def effort_for(rows: int) -> TreeEffort:
    """Size of trees that so many rows carry."""
    return LARGE if rows >= MANY_ROWS else SMALL


def middle_of(
    features: np.ndarray, log_ratio: np.ndarray, effort: TreeEffort, weights: np.ndarray | None = None
) -> Forest:
    """The forest that meets ``log_ratio`` (rows,) over ``features`` (rows, columns) best."""
    return boost(features, log_ratio, effort.depth, effort.rounds, {"objective": "reg:squarederror"}, weights)


def boost(
    features: np.ndarray,
    targets: np.ndarray,
    depth: int,
    rounds: int,
    objective: dict[str, Any],
    weights: np.ndarray | None = None,
) -> Forest:
    """Boosted trees of ``targets`` (rows,) over ``features`` (rows, columns); ``objective``: for xgboost."""
    import xgboost

    parameters: dict[str, Any] = {"max_depth": depth, "eta": 0.1, "min_child_weight": 4}
    parameters |= {"subsample": 0.8, "colsample_bytree": 0.8}
    parameters |= {"tree_method": "hist", "seed": 0, "nthread": 2, "verbosity": 0, **objective}
    table = xgboost.QuantileDMatrix(features, targets, weight=weights, nthread=2)
    booster = xgboost.train(parameters, table, num_boost_round=rounds)
    return from_booster(booster, depth)


def to_record(residual: Residual) -> dict[str, Any]:
    """JSON-able content of ``residual``."""
    known = {} if residual.lattice is None else {"lattice": lattice.to_record(residual.lattice)}
    return {
        "features": list(residual.names),
        "lowest": [round(float(value), 3) for value in residual.lowest],
        "highest": [round(float(value), 3) for value in residual.highest],
        "margin": round(residual.margin, 5),
        "rows": residual.rows,
        "middle": forest.to_record(residual.middle),
        "lower": forest.to_record(residual.lower),
        "upper": forest.to_record(residual.upper),
        **known,
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
    known = lattice.from_record(record["lattice"]) if "lattice" in record else None
    margin, rows = float(record["margin"]), int(record["rows"])
    return Residual(tuple(record["features"]), lowest, highest, margin=margin, rows=rows, lattice=known, **trees)
