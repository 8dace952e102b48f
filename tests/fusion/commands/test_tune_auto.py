"""The end of ``tune --precision auto``: networks that err too much, and how much time there is for others."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest

pytest.importorskip("tvm")

from fusion.acceptance import time_limit
from fusion.acceptance.error_budget import BudgetExceeded, FrontierPoint, PrecisionChoice
from fusion.acceptance.network_check import CheckCost
from fusion.acceptance.precision_choice import (
    LEAST_ERROR_SECONDS,
    MOST_ERROR_SECONDS,
    MOST_REBUILDS,
    error_seconds,
)
from fusion.acceptance.time_limit import RACE_SECONDS, StageClock
from fusion.commands import tune_auto
from fusion.commands.tune_precision import Tuned

CHOICE = PrecisionChoice(
    frozenset("ab"), (), 0.004, {"a": 0.001, "b": 0.003},
    (FrontierPoint(0, 2.0, 0.0), FrontierPoint(2, 1.0, 0.004, True, frozenset("ab"))),
)  # fmt: skip
# A network takes 4 s to build and check, a run of the model with rounded layers 0.5 s twice.
CHECK = SimpleNamespace(
    cost=CheckCost(2.0, 4.0, 0.01), exposes=(), careful=False, outputs=SimpleNamespace(expected=(1, 2, 3))
)
PLAN = SimpleNamespace(limit=SimpleNamespace(runs=SimpleNamespace(draw_seconds=1.0)))


@pytest.fixture
def job(monkeypatch):
    """A job of which every mixed network errs too much; what is done with it is noted in ``job.done``."""
    done: list[str] = []
    mixing = SimpleNamespace(choice=CHOICE, job=None, tuned=None)

    def raced(*_):
        done.append("raced")
        job.now += job.race_takes
        raise BudgetExceeded("too much", 0.05)

    def tightened(*_):
        done.append("tightened")
        return mixing

    def finals(job_, networks, *_):
        done.append(f"{len(networks)} in float32")
        return SimpleNamespace(rounded_errors=None)

    job = SimpleNamespace(done=done, now=0.0, race_takes=0.0, graph=None, sites=None,
                          request=SimpleNamespace(minutes=1.0))  # fmt: skip
    monkeypatch.setattr(time_limit.time, "monotonic", lambda: job.now)
    monkeypatch.setattr(tune_auto, "tune_mixed", lambda *_: Tuned(mixing, None, CHOICE))
    monkeypatch.setattr(tune_auto, "finalists", lambda *_, **__: ("unfused", "fused"))
    monkeypatch.setattr(tune_auto, "_raced", raced)
    monkeypatch.setattr(tune_auto, "tightened", tightened)
    monkeypatch.setattr(tune_auto, "run_finals", finals)
    return job


def run(job, end: float):
    display = SimpleNamespace(say=lambda _: None)
    return tune_auto.tune_auto(job, CHECK, PLAN, end, False, display, StageClock(0.0))


def test_with_time_fewer_layers_are_tried_and_float32_is_left(job):
    *_, report = run(job, math.inf)
    assert job.done == ["raced", "tightened"] * MOST_REBUILDS + ["raced", "2 in float32"]
    assert report.choice.rounded == frozenset() and report.choice.kept == ("a", "b")
    assert [point.chosen for point in report.choice.frontier] == [True, False]


def test_without_time_for_another_network_float32_is_left_at_once(job):
    job.race_takes = 70.0
    run(job, 100.0)  # a rebuild takes three networks of 4 s, draws of 3 s, a race of 8 s: 30 s do
    assert job.done == ["raced", "tightened", "raced", "1 in float32"]
    job.done.clear()
    job.now, job.race_takes = 0.0, 85.0
    run(job, 100.0)
    assert job.done == ["raced", "2 in float32"]


def test_without_time_for_two_networks_no_layer_is_rounded(job, monkeypatch):
    """Two networks of 4 s, kernels of one compiled in 2 s, a race of 8 s; a little late is allowed."""
    monkeypatch.setattr(tune_auto, "tune_profile", lambda *_: job.done.append("float32 alone") or (None, None))
    *_, report = run(job, 12.0)
    assert job.done == ["float32 alone"] and report.choice is None

    def slow(*arguments):
        job.now = 30.0
        return mixed(*arguments)

    mixed = tune_auto.tune_mixed
    monkeypatch.setattr(tune_auto, "tune_mixed", slow)
    job.done.clear()
    *_, report = run(job, 40.0)  # as much time as it took has gone into kernels and errors
    assert job.done == ["1 in float32"] and report.choice.kept == ("a", "b")


def test_the_finals_of_three_networks_and_float32_once_more_are_set_aside(job):
    limit = tune_auto.auto_limit(CHECK, PLAN, 100.0)
    # Four networks of 4 s, three draws of 1 s, kernels compiled twice at 1.5 of 2 s.
    assert limit.tuning_seconds == pytest.approx(100.0 - 4 * 4.0 - 3 * 1.0 - 6.0 - RACE_SECONDS)


def test_errors_get_a_share_of_the_job():
    assert error_seconds(None) == MOST_ERROR_SECONDS == error_seconds(1000.0)
    assert error_seconds(0.0) == LEAST_ERROR_SECONDS and error_seconds(2.0) == 6.0
    assert error_seconds(2.0, left=45.0) == 4.5 and error_seconds(2.0, left=0.0) == LEAST_ERROR_SECONDS
