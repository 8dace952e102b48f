"""Accuracy of predictions. Errors are relative to the measured time: ``(predicted - measured) / measured``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.model.cost_model import Estimate


@dataclass(frozen=True)
class Accuracy:
    """Error statistics, as fractions, not percent. ``geomean`` is dominated by single small errors: only report it
    beside the others.

    mape: mean absolute relative error; median, p90, worst: of the absolute relative errors; bias: mean signed error.
    geomean: geometric mean of the absolute errors, each at least 1e-4. interval: share of the measured times inside
    their estimate's [lower, upper]. coverage: share of the predicted time by source of the estimate.
    """

    count: int
    mape: float
    median: float
    p90: float
    worst: float
    bias: float
    geomean: float
    interval: float
    coverage: dict[str, float]


def relative_errors(predicted: Sequence[float], measured: Sequence[float]) -> np.ndarray:
    """Signed relative errors, shape (count,); ``ValueError`` if lengths differ, are zero or a time is not above 0."""
    prediction, truth = np.asarray(predicted, dtype=float), np.asarray(measured, dtype=float)
    if prediction.shape != truth.shape or prediction.size == 0:
        raise ValueError(f"need as many predictions as measurements, got {prediction.size} and {truth.size}")
    if not (truth > 0).all():
        raise ValueError("measured times must be above zero")
    return np.asarray((prediction - truth) / truth)


def accuracy(estimates: Sequence[Estimate], measured: Sequence[float]) -> Accuracy:
    """Compare estimates with the times measured for the same operators, in seconds."""
    signed = relative_errors([estimate.seconds for estimate in estimates], measured)
    errors = np.abs(signed)
    inside = [each.lower <= time <= each.upper for each, time in zip(estimates, measured, strict=True)]
    return Accuracy(
        count=len(errors),
        mape=float(errors.mean()),
        median=float(np.median(errors)),
        p90=float(np.quantile(errors, 0.9)),
        worst=float(errors.max()),
        bias=float(signed.mean()),
        geomean=float(np.exp(np.log(np.maximum(errors, 1e-4)).mean())),
        interval=float(np.mean(inside)),
        coverage=coverage(estimates),
    )


def coverage(estimates: Sequence[Estimate]) -> dict[str, float]:
    """Share of the total predicted time by source."""
    total = sum(estimate.seconds for estimate in estimates)
    shares: dict[str, float] = {}
    for estimate in estimates:
        shares[estimate.source] = shares.get(estimate.source, 0.0) + (estimate.seconds / total if total else 0.0)
    return shares
