from __future__ import annotations

import numpy as np
import pytest

from lab.fit.trees import TreeEffort, train

pytest.importorskip("xgboost")
EFFORT = TreeEffort(3, 40, 3, 40)


@pytest.fixture(scope="module")
def sample():
    rng = np.random.default_rng(0)
    size = rng.uniform(0, 10, 1200)
    noise = rng.normal(0, 0.1, 1200)
    return {"size": size, "other": rng.uniform(0, 1, 1200)}, np.where(size > 5, 0.5, 0.0) + noise


@pytest.fixture(scope="module")
def learned(sample):
    features, target = sample
    return train(features, target, np.arange(1200) % 6 == 0, EFFORT)


def test_it_learns_where_the_analytic_model_is_off(learned):
    middle, lower, upper = learned.predict(np.array([[2.0, 0.5], [8.0, 0.5]]))
    assert middle == pytest.approx([0.0, 0.5], abs=0.08)
    assert (lower <= middle).all() and (middle <= upper).all()


def test_four_of_five_new_rows_fall_inside(learned):
    rng = np.random.default_rng(1)
    size = rng.uniform(0, 10, 2000)
    truth = np.where(size > 5, 0.5, 0.0) + rng.normal(0, 0.1, 2000)
    _, lower, upper = learned.predict(np.stack([size, rng.uniform(0, 1, 2000)], axis=1))
    assert 0.75 <= ((lower <= truth) & (truth <= upper)).mean() <= 0.92


def test_rows_beyond_what_was_seen_are_named(learned):
    assert learned.outside(np.array([5.0, 0.5])) == ()
    assert learned.outside(np.array([10.4, 0.5])) == ()  # half a unit is near
    assert learned.outside(np.array([12.0, 3.0])) == ("size", "other")
