from __future__ import annotations

import json
import math
import random
import time
from dataclasses import replace

import numpy as np
import pytest

import costmodel.cpu.learned_residual
from costmodel.cost_model import Measurement
from costmodel.cpu.boosted_trees import (
    DTYPE_COLUMNS,
    FOR_UNSEEN,
    BoostedResidual,
    column_names,
    feature_matrix,
    knob_names,
    operator_family,
)
from costmodel.cpu.learned_residual import MIN_MEASUREMENTS, ResidualModel
from costmodel.cpu.roofline import RooflineModel
from costmodel.operators.layers import Conv2d, Dense, FusedConvs, Pool2d

LAYERS = [Conv2d(1, c, h, h, o, (1, 1)) for c, h, o in [(8, 28, 16), (16, 28, 32), (32, 14, 32), (64, 14, 64)]]
UNSEEN = Conv2d(1, 48, 14, 14, 96, (1, 1))
SPACE = [
    {"blocks": blocks, "columns": columns, "rows": rows, "unroll": unroll}
    for blocks in (1, 2, 4)
    for columns in (1, 2, 4, 7, 14, 28)
    for rows in (1, 2, 7, 14)
    for unroll in (1, 4, 8)
]


def true_seconds(model, operator, config):
    """A made-up machine: needs 24 accumulators, spills beyond 28, wastes what a tile does not divide."""
    accumulators = config["blocks"] * config["columns"]
    rate = min(accumulators, 24) / 24 * (0.3 if accumulators > 28 else 1)
    waste = 1.0
    for knob, extent in (("columns", operator.out_width), ("rows", operator.out_height)):
        waste *= math.ceil(extent / config[knob]) * config[knob] / extent
    return model.analytic.estimate([operator])[0].seconds * waste / rate


def measured(model, operators, count, seed=0):
    rng = random.Random(seed)
    return [
        Measurement(operator, config, true_seconds(model, operator, config) * math.exp(rng.gauss(0, 0.03)))
        for operator in operators
        for config in rng.sample(SPACE, count)
    ]


def regret(model, operator, tries=5):
    """Best of the first ``tries`` candidates over the best of all."""
    times = [true_seconds(model, operator, config) for config in SPACE]
    return min(times[index] for index in model.rank(operator, SPACE)[:tries]) / min(times)


@pytest.fixture
def model(toy):
    return ResidualModel(RooflineModel(toy, 1))


@pytest.fixture
def trained(model):
    model.update(measured(model, LAYERS, 40))
    return model


def test_untrained_it_is_the_analytic_model_and_keeps_the_order(model):
    assert model.rank(UNSEEN, SPACE) == list(range(len(SPACE)))
    assert model.predict(UNSEEN, SPACE[:2]) == model.analytic.estimate([UNSEEN]) * 2
    assert model.estimate([UNSEEN])[0].source == "analytic"


def test_measurements_improve_the_ranking_of_layers_never_measured(model):
    before = regret(model, UNSEEN)
    model.update(measured(model, LAYERS, 40))
    assert before > 5
    assert regret(model, UNSEEN) < 1.1
    assert max(regret(model, layer) for layer in LAYERS) < 1.1


def test_it_learns_online(model):
    truth = np.array([true_seconds(model, UNSEEN, config) for config in SPACE])

    def error():
        predicted = np.array([each.seconds for each in model.predict(UNSEEN, SPACE)])
        return np.median(np.abs(np.log(predicted / truth)))

    errors = []
    for round_, layers in enumerate((LAYERS[:1], LAYERS[:3], LAYERS)):
        model.update(measured(model, layers, 12 * 3**round_, seed=round_))
        errors.append(error())
    assert errors[0] > errors[1] > errors[2]


def test_predictions_are_accurate_and_their_interval_mostly_holds(trained):
    truth = [true_seconds(trained, LAYERS[2], config) for config in SPACE]
    estimates = trained.predict(LAYERS[2], SPACE)
    assert {each.source for each in estimates} == {"fitted"}
    errors = [abs(each.seconds / time_ - 1) for each, time_ in zip(estimates, truth, strict=True)]
    assert np.median(errors) < 0.15
    inside = np.mean([each.lower <= time_ <= each.upper for each, time_ in zip(estimates, truth, strict=True)])
    assert inside > 0.65
    assert all(each.lower < each.upper for each in estimates)


