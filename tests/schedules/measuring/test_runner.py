"""The runner survives whatever a candidate does, and times fairly."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from costmodel.base.errors import TuningError
from costmodel.operators.layers import Conv2d, Dense, Epilogue, FusedConvs, Pool2d
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import TensorSpec
from schedules.measuring import kernel_verification as arguments
from schedules.measuring.measure_runner import Runner
from schedules.measuring.measure_worker import MeasureWorker
from schedules.measuring.timing_protocol import (
    Arm,
    CompileRequest,
    KernelStep,
    MeasureOutcome,
    MeasureRequest,
    ProgramRequest,
    Setup,
    TimingProtocol,
    rotation_copies,
    time_arms,
)

FAKES = "fake_templates:template_for"
FAULTS = ("none", "crash", "abort", "hang", "raise", "wrong", "unwritten", "overrun", "clobber", "slow")
CPU = CpuTarget(16, 32, "x86-64", (), 2, 32 * 1024, 1024 * 1024)
OPERATOR = Dense(3, 64, 48, Epilogue(bias=True))


def fault(name: str, split: int = 1) -> dict[str, int]:
    return {"fault": FAULTS.index(name), "split": split}


@pytest.fixture(scope="module")
def runner() -> Iterator[Runner]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[1]))
        with Runner(CPU, timeout_seconds=1.5, templates=FAKES) as runner:
            yield runner


def worker_pid(runner: Runner) -> int:
    assert runner._worker is not None
    return runner._worker._process.pid


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_good_candidate_is_timed(runner: Runner):
    outcome = runner.measure(OPERATOR, fault("none", split=4))
    assert outcome.ok and outcome.error is None
    assert 1e-7 < outcome.seconds <= outcome.median_seconds < 1e-2
    assert outcome.samples >= 1  # about 20 bursts of a millisecond; few on a busy machine


@pytest.mark.skipif(not Path("/proc/self/task").is_dir() or (os.cpu_count() or 1) < 2, reason="needs /proc, two cores")
def test_no_library_has_threads_of_its_own_in_the_measuring_process(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")  # whatever the caller asks for
    with Runner(CPU, templates=FAKES) as alone:
        alone._started()
        assert len(os.listdir(f"/proc/{worker_pid(alone)}/task")) == 1


def test_a_clearly_slower_candidate_is_timed_briefly(runner: Runner):
    outcome = runner.measure(OPERATOR, fault("slow"), best_seconds=1e-6)
    assert outcome.ok and outcome.samples == 3 + TimingProtocol().patience  # it might have been disturbed


def test_candidates_are_compiled_together_and_timed_alone(runner: Runner):
    """One that raises, and one that takes the worker along, fail by themselves when they are measured."""
    configs = [fault("none", split=split) for split in (1, 2)]
    assert runner.compilation_seconds([(OPERATOR, fault("none", split=16))]) > 0
    runner.compile_together([(OPERATOR, config) for config in configs])
    assert runner.compilation_seconds([(OPERATOR, config) for config in configs]) == 0
    outcomes = runner.measure_batch(OPERATOR, [*configs, fault("raise"), fault("crash"), fault("none", split=8)])
    found = [(FAULTS[config["fault"]], outcome.error) for config, outcome in outcomes]
    assert found == [("none", None), ("none", None), ("raise", "build"), ("crash", "crash"), ("none", None)]
    runner.close()
    assert runner.compilation_seconds([(OPERATOR, configs[0])]) > 0


def test_networks_take_turns_and_one_that_fails_disturbs_no_other(runner: Runner):
    """Each reads its predecessor's output where it fits, and reports every kernel apart."""

    def program(*names: str) -> tuple[KernelStep, ...]:
        return tuple(
            KernelStep((OPERATOR, fault(name)), index - 1 if index else None) for index, name in enumerate(names)
        )

    outcomes = runner.rehearse(
        [program("none", "slow"), program("none", "crash"), program("raise"), program("none")], rounds=3, runs=3
    )
    assert [outcome.error for outcome in outcomes] == [None, "crash", "build", None]
    first, last = outcomes[0], outcomes[3]
    assert len(first.step_seconds) == 2 and first.step_seconds[1] > first.step_seconds[0]
    assert first.seconds >= sum(first.step_seconds) > last.seconds > 0
    assert first.samples == 3


