"""Workers side by side: every candidate gets its own outcome, and timing is done alone."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from costmodel.errors import TuningError
from costmodel.operators import Dense, Epilogue
from schedules.parallel_runner import ParallelRunner
from schedules.target import CpuTarget
from schedules.turns import Turns

FAULTS = ("none", "crash", "abort", "hang", "raise", "wrong", "unwritten", "overrun", "clobber", "slow")
CPU = CpuTarget(16, 32, "x86-64", (), 2, 32 * 1024, 1024 * 1024)
OPERATOR = Dense(3, 64, 48, Epilogue(bias=True))


def fault(name: str, split: int = 1) -> dict[str, int]:
    return {"fault": FAULTS.index(name), "split": split}


@pytest.fixture(scope="module")
def runner() -> Iterator[ParallelRunner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parent))
        options = {"timeout_seconds": 1.5, "templates": "fake_templates:template_for"}
        with ParallelRunner(CPU, workers=2, **options) as runner:
            yield runner


def test_a_crash_and_a_hang_cost_no_other_candidate(runner: ParallelRunner):
    configs = [fault("none"), fault("crash"), fault("none", 2), fault("hang"), fault("wrong"), fault("none", 4)]
    outcomes = {(c["fault"], c["split"]): o for c, o in runner.measure_batch(OPERATOR, configs)}
    errors = {FAULTS[kind]: outcome.error for (kind, _), outcome in outcomes.items()}
    assert len(outcomes) == 6
    assert errors == {"none": None, "crash": "crash", "hang": "hang", "wrong": "wrong"}
    assert all(outcome.seconds > 0 for outcome in outcomes.values() if outcome.ok)


def test_leaving_early_leaves_the_workers_usable(runner: ParallelRunner):
    batch = runner.measure_batch(OPERATOR, [fault("none", split) for split in (1, 2, 3, 4, 6, 8)])
    assert next(batch)[1].ok
    batch.close()
    assert len(list(runner.measure_batch(OPERATOR, [fault("none"), fault("none", 2)]))) == 2
    assert runner.measure(OPERATOR, fault("none")).ok


def test_ctrl_c_does_not_wait_for_a_hanging_candidate(runner: ParallelRunner):
    list(runner.measure_batch(OPERATOR, [fault("none"), fault("none", 2)]))
    timer = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        list(runner.measure_batch(OPERATOR, [fault("hang"), fault("hang", 2)]))
    assert time.monotonic() - started < 1.4  # well before the limit of 1.5 s ends it
    assert runner.measure(OPERATOR, fault("none")).ok


def test_workers_that_cannot_start_are_an_error():
    broken = ParallelRunner(CPU, workers=2, templates="no_such_module:f")
    with broken, pytest.raises(TuningError, match="no_such_module"):
        list(broken.measure_batch(OPERATOR, [fault("none"), fault("none", 2)]))


def _be_busy(path: str, entered, leave) -> None:
    with Turns(path).busy():
        entered.set()
        leave.wait(10)


def test_busy_ones_share_and_the_one_alone_waits_for_all(tmp_path: Path):
    (tmp_path / "lock").touch()
    context = multiprocessing.get_context("spawn")
    entered, leave = context.Event(), context.Event()
    other = context.Process(target=_be_busy, args=(str(tmp_path / "lock"), entered, leave))
    other.start()
    try:
        assert entered.wait(30)
        turns = Turns(str(tmp_path / "lock"))
        with turns.busy():
            pass  # together with the other process
        threading.Timer(0.3, leave.set).start()
        started = time.monotonic()
        with turns.alone():
            assert time.monotonic() - started > 0.2
    finally:
        leave.set()
        other.join(10)


def test_a_worker_by_itself_needs_no_file():
    with Turns(None).alone(), Turns(None).busy():
        pass
