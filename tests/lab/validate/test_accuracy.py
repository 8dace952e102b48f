"""Error figures, by hand."""

from __future__ import annotations

import pytest

from costmodel.cost_model import Estimate
from lab.validate.errors import accuracy


def estimate(seconds, lower=None, upper=None, source="analytic"):
    return Estimate(seconds, seconds if lower is None else lower, seconds if upper is None else upper, "x", {}, source)


def test_accuracy_by_hand():
    # Errors +10 %, -20 %, 0 %, +50 % of 1, 10, 1, 2 seconds.
    estimates = [
        estimate(1.1, lower=0.9, source="fitted"),
        estimate(8),
        estimate(1, source="measured"),
        estimate(3, lower=2.5),
    ]
    result = accuracy(estimates, [1, 10, 1, 2])
    assert result.count == 4
    assert result.mape == pytest.approx(0.2)
    assert result.median == pytest.approx(0.15)
    assert result.worst == pytest.approx(0.5)
    assert result.p90 == pytest.approx(0.2 + 0.7 * 0.3)
    assert result.bias == pytest.approx(0.1)
    assert result.geomean == pytest.approx((0.1 * 0.2 * 1e-4 * 0.5) ** 0.25)
    assert result.interval == 0.5
    assert result.coverage == pytest.approx({"fitted": 1.1 / 13.1, "analytic": 11 / 13.1, "measured": 1 / 13.1})
