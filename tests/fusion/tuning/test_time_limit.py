"""A limit on the whole job: what its end needs is set aside first."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from fusion.comparing.timing import LEAST_ROUNDS, Sampling
from fusion.tuning import clock as time_limit
from fusion.tuning.clock import (
    LATE_SECONDS,
    LEAST_CALLS,
    LEAST_REFERENCE_SECONDS,
    LEAST_WARMUP,
    MOST_REFERENCE_SECONDS,
    RACE_SECONDS,
    TRIALS_SHARE,
    StageClock,
    TimeLimit,
    end_of,
    race_sampling,
    reference_seconds,
)


@pytest.fixture
def at(monkeypatch):
    """Sets the clock."""

    def set_clock(seconds: float) -> None:
        monkeypatch.setattr(time_limit.time, "monotonic", lambda: seconds)

    return set_clock


def test_the_minutes_count_from_the_start_of_the_job():
    assert end_of(2.0, started=100.0) == 220.0
    assert end_of(None, started=100.0) == math.inf


def test_two_networks_and_their_race_are_set_aside(at):
    at(130.0)  # reading and the first check took 30 of 120 seconds
    limit = TimeLimit(end=220.0, check_seconds=10.0)
    assert limit.tuning_seconds == 220.0 - 130.0 - 2 * 10.0 - RACE_SECONDS


def test_the_check_of_what_the_winner_hides_is_one_more(at):
    at(130.0)
    limit = TimeLimit(end=220.0, check_seconds=10.0, extra_checks=1)
    assert limit.tuning_seconds == 220.0 - 130.0 - 3 * 10.0 - RACE_SECONDS


def test_kernels_are_compiled_once_for_all_networks(at):
    at(100.0)
    limit = TimeLimit(end=220.0, check_seconds=2.0, compile_seconds=8.0)
    assert limit.tuning_seconds == 120.0 - 2 * 2.0 - 8.0 - RACE_SECONDS
    assert limit.allows(2) and not limit.allows(55)


def test_kernels_that_take_long_to_compile_leave_time_for_some_trials(at):
    """They change no more kernels than they have compiled themselves."""
    at(100.0)
    limit = TimeLimit(end=220.0, check_seconds=2.0, most_compile_seconds=200.0)
    assert limit.tuning_seconds == TRIALS_SHARE * (120.0 - 2 * 2.0 - RACE_SECONDS)
    assert limit.allows(2) and not replace(limit, compile_seconds=200.0).allows(2)


def test_time_that_the_finals_turn_out_not_to_need_goes_back_to_trials(at):
    """40 s were kept to compile every kernel anew; trials have changed a quarter of them, and nothing is fused."""
    at(100.0)
    limit = TimeLimit(end=220.0, check_seconds=5.0, most_compile_seconds=40.0)
    assert limit.tuning_seconds == 120.0 - 2 * 5.0 - RACE_SECONDS - 40.0
    at(100.0 + limit.tuning_seconds)
    known = replace(limit, compile_seconds=10.0, finalists=1)
    assert limit.tuning_seconds == TRIALS_SHARE * 40.0  # all the same: what trials change they have compiled
    assert known.tuning_seconds == TRIALS_SHARE * (40.0 - 10.0 + 5.0)
    at(220.0 - 5.0 - RACE_SECONDS - 10.0)
    assert known.tuning_seconds == 0.0


def test_without_sites_one_network_and_its_race_are_set_aside(at):
    at(130.0)
    limit = TimeLimit(end=220.0, check_seconds=10.0, finalists=1)
    assert limit.tuning_seconds == 220.0 - 130.0 - 10.0 - RACE_SECONDS


def test_the_race_ends_before_the_check_behind_it(at):
    """Else a model with a sigmoid at its end took as much longer as its last check."""
    assert TimeLimit(end=220.0, check_seconds=10.0, extra_checks=1).race_end == 210.0
    assert TimeLimit(end=220.0, check_seconds=10.0).race_end == 220.0
    assert TimeLimit(end=math.inf, check_seconds=10.0, extra_checks=1).race_end == math.inf


def test_a_slow_network_takes_turns_in_shorter_blocks_and_its_race_longer(at):
    usual = race_sampling(0.005)
    assert usual == race_sampling(0.0) == Sampling()
    slow = race_sampling(0.5)
    assert (slow.calls, slow.warmup, slow.rounds) == (LEAST_CALLS, LEAST_WARMUP, usual.rounds)
    at(100.0)
    limit = TimeLimit(end=220.0, check_seconds=0.0, run_seconds=0.5)
    race = LEAST_ROUNDS * 3 * (LEAST_CALLS + LEAST_WARMUP) * 0.5  # two networks and ONNX Runtime
    assert race > RACE_SECONDS and limit.tuning_seconds == 120.0 - race


def test_the_reference_takes_a_share_of_a_short_job():
    assert reference_seconds(None) == reference_seconds(60.0) == MOST_REFERENCE_SECONDS
    assert reference_seconds(0.0) == LEAST_REFERENCE_SECONDS
    assert LEAST_REFERENCE_SECONDS < reference_seconds(1.0) < reference_seconds(2.0) < MOST_REFERENCE_SECONDS


def test_stages_share_the_time_of_the_job(at):
    clock = StageClock(started=100.0)
    for now, stage in ((103.0, "read"), (110.0, "tuning"), (111.0, "read")):
        at(now)
        clock.ended(stage)
    assert clock.seconds == {"read": 4.0, "tuning": 7.0}


def test_no_time_is_none_and_never_less(at):
    at(300.0)
    assert TimeLimit(end=220.0, check_seconds=10.0).tuning_seconds == 0.0
    assert TimeLimit(end=math.inf, check_seconds=10.0).tuning_seconds is None


def test_a_third_network_is_built_only_in_time(at):
    at(180.0)
    assert TimeLimit(end=180.0 + 30.0 + RACE_SECONDS + 1.0, check_seconds=10.0).allows(3)
    assert not TimeLimit(end=180.0 + 30.0 + RACE_SECONDS - 1.0, check_seconds=10.0).allows(3)
    assert TimeLimit(end=math.inf, check_seconds=10.0).allows(3)


def test_the_network_without_fusion_may_be_a_little_late(at):
    at(180.0)
    needed = 180.0 + 20.0 + RACE_SECONDS
    assert TimeLimit(end=needed - LATE_SECONDS + 1.0, check_seconds=10.0).allows(2)
    assert not TimeLimit(end=needed - LATE_SECONDS - 1.0, check_seconds=10.0).allows(2)