@pytest.mark.parametrize(
    ("name", "kind", "text"),
    [
        ("crash", "crash", "SIGSEGV"),
        ("abort", "crash", "cannot select"),
        ("hang", "hang", "while building"),
        ("raise", "build", "no such tile"),
        ("wrong", "wrong", "instead of"),
        ("unwritten", "wrong", "unwritten"),
        ("overrun", "wrong", "outside its output"),
        ("clobber", "wrong", "after the timing runs"),
    ],
)
def test_a_bad_candidate_is_a_result_and_the_next_one_is_measured(runner: Runner, name: str, kind: str, text: str):
    outcome = runner.measure(OPERATOR, fault(name))
    assert (outcome.seconds, outcome.error) == (None, kind)
    assert text in outcome.message and "\n" not in outcome.message
    if kind in ("crash", "hang"):
        assert runner.measure(OPERATOR, fault("none")).ok


def test_a_hanging_worker_is_killed_and_reaped(runner: Runner):
    runner.measure(OPERATOR, fault("none"))
    pid = worker_pid(runner)
    started = time.monotonic()
    assert runner.measure(OPERATOR, fault("hang")).error == "hang"
    assert time.monotonic() - started < 60
    assert not is_running(pid)  # a zombie would still answer signal 0


def test_a_worker_killed_between_two_candidates_costs_neither(runner: Runner):
    runner.measure(OPERATOR, fault("none"))
    pid = worker_pid(runner)
    os.kill(pid, signal.SIGKILL)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # it has ended, and nobody has asked how
    assert runner.measure(OPERATOR, fault("none")).ok


