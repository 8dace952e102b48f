from __future__ import annotations

import json

import numpy as np
import pytest

from costmodel.gpu import residual
from costmodel.gpu.residual import Forest
from lab.fit.trees import from_booster


def test_trees_add_up_over_their_depth():
    columns, thresholds = np.array([[0, 1, 1]] * 2), np.array([[0.0, 0.0, 0.0]] * 2)
    both = Forest(columns, thresholds, np.array([[1.0, 2.0, 3.0, 4.0]] * 2), base=0.0)
    assert both.predict(np.array([[-1, -1], [-1, 1], [1, -1], [1, 1]])).tolist() == [2, 4, 6, 8]


def test_the_arrays_answer_as_xgboost_does():
    xgboost = pytest.importorskip("xgboost")
    rng = np.random.default_rng(0)
    features = rng.normal(size=(400, 3)).astype(np.float32)
    targets = np.where(features[:, 0] > 0, 3.0, 1.0) + features[:, 1] * features[:, 2]
    booster = xgboost.train({"max_depth": 4, "verbosity": 0}, xgboost.DMatrix(features, targets), num_boost_round=30)
    expected = booster.predict(xgboost.DMatrix(features))
    ours = from_booster(booster, 4)
    assert ours.predict(features) == pytest.approx(expected, abs=1e-4)
    read = residual.forest_from_record(json.loads(json.dumps(residual.forest_to_record(ours))))
    assert read.predict(features) == pytest.approx(expected, abs=0.02)
    assert (read.columns == ours.columns).all() and (read.thresholds == ours.thresholds).all()