def test_other_families_stay_analytic(trained):
    dense = Dense(1, 64, 64)
    assert trained.predict(dense, [{"blocks": 1}])[0].source == "analytic"
    assert trained.estimate([dense])[0].source == "analytic"


def test_too_few_measurements_are_not_trusted(model):
    few = measured(model, LAYERS[:1], MIN_MEASUREMENTS)
    model.update(few[:-1])
    assert model.predict(UNSEEN, SPACE[:1])[0].source == "analytic"
    model.update(few[-1:])
    assert model.predict(UNSEEN, SPACE[:1])[0].source == "fitted"


def test_an_operator_costs_its_best_measured_time_or_what_its_family_reaches(trained):
    best = min(each.seconds for each in trained.measurements if each.operator == LAYERS[0])
    known, unknown = trained.estimate([LAYERS[0], UNSEEN])
    assert (known.seconds, known.source) == (best, "measured")
    assert unknown.source == "fitted"
    assert unknown.lower <= unknown.seconds <= unknown.upper
    ideal = min(true_seconds(trained, UNSEEN, config) for config in SPACE)
    assert unknown.seconds == pytest.approx(ideal, rel=0.3)


def test_of_repeated_measurements_the_fastest_counts(model):
    model.update([Measurement(UNSEEN, {"rows": 1}, seconds) for seconds in (3.0, 2.0, 4.0)])
    assert [each.seconds for each in model.measurements] == [2.0]


def test_knobs_may_be_missing_or_new(trained):
    order = trained.rank(UNSEEN, [{"blocks": 2, "columns": 14}, {"blocks": 1, "columns": 1, "prefetch": 3}])
    assert sorted(order) == [0, 1]
    assert trained.rank(UNSEEN, []) == [] and trained.predict(UNSEEN, []) == []


def test_without_xgboost_the_analytic_model_answers(toy, monkeypatch):
    monkeypatch.setattr(costmodel.cpu.learned_residual, "xgboost_available", lambda: False)
    with pytest.warns(UserWarning, match="xgboost is not installed"):
        model = ResidualModel(RooflineModel(toy, 1))
    model.update(measured(model, LAYERS, 20))
    assert model.predict(UNSEEN, SPACE[:1])[0].source == "analytic"
    assert model.estimate([LAYERS[0]])[0].source == "measured"


def test_thousands_of_configurations_are_ranked_in_well_under_a_second(trained):
    trained.rank(UNSEEN, SPACE)
    configs = SPACE * 20
    start = time.process_time()
    trained.rank(UNSEEN, configs)
    assert len(configs) > 4000 and time.process_time() - start < 0.5


def test_families_share_kernel_templates():
    depthwise = Conv2d(1, 8, 4, 4, 8, (3, 3), groups=8)
    pair = FusedConvs((depthwise, Conv2d(1, 8, 2, 2, 4, (1, 1))))
    assert [operator_family(each) for each in (UNSEEN, depthwise, pair, Dense(1, 2, 3, dtype="bfloat16"))] == [
        "pointwise",
        "depthwise",
        "depthwise-pointwise",
        "dense",
    ]
    assert operator_family(Pool2d("max", 1, 4, 6, 6, (2, 2))) == "pool"
    assert operator_family(Pool2d("max", 1, 4, 6, 6, (6, 6))) == "global-pool"


def test_a_family_of_several_dtypes_has_columns_that_tell_them_apart(model):
    narrow = replace(UNSEEN, dtype="bfloat16")
    knobs = knob_names(SPACE)
    assert column_names([UNSEEN], SPACE) == knobs
    assert column_names([UNSEEN, narrow], SPACE) == (*knobs, *DTYPE_COLUMNS)
    rows = []
    for operator in (UNSEEN, narrow):
        base = model.analytic.estimate([UNSEEN])[0]
        plain = feature_matrix(operator, SPACE[:2], base, knobs)
        rows.append(feature_matrix(operator, SPACE[:2], base, (*knobs, *DTYPE_COLUMNS)))
        assert rows[-1].shape[1] == plain.shape[1] + len(DTYPE_COLUMNS)
    assert (rows[0] == 4).any(axis=1).all() and not np.array_equal(rows[0], rows[1])


