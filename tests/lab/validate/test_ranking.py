"""How the ranking of kernels is judged: networks left out."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from lab.validate.ranking import METHODS, evaluate_ranking, report, spearman
from schedules.tuning.kernel_ranking import train_ranking
from schedules.tuning.shipped_records import CpuRecords, identity_of
from tests.schedules.tuning.test_kernel_ranking import LAYERS, NARROW_CPU, TOY, content, kernel


def test_a_network_left_out_is_ranked_better_than_by_cost_alone():
    rows = {(row.group, row.method): row for row in report(evaluate_ranking(content(), TOY))}
    assert {method for _, method in rows} == set(METHODS)
    learned, cost, drawn = (rows["all", method] for method in ("both", "analytic", "random"))
    assert learned.kernels == 12 and learned.correlation > 0.95 > cost.correlation > drawn.correlation
    assert learned.latency_loss < 0.02 < cost.latency_loss
    assert learned.top5 > cost.top5


def test_kernels_of_all_dtypes_are_one_family_and_are_reported_apart():
    """Of bfloat16 there are few records, whose order is that of float32: one model ranks both."""
    pytest.importorskip("xgboost")
    machine = replace(TOY, compute={**TOY.compute, "bfloat16": TOY.compute["float32"]})
    layers = [(each, name) for name in "abc" for each in LAYERS[name]]
    wide = [kernel(each, name, base=NARROW_CPU) for each, name in layers]
    narrow = [kernel(replace(each, dtype="bfloat16"), name, count=8, base=NARROW_CPU) for each, name in layers]
    both = CpuRecords(identity_of(NARROW_CPU), "0.27", "5", "toy", (*wide, *narrow))
    assert set(train_ranking(both, machine)) == {"pointwise"}
    rows = {(row.group, row.method): row for row in report(evaluate_ranking(both, machine))}
    assert rows["float32", "both"].kernels == rows["bfloat16", "both"].kernels == 6
    assert rows["bfloat16", "both"].correlation > rows["bfloat16", "analytic"].correlation
    few = report(evaluate_ranking(replace(both, kernels=tuple(narrow)), machine))
    alone = next(row for row in few if (row.group, row.method) == ("bfloat16", "both"))
    assert rows["bfloat16", "both"].correlation > alone.correlation


def test_a_network_is_judged_without_its_operators(monkeypatch):
    """An operator of the network left out may occur in others too: it is not trained on."""
    shared = LAYERS["a"][0]
    whole = content("ab", (2,))
    whole = replace(whole, kernels=(*whole.kernels, replace(kernel(shared, "c"), networks=("a", "c"))))
    assert shared in {each.operator for each in whole.kernels}
    seen = []
    import lab.validate.ranking as evaluation

    trained = evaluation._trained
    monkeypatch.setattr(evaluation, "_trained", lambda rest, *more: (seen.append(rest), trained(rest, *more))[1])
    evaluate_ranking(whole, TOY)
    without_a = seen[0]
    assert "a" not in without_a.networks and shared not in {each.operator for each in without_a.kernels}


def test_rank_correlation_shares_ties():
    assert spearman(np.array([1.0, 2, 3]), np.array([10.0, 20, 30])) == pytest.approx(1)
    assert spearman(np.array([3.0, 2, 1]), np.array([10.0, 20, 30])) == pytest.approx(-1)
    assert spearman(np.ones(3), np.array([10.0, 20, 30])) == 0
