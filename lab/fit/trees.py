"""Training of residuals: boosted trees of log(measured / analytic) with a conformal interval, by xgboost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.gpu.residual import Forest, Lattice, Residual

QUANTILES = (0.1, 0.9)


@dataclass(frozen=True)
class TreeEffort:
    """Size of the trees. Chosen on the selection split; families with few rows need small ones."""

    depth: int
    rounds: int
    quantile_depth: int = 4
    quantile_rounds: int = 60


LARGE, SMALL = TreeEffort(6, 160), TreeEffort(4, 80, 3, 40)
MANY_ROWS = 3000


def train(
    features: Mapping[str, np.ndarray],
    log_ratio: np.ndarray,
    held_out: np.ndarray,
    effort: TreeEffort | None = None,
    known: Lattice | None = None,
) -> Residual:
    """Train a residual on ``log_ratio`` (rows,). Rows where ``held_out`` set the interval's margin and only train the
    middle.

    ``known``: the lattice to which ``log_ratio`` is relative; then only the interval is learned.
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
    """Size of trees suitable for ``rows`` rows."""
    return LARGE if rows >= MANY_ROWS else SMALL


def middle_of(
    features: np.ndarray, log_ratio: np.ndarray, effort: TreeEffort, weights: np.ndarray | None = None
) -> Forest:
    """Forest with the best fit of ``log_ratio`` (rows,) over ``features`` (rows, columns)."""
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


def constant(value: float) -> Forest:
    """Forest that always predicts ``value``."""
    return Forest(
        np.zeros((0, 1), dtype=np.uint8), np.zeros((0, 1), dtype=np.float32), np.zeros((0, 2), dtype=np.float32), value
    )


def from_booster(booster: Any, depth: int) -> Forest:
    """Trees of an xgboost ``booster`` with depth at most ``depth``."""
    config = json.loads(booster.save_config())
    base = config["learner"]["learner_model_param"]["base_score"]
    trees = [json.loads(dump) for dump in booster.get_dump(dump_format="json")]
    names = {name: place for place, name in enumerate(booster.feature_names or ())}
    columns = np.zeros((len(trees), 2**depth - 1), dtype=np.uint8)
    thresholds = np.full(columns.shape, np.inf, dtype=np.float32)
    leaves = np.zeros((len(trees), 2**depth), dtype=np.float32)
    for place, tree in enumerate(trees):
        _fill(tree, 0, names, columns[place], thresholds[place], leaves[place])
    return Forest(columns, thresholds, leaves, float(np.atleast_1d(json.loads(base))[0]))


def _fill(
    node: Any, place: int, names: dict[str, int], columns: np.ndarray, thresholds: np.ndarray, leaves: np.ndarray
) -> None:
    """Copy the tree under ``node`` to heap position ``place``; a leaf above the bottom is repeated below itself."""
    inner = len(columns)
    if "leaf" in node:
        while place < inner:
            place = 2 * place + 1  # an infinite threshold sends every row left
        leaves[place - inner] = node["leaf"]
        return
    split = node["split"]
    columns[place] = names[split] if split in names else int(split.removeprefix("f"))
    thresholds[place] = np.float32(node["split_condition"])
    children = {child["nodeid"]: child for child in node["children"]}
    _fill(children[node["yes"]], 2 * place + 1, names, columns, thresholds, leaves)
    _fill(children[node["no"]], 2 * place + 2, names, columns, thresholds, leaves)
