"""What one sees while a network is tuned."""

from __future__ import annotations

import pytest

from costmodel.operators.layers import Dense
from fusion.tuning import clock as progress
from fusion.tuning.clock import PLAIN_INTERVAL_SECONDS, TuningDisplay, progress_line
from schedules.measuring.timing_protocol import MeasureOutcome
from schedules.tuning.kernel_tuner import TuningProgress

STATE = TuningProgress(
    stage="search",
    operator=Dense(1, 4, 4),
    config={},
    outcome=MeasureOutcome(1e-6),
    best_seconds=1e-6,
    trial=12,
    trials=300,
    tasks=47,
    network_seconds=None,
    elapsed_seconds=3.0,
    eta_seconds=27.0,
)


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_a_line_says_what_is_done_how_fast_it_is_and_what_is_left():
    assert progress_line(STATE, None) == "tuning 47 kernels, trial 12/300, 0:27 left"
    assert progress_line(STATE, 2.31e-3) == "tuning 47 kernels, trial 12/300, best kernels so far 2.310 ms, 0:27 left"


def test_the_time_left_is_that_of_the_job_and_holds_from_one_search_to_the_next(clock):
    """A search ends, others follow, and networks are built and compared: its own end is not the job's."""
    told: list[str] = []
    display = TuningDisplay(told=told.append)
    display.ends_at(220.0)
    display.stage("importing net.onnx")
    for seconds, eta in ((10.0, 20.0), (40.0, 3.0), (50.0, 25.0)):
        clock[0] = 100.0 + seconds
        display.trial(STATE.__class__(**{**vars(STATE), "eta_seconds": eta}), None)
    clock[0] = 195.0
    display.stage("building")
    clock[0] = 221.0
    display.stage("late")
    left = [line.rpartition(" left")[0].rpartition(" ")[2].strip("(") for line in told]
    assert left == ["2:00", "1:50", "1:20", "1:10", "0:25", ""]


def test_without_an_end_stages_are_named_alone(clock):
    told: list[str] = []
    display = TuningDisplay(told=told.append)
    display.stage("building")
    clock[0] += PLAIN_INTERVAL_SECONDS
    display.trial(STATE, None)
    assert told == ["building", "tuning 47 kernels, trial 12/300, 0:27 left"]
