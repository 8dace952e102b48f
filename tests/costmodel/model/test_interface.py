from __future__ import annotations

import pickle
from dataclasses import FrozenInstanceError

import pytest

from costmodel.base.errors import UnsupportedOperatorError
from costmodel.cost_model import (
    CostModel,
    Dispatch,
    Estimate,
    Measurement,
)
from costmodel.operators.any_operator import from_record, to_record
from costmodel.operators.layers import Conv2d, Dense, Epilogue, FusedConvs, Pool2d

DENSE = Dense(1, 2, 3, epilogue=Epilogue(bias=True, activation="relu", residual="after_activation"))
POOL = Pool2d("average", 1, 4, 6, 6, (2, 2), (2, 2))
PAIR = FusedConvs((Conv2d(1, 2, 4, 4, 2, (3, 3), groups=2), Conv2d(1, 2, 2, 2, 5, (1, 1))))


def estimate(seconds, lower=None, upper=None, source="analytic"):
    return Estimate(seconds, seconds if lower is None else lower, seconds if upper is None else upper, "x", {}, source)


@pytest.mark.parametrize(
    ("seconds", "lower", "upper"),
    [(1, 2, 3), (3, 1, 2), (1, -1, 2), (float("nan"), 0, 1), (1, 0, float("inf"))],
)
def test_an_estimate_is_finite_and_inside_its_interval(seconds, lower, upper):
    with pytest.raises(ValueError, match="finite|lower"):
        Estimate(seconds, lower, upper, "compute")


def test_an_estimate_says_where_it_comes_from():
    with pytest.raises(ValueError, match="measured, fitted, analytic"):
        Estimate(1, 1, 1, "compute", {}, "guessed")


def test_an_estimate_is_frozen_and_travels_to_other_processes():
    terms = {"compute_seconds": 1.0}
    record = Estimate(1, 1, 2, "compute", terms)
    terms["compute_seconds"] = 7.0
    assert record.breakdown["compute_seconds"] == 1.0
    with pytest.raises(TypeError):
        record.breakdown["compute_seconds"] = 2.0
    with pytest.raises(FrozenInstanceError):
        record.seconds = 2
    assert pickle.loads(pickle.dumps(record)) == record


@pytest.mark.parametrize("operator", [DENSE, POOL, PAIR])
def test_operators_and_measurements_survive_json(operator):
    import json

    assert from_record(json.loads(json.dumps(to_record(operator)))) == operator
    measurement = Measurement(operator, {"rows": 2}, 1e-3)
    assert pickle.loads(pickle.dumps(measurement)) == measurement


@pytest.mark.parametrize(
    "record",
    [
        {"type": "Nonsense"},
        {"rows": 1},
        {"type": "Dense", "rows": 1, "depth": 2},
        {"type": "Dense", "rows": 1, "in_features": 2},
    ],
)
def test_unknown_operators_are_refused(record):
    with pytest.raises(ValueError, match="unknown operator|malformed Dense"):
        from_record(record)


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf")])
def test_a_measured_time_is_positive(seconds):
    with pytest.raises(ValueError, match="above zero"):
        Measurement(DENSE, {}, seconds)


class Constant(CostModel):
    """Prices everything at ``seconds``."""

    def __init__(self, seconds):
        self.seconds = seconds

    def estimate(self, operators):
        return [estimate(self.seconds) for _ in operators]


def test_dispatch_asks_the_model_of_each_type_and_keeps_the_order():
    model = Dispatch({Dense: Constant(1), Pool2d: Constant(2)})
    assert [each.seconds for each in model.estimate([POOL, DENSE, POOL])] == [2, 1, 2]
    assert model.estimate([]) == []


def test_dispatch_has_no_silent_default():
    with pytest.raises(UnsupportedOperatorError, match=r"FusedConvs \(known: Dense\)"):
        Dispatch({Dense: Constant(1)}).estimate([PAIR])
