"""Boosted trees as plain arrays: small files, reproducible predictions, no xgboost needed to predict."""

from __future__ import annotations

import base64
import zlib
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


def to_record(forest: Forest) -> dict[str, Any]:
    """JSON-able content; leaves keep 16 bits, a relative error of 0.0005 in a small addend."""
    return {
        "trees": len(forest.leaves),
        "base": round(forest.base, 7),
        "columns": packed(forest.columns),
        "thresholds": packed(forest.thresholds),
        "leaves": packed(forest.leaves.astype(np.float16)),
    }


def from_record(record: dict[str, Any]) -> Forest:
    """Inverse of :func:`to_record`; ``ValueError`` or ``KeyError`` for invalid records."""
    trees = int(record["trees"])
    inner = unpacked(record["columns"], np.uint8).size // trees if trees else 1
    columns = unpacked(record["columns"], np.uint8).reshape(trees, inner)
    thresholds = unpacked(record["thresholds"], np.float32).reshape(trees, inner)
    leaves = unpacked(record["leaves"], np.float16).reshape(trees, inner + 1).astype(np.float32)
    if columns.shape != thresholds.shape or leaves.shape[1] != columns.shape[1] + 1:
        raise ValueError("the arrays of a forest do not fit together")
    if not (np.isfinite(leaves).all() and abs(float(record["base"])) < _LARGEST_BASE):
        raise ValueError("what a forest adds up is no logarithm of a ratio")
    return Forest(columns, thresholds, leaves, float(record["base"]))


def packed(array: np.ndarray) -> str:
    """``array`` compressed and encoded as text."""
    return base64.b64encode(zlib.compress(np.ascontiguousarray(array).tobytes(), 9)).decode("ascii")


def unpacked(text: str, dtype: Any) -> np.ndarray:
    """Inverse of :func:`packed`, one-dimensional; ``ValueError`` for invalid text."""
    try:
        return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype=dtype)
    except zlib.error as error:
        raise ValueError(f"compressed array: {error}") from None