def test_the_time_of_an_operator_is_told_by_those_of_its_dtype(toy):
    """Three of float32 take twice their roofline, three of bfloat16 five times theirs."""
    machine = replace(toy, compute={**toy.compute, "bfloat16": toy.compute["float32"]})
    model = ResidualModel(RooflineModel(machine, 1))
    for factor, dtype in ((2.0, "float32"), (5.0, "bfloat16")):
        layers = [Conv2d(1, channels, 14, 14, 128, (1, 1), dtype=dtype) for channels in (64, 128, 256)]
        bases = [each.seconds for each in model.analytic.estimate(layers)]
        model.update([Measurement(layer, SPACE[0], factor * base) for layer, base in zip(layers, bases, strict=True)])
    for factor, dtype in ((2.0, "float32"), (5.0, "bfloat16")):
        unseen = Conv2d(1, 192, 14, 14, 128, (1, 1), dtype=dtype)
        (base,), (found,) = model.analytic.estimate([unseen]), model.estimate([unseen])
        assert found.seconds == pytest.approx(factor * base.seconds) and found.source == "fitted"


@pytest.mark.parametrize(
    "operator",
    [
        UNSEEN,
        Dense(1, 2, 3),
        Pool2d("max", 1, 4, 6, 6, (2, 2)),
        FusedConvs((LAYERS[0], Conv2d(1, 16, 28, 28, 4, (1, 1)))),
    ],
)
def test_features_are_one_row_per_configuration_and_tell_them_apart(model, operator):
    base = model.analytic.estimate([operator])[0]
    knobs = knob_names(SPACE)
    matrix = feature_matrix(operator, SPACE, base, knobs)
    assert matrix.shape[0] == len(SPACE) and matrix.dtype == np.float32
    assert len(np.unique(matrix, axis=0)) == len(SPACE)
    assert feature_matrix(operator, SPACE[3:4], base, knobs).tolist() == matrix[3:4].tolist()
    assert feature_matrix(operator, [{}], base, ()).shape[0] == 1


def test_waste_of_a_tile_that_does_not_divide_is_a_feature(model):
    base = model.analytic.estimate([UNSEEN])[0]
    matrix = feature_matrix(UNSEEN, [{"rows": 7}, {"rows": 4}], base, ("rows",))
    assert np.isclose(matrix[1], 16 / 14).any() and not np.isclose(matrix[0], 16 / 14).any()


def test_the_product_of_two_knobs_is_a_feature(model):
    base = model.analytic.estimate([UNSEEN])[0]
    # Both tiles have 2^9 accumulators; no knob alone says so.
    matrix = feature_matrix(UNSEEN, [{"a": 8, "b": 64}, {"a": 64, "b": 8}], base, ("a", "b"))
    assert (matrix == 9).any(axis=1).all()


def test_the_order_is_learned_from_pairs_whatever_tells_operators_apart():
    """Operators differ by a factor that nothing predicts, their three configurations by 3 % for each step of a knob."""
    pytest.importorskip("xgboost")
    generator = np.random.default_rng(0)
    knobs = np.concatenate([generator.permutation(6)[:3] for _ in range(60)]).astype(np.float32)
    levels = np.repeat(generator.normal(0, 2, 60), 3)
    features = np.stack([knobs, np.repeat(generator.random(60), 3)], axis=1).astype(np.float32)
    guesses = np.repeat(generator.normal(0, 1, 60), 3)
    targets = levels + 0.03 * knobs
    weights = np.ones(len(knobs))
    trees = BoostedResidual(features, targets, weights, 1, FOR_UNSEEN, [3] * 60, guesses)
    unseen = np.stack([np.arange(6), np.full(6, 0.5)], axis=1).astype(np.float32)
    scores = trees.scores(unseen, np.zeros(6))
    assert list(np.argsort(scores)) == [0, 1, 2, 3, 4, 5]
    assert np.argmax(trees.scores(unseen, np.array([9.0, 0, 0, 0, 0, 0]))) == 0  # an analytic guess still counts
    read = BoostedResidual.from_record(json.loads(json.dumps(trees.to_record())))
    np.testing.assert_allclose(read.scores(unseen, np.zeros(6)), scores, rtol=1e-3)
    np.testing.assert_allclose(read.predict(unseen), trees.predict(unseen), rtol=1e-3)
    alone = BoostedResidual(features, targets, weights)
    np.testing.assert_array_equal(alone.scores(unseen, np.zeros(6)), alone.predict(unseen))
