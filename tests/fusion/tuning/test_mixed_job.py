"""The end of ``tune --precision auto``: networks that err too much, and how much time there is for others."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("tvm")

from fusion.acceptance.error_budget import BudgetExceeded, FrontierPoint, PrecisionChoice
from fusion.tuning import clock, mixed_job
from fusion.tuning.clock import RACE_SECONDS, StageClock
from fusion.tuning.job import TuningJob
from fusion.tuning.mixed_job import MixedJob, MixedSearch
from fusion.tuning.network_check import CheckCost
from fusion.tuning.precision import (
    LEAST_ERROR_SECONDS,
    MOST_ERROR_SECONDS,
    MOST_REBUILDS,
    PrecisionReport,
    error_seconds,
)

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
def job(monkeypatch) -> MixedJob:
    """A job of which every mixed network errs too much; what is done with it is noted in ``job.done``, its time is
    ``job.now``.
    """
    mixed = SimpleNamespace(choice=CHOICE, network=None, tuned=None)

    def race_mixed(job, *_):
        job.done.append("raced")
        job.now += job.race_takes
        raise BudgetExceeded("too much", 0.05)

    def tighten(job, *_):
        job.done.append("tighten")
        return mixed

    network = SimpleNamespace(graph=None, sites=None, folder=None, request=SimpleNamespace(minutes=1.0, output=None))
    job = MixedJob(network, Path(), StageClock(0.0), SimpleNamespace(say=lambda _: None))
    job.check, job.plan, job.done, job.now, job.race_takes = CHECK, PLAN, [], 0.0, 0.0
    monkeypatch.setattr(clock.time, "monotonic", lambda: job.now)
    monkeypatch.setattr(mixed_job, "search_mixed", lambda *_: MixedSearch(mixed, None, CHOICE))
    monkeypatch.setattr(mixed_job, "finalists", lambda *_, **__: ("unfused", "fused"))
    monkeypatch.setattr(mixed_job, "tighten", tighten)
    monkeypatch.setattr(MixedJob, "_race_mixed", race_mixed)
    monkeypatch.setattr(MixedJob, "race", lambda job, found, end: job.done.append(f"{len(found)} in float32"))
    return job


def run(job: MixedJob, end: float) -> PrecisionReport | None:
    job.search(end)
    job.finals()
    return job.report


def test_with_time_fewer_layers_are_tried_and_float32_is_left(job):
    report = run(job, math.inf)
    assert job.done == ["raced", "tighten"] * MOST_REBUILDS + ["raced", "2 in float32"]
    assert report.choice.rounded == frozenset() and report.choice.kept == ("a", "b")
    assert [point.chosen for point in report.choice.frontier] == [True, False]


def test_without_time_for_another_network_float32_is_left_at_once(job):
    job.race_takes = 70.0
    run(job, 100.0)  # a rebuild takes three networks of 4 s, draws of 3 s, a race of 8 s: 30 s do
    assert job.done == ["raced", "tighten", "raced", "1 in float32"]
    job.done.clear()
    job.now, job.race_takes = 0.0, 85.0
    run(job, 100.0)
    assert job.done == ["raced", "2 in float32"]


def test_without_time_for_two_networks_no_layer_is_rounded(job, monkeypatch):
    """Two networks of 4 s, kernels of one compiled in 2 s, a race of 8 s; a little late is allowed."""
    for stage in ("search", "finals"):
        monkeypatch.setattr(TuningJob, stage, lambda job, *_, stage=stage: job.done.append(f"{stage} in float32"))
    report = run(job, 12.0)
    assert job.done == ["search in float32", "finals in float32"] and report.choice is None

    def slow(*arguments):
        job.now = 30.0
        return found(*arguments)

    found = mixed_job.search_mixed
    monkeypatch.setattr(mixed_job, "search_mixed", slow)
    job.done.clear()
    report = run(job, 40.0)  # as much time as it took has gone into kernels and errors
    assert job.done == ["1 in float32"] and report.choice.kept == ("a", "b")


def test_the_finals_of_three_networks_and_float32_once_more_are_set_aside(job):
    job.end = 100.0
    limit = job.mixed_limit()
    # Four networks of 4 s, three draws of 1 s, kernels compiled twice at 1.5 of 2 s.
    assert limit.tuning_seconds == pytest.approx(100.0 - 4 * 4.0 - 3 * 1.0 - 6.0 - RACE_SECONDS)


def test_errors_get_a_share_of_the_job():
    assert error_seconds(None) == MOST_ERROR_SECONDS == error_seconds(1000.0)
    assert error_seconds(0.0) == LEAST_ERROR_SECONDS and error_seconds(2.0) == 6.0
    assert error_seconds(2.0, left=45.0) == 4.5 and error_seconds(2.0, left=0.0) == LEAST_ERROR_SECONDS