def test_ctrl_c_ends_the_worker(runner: Runner):
    runner.measure(OPERATOR, fault("none"))
    pid = worker_pid(runner)
    timer = threading.Timer(0.4, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        runner.measure(OPERATOR, fault("hang"))
    assert not is_running(pid)


def test_compare_gives_every_arm_its_outcome(runner: Runner):
    """The same work, half of it, and an arm that takes the worker with it."""
    half = Dense(3, 64, 24, Epilogue(bias=True))
    chain = [(OPERATOR, fault("none")), (Dense(3, 48, 64), fault("none"))]
    outcomes = runner.compare(
        [[(OPERATOR, fault("none"))], [(OPERATOR, fault("crash"))], [(half, fault("none"))], chain]
    )
    assert [outcome.error for outcome in outcomes] == [None, "crash", None, None]
    whole, _, half_seconds, both = (outcome.seconds for outcome in outcomes)
    assert half_seconds < whole < both


def test_many_slow_runs_are_no_hang(runner: Runner):
    """Together they take longer than the limit of 1.5 s, each of them some 20 ms."""
    slow = (OPERATOR, fault("slow"))
    once = runner.measure(*slow).seconds
    assert once is not None
    (network,) = runner.rehearse([(KernelStep(slow),)], rounds=1, runs=round(2.5 / once))
    assert network.error is None and network.seconds > 0.5 * once
    arms = round(2.5 / (4 * once))  # a warm-up and three samples of each
    assert [outcome.error for outcome in runner.compare([[slow]] * arms)] == [None] * arms


def test_an_operator_that_no_template_covers_is_a_build_failure(runner: Runner):
    outcome = runner.measure(Pool2d("max", 1, 3, 8, 8, (2, 2)), {})
    assert outcome == MeasureOutcome(None, "build", "no template covers the operator")


def test_a_worker_that_cannot_start_is_an_error():
    with Runner(CPU, templates="no_such_module:f") as runner, pytest.raises(TuningError, match="no_such_module"):
        runner.measure(OPERATOR, fault("none"))


def test_a_process_that_the_system_refuses_is_an_error(monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr("schedules.measuring.measure_runner._spawn", refuse)
    with Runner(CPU, templates=FAKES) as runner, pytest.raises(TuningError, match="cannot start: .*memory"):
        runner.measure(OPERATOR, fault("none"))


# --- the timing protocol, on a clock of its own ---


class FakeClock:
    """Time passes only inside :meth:`work`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.log: list[str] = []
        monkeypatch.setattr("schedules.measuring.timing_protocol.time.perf_counter", lambda: self.now)

    def work(self, name: str, seconds: float) -> None:
        self.log.append(name)
        self.now += seconds


PROTOCOL = TimingProtocol(sample_seconds=1.0, budget_seconds=10.0, warmup_seconds=2.0, min_samples=3)


def test_arms_alternate_and_overhead_is_taken_off(monkeypatch: pytest.MonkeyPatch):
    clock = FakeClock(monkeypatch)
    a, b = (Arm([(clock.work, (name, 1.0))], 1, overhead_seconds=0.25) for name in "ab")
    time_arms([a, b], PROTOCOL)
    assert "".join(clock.log) == "aabb" + "ab" * 10
    assert a.samples == [0.75] * 10 and b.seconds == b.median_seconds == 0.75


def test_a_clearly_slower_arm_stops_early(monkeypatch: pytest.MonkeyPatch):
    clock = FakeClock(monkeypatch)
    slow, fair = (Arm([(clock.work, ("", seconds))], 1) for seconds in (1.6, 1.4))
    time_arms([slow], PROTOCOL, best_seconds=1.0)
    time_arms([fair], PROTOCOL, best_seconds=1.0)
    assert (len(slow.samples), len(fair.samples)) == (3, 8)


def test_an_arm_that_another_process_disturbs_gets_time_to_recover(monkeypatch: pytest.MonkeyPatch):
    """Time slices of 40 s until 200 s have passed; then the 1.2 s that the kernel takes. Always slow: it ends."""
    clock = FakeClock(monkeypatch)
    monkeypatch.setattr("schedules.measuring.timing_protocol.time.sleep", lambda seconds: clock.work("pause", 50.0))
    disturbed = Arm([(lambda: clock.work("", 40.0 if clock.now < 200.0 else 1.2), ())], 1)
    time_arms([disturbed], PROTOCOL, best_seconds=1.0)
    assert disturbed.seconds == pytest.approx(1.2)
    slow = Arm([(clock.work, ("", 40.0))], 1)
    time_arms([slow], PROTOCOL, best_seconds=1.0)
    assert slow.seconds == 40.0 and clock.log.count("pause") == 1 + PROTOCOL.patience


def test_a_chain_runs_its_steps_in_order_over_all_copies(monkeypatch: pytest.MonkeyPatch):
    clock = FakeClock(monkeypatch)
    arm = Arm([(clock.work, (name, 1.0)) for name in ("x1", "y1", "x2", "y2")], 2)
    assert arm.run(3) == 2.0
    assert clock.log == ["x1", "y1", "x2", "y2", "x1", "y1"]


@pytest.mark.parametrize(("constant_bytes", "copies"), [(0, 1), (4 << 20, 2), (1 << 20, 5), (100 << 20, 2), (36, 256)])
def test_copies_of_the_weights_exceed_the_caches(constant_bytes: int, copies: int):
    assert rotation_copies(constant_bytes, CPU) == copies  # 2 threads x 1 MiB of L2, twice


# --- arguments ---


def test_lanes_beyond_the_channels_hold_values_a_kernel_must_not_use():
    rng = np.random.default_rng(0)
    array = np.ones((1, 3, 2, 2), np.float32)
    blocked = arguments._laid_out(array, TensorSpec((1, 1, 2, 2, 16), "blocked"), CPU, rng)
    assert (blocked[..., :3] == 1).all() and (np.abs(blocked[..., 3:]) > 1e-3).all()


def test_every_layer_keeps_the_spread():
    convs = (
        Conv2d(1, 32, 8, 8, 32, (3, 3), padding=(1, 1, 1, 1), groups=32),
        Conv2d(1, 32, 8, 8, 64, (1, 1), epilogue=Epilogue(bias=True)),
    )
    first, second = arguments.random_parameters(FusedConvs(convs), np.random.default_rng(0))
    assert first.weight.shape == (32, 1, 3, 3) and first.bias is None
    assert second.weight.shape == (64, 32, 1, 1) and second.bias.shape == (64,)
    assert first.weight.std() * 3 == pytest.approx(1, rel=0.2)
    assert second.weight.std() * np.sqrt(32) == pytest.approx(1, rel=0.2)


def test_tolerance_is_far_under_one_lost_term():
    for features in (8, 512, 4096):
        assert arguments.tolerance(Dense(1, features, 8)) < 0.2 / np.sqrt(features)


def test_what_was_compiled_together_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch):
    """Neither when it is timed nor when it runs in a network; weights are kept from one network to the next."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    compiled = []

    def compile_kernel(function, cpu):
        compiled.append(function)
        return lambda *arguments: None

    monkeypatch.setattr("schedules.measuring.measure_worker.compile_kernel", compile_kernel)
    worker = MeasureWorker(Setup(CPU, TimingProtocol(), FAKES, (), 10.0), lambda phase: None)
    configs = [fault("none", split=split) for split in (1, 2, 4)]
    candidates = [(OPERATOR, config) for config in configs]
    assert worker.answer(CompileRequest((*candidates, candidates[0], (OPERATOR, fault("raise"))))).outcomes == ()
    assert len(compiled) == 3
    worker.answer(MeasureRequest(((candidates[1],),)))
    worker.answer(ProgramRequest(((KernelStep(candidates[0]), KernelStep(candidates[2], 0)),), 1, 1))
    assert len(compiled) == 3
    kept = worker._buffers.kept_bytes
    assert kept > 0
    worker.answer(ProgramRequest(((KernelStep(candidates[1]),),), 1, 1))
    assert worker._buffers.kept_bytes == kept
    monkeypatch.setattr("schedules.measuring.measure_worker._CACHED_BYTES", 0)
    worker.answer(ProgramRequest(((KernelStep(candidates[1]),),), 1, 1))
    assert worker._buffers.kept_bytes == 0


def test_arguments_of_large_operators_are_not_kept(monkeypatch: pytest.MonkeyPatch):
    """A few are kept for kernels that take turns; as many of a megapixel image would fill the memory."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    worker = MeasureWorker(Setup(CPU, TimingProtocol(), FAKES, (), 10.0), lambda phase: None)
    template = worker._templates(OPERATOR, CPU)
    assert template is not None
    operators = [Dense(rows, 64, 48) for rows in range(1, 6)]
    sizes = [worker._case(operator, template).size_bytes for operator in operators]
    assert [operator for operator, _ in worker._cases] == operators and sizes == sorted(sizes)
    assert sizes[1] - sizes[0] == 4 * (64 + 48 + 48)  # data, output and expected values of a row
    monkeypatch.setattr("schedules.measuring.measure_worker._CACHED_BYTES", sum(sizes[-2:]))
    worker._case(operators[-1], template)
    assert [operator for operator, _ in worker._cases] == operators[-2:]
    monkeypatch.setattr("schedules.measuring.measure_worker._CACHED_BYTES", 0)
    worker._case(operators[-1], template)
    assert [operator for operator, _ in worker._cases] == operators[-1:]


def test_a_measuring_process_does_not_wait_for_torch():
    """TVM's bindings import PyTorch where it is installed; it may be imported afterwards."""
    code = (
        "import sys; from schedules.contract.tvm_import import import_tvm_alone; import_tvm_alone();"
        "assert 'tvm' in sys.modules and 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).resolve().parents[3], check=True)
