"""Residual of a family's analytic model on one GPU: log(measured / analytic), learned with an interval."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.gpu.residuals import forest, lattice
from costmodel.gpu.residuals.forest import Forest
from costmodel.gpu.residuals.lattice import Lattice


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
    """Inverse of :func:`to_record`; ``ValueError`` or ``KeyError`` for invalid records."""
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
