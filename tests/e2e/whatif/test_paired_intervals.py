"""How sure gains are: what is wrong in both steps alike cancels, what changes the bottleneck does not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from e2e.explain.prediction import AS_IT_IS, what_if_row, with_gain_intervals
from e2e.explain.predictor import predict_graph
from e2e.price import speed_band
from e2e.price.speed_band import StepErrors
from e2e.step.execution_graph import Duration, Task
from e2e.whatif import paired_intervals
from e2e.whatif.paired_intervals import BATCH_RATIO_ERROR, ComparedStep, Comparison
from tests.e2e.drawn_graphs import Drawing, together
from tests.e2e.toy_predictions import SETTING, Table, ToyCluster, ToyCollectives, predict_ranks


def step(kernels: dict[str, float], host: float = 0.0, spread: float = 0.2):
    """Kernels after each other, each a family of its own by its kind, and beside them ``host`` seconds of the host."""
    d = Drawing()
    d.host(host)
    for kind, seconds in kernels.items():
        d.kernel(kind, seconds, launch=0, kind=kind)
        task: Task = d.tasks[-1]
        d.tasks[-1] = replace(task, duration=Duration(seconds, seconds * (1 - spread), seconds * (1 + spread)))
    return d


def result(drawing: Drawing):
    return predict_ranks(together(drawing))


def ratio(one: Drawing, other: Drawing, **options) -> tuple[float, float]:
    steps = [
        ComparedStep(result(each), "host", options.get("factor", 1.0), options.get("errors")) for each in (one, other)
    ]
    found = Comparison(steps).ratio(0, 1)
    assert found is not None
    return found


def test_what_both_steps_consist_of_alike_cancels():
    """Twice as many of the same kernels are twice as long, whatever one takes."""
    assert ratio(step({"kernel": 2.0}), step({"kernel": 1.0})) == pytest.approx((1.0, 1.0))


def test_what_one_has_and_the_other_not_stays():
    """3 s to 1 s; the 2 s that go may be 20 % off, and the last second too, both times alike: 2.6 / 1 to 3.4 / 1."""
    low, high = ratio(step({"kernel": 1.0, "copy": 2.0}), step({"kernel": 1.0}))
    copy = math.log(2.6 / 3), math.log(3.4 / 3)
    kernel = math.log((3.2 / 1.2) / 3), math.log((2.8 / 0.8) / 3)
    assert math.log(low) == pytest.approx(-math.hypot(copy[0], kernel[0]))
    assert math.log(high) == pytest.approx(math.hypot(copy[1], kernel[1]))


def test_a_host_that_may_be_faster_makes_the_gain_of_kernels_unsure():
    """The host takes 3 s, kernels 2 s or 1 s beside it: no gain, unless the host is half as slow; no sum over the path,
    on which is the host alone, would tell."""
    one, other = step({"kernel": 2.0}, host=3.0, spread=0.0), step({"kernel": 1.0}, host=3.0, spread=0.0)
    assert ratio(one, other) == pytest.approx((1.0, 1.0))
    low, high = ratio(one, other, factor=2.0)
    assert low == pytest.approx(1.0) and high == pytest.approx(2.0 / 1.5)


def test_errors_that_whole_steps_do_not_show_are_left_out(monkeypatch):
    one, other = step({"kernel": 1.0, "copy": 2.0}), step({"kernel": 1.0})
    wide = ratio(one, other)
    monkeypatch.setattr(speed_band, "_PRODUCTS", ("kernel", "copy"))  # what most of these steps are
    narrow = ratio(one, other, errors=StepErrors(0.05, 0.25, ("kernel", "copy")))
    assert wide[0] < narrow[0] < 1.0 < narrow[1] < wide[1]


def test_another_batch_has_other_errors():
    steps = [
        ComparedStep(result(step({"kernel": 2.0})), batch=None),
        ComparedStep(result(step({"kernel": 1.0})), batch=8),
    ]
    low, high = Comparison(steps).ratio(0, 1) or (0.0, 0.0)
    assert (math.log(low), math.log(high)) == pytest.approx((-BATCH_RATIO_ERROR, BATCH_RATIO_ERROR))


def test_hosts_of_two_tables_err_by_themselves():
    graph, setting = together(step({}, host=2.0)), replace(SETTING, overheads=Table(factor=1.5))
    one, other = (predict_graph(graph, setting, ToyCluster(), collectives=ToyCollectives()) for _ in range(2))
    alike = [ComparedStep(each, "a", 1.5) for each in (one, other)]
    apart = [ComparedStep(one, "a", 1.5), ComparedStep(other, "b", 1.5)]
    assert Comparison(alike).ratio(0, 1) == pytest.approx((1.0, 1.0))
    assert math.log((Comparison(apart).ratio(0, 1) or (0, 0))[1]) == pytest.approx(math.sqrt(2) * math.log(1.5))


def test_large_steps_are_not_compared(monkeypatch):
    monkeypatch.setattr(paired_intervals, "MOST_TASKS", 1)
    comparison = Comparison([ComparedStep(result(step({"kernel": 1.0, "copy": 1.0})))] * 2)
    assert comparison.ratio(0, 1) is None


def test_rows_say_what_they_cannot_be_told_apart_from():
    drawings = {
        AS_IT_IS: step({"kernel": 1.0, "copy": 2.0}),
        "half": step({"kernel": 1.0, "copy": 1.0}),
        "nearly": step({"kernel": 0.98, "copy": 2.0}),
        "other": step({"kernel": 0.5, "copy": 1.45}),
    }
    results = [result(each) for each in drawings.values()]
    rows = [
        what_if_row(name, each.prediction, results[0].prediction) for name, each in zip(drawings, results, strict=True)
    ]
    found = {
        row.question: row
        for row in with_gain_intervals(rows, Comparison([ComparedStep(each) for each in results]).ratio)
    }
    assert found["half"].gain == pytest.approx(1.5)
    low, high = found["half"].gain_interval
    assert 1.3 < low < 1.5 < high < 1.7
    # Two percent of the same kernel are two percent, however long it takes: told apart though the steps' own intervals
    # overlap nearly whole.
    assert (
        "nearly" not in found[AS_IT_IS].alike
        and found["nearly"].interval_seconds[1] > found[AS_IT_IS].interval_seconds[0]
    )
    # 2 s and 1.95 s, of which one has more of a kernel that may be 20 % faster or slower.
    assert found["half"].alike == ("other",) and found["other"].alike == ("half",)
    assert found[AS_IT_IS].alike == ()


def test_what_is_only_made_faster_takes_no_longer():
    """The host's end at half its time leaves the kernels as the bottleneck; a faster host is no slower all the same."""
    slow, fast = step({"kernel": 2.4}, host=3.0), step({"kernel": 2.4}, host=2.0)

    def found(*faster: frozenset[str]) -> tuple[float, float]:
        steps = [
            ComparedStep(result(each), "host", 2.0, None, None, names)
            for each, names in zip((slow, fast), faster, strict=True)
        ]
        return Comparison(steps).ratio(0, 1) or (0.0, 0.0)

    low, high = found(frozenset(), frozenset())
    assert 1.25 * low < 0.95
    bounded = found(frozenset(), frozenset({"host"}))
    assert 1.25 * bounded[0] == pytest.approx(1.0) and bounded[1] == high
    assert found(frozenset({"a"}), frozenset({"b"})) == (low, high)
