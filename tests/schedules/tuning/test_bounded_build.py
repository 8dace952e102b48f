"""A build that takes too long, fails or crashes costs its candidate, nothing else."""

from __future__ import annotations

import os
import signal
import time

import numpy as np
import pytest
import tvm

from costmodel.base.errors import TuningError
from costmodel.operators.layers import Dense
from schedules.contract.cpu_target import host_target
from schedules.contract.operator_workload import workload
from schedules.tuning import stock_meta_schedule
from schedules.tuning.stock_meta_schedule import build_bounded

OPERATOR = Dense(2, 4, 3)


def test_what_is_built_in_the_child_runs_here():
    built = build_bounded(workload(OPERATOR), host_target(1).tvm_target())
    data, weight = np.ones((2, 4), "float32"), np.full((3, 4), 2.0, "float32")
    tensors = [tvm.runtime.tensor(each) for each in (data, weight, np.zeros((2, 3), "float32"))]
    built["main"](*tensors)
    assert np.array_equal(tensors[-1].numpy(), np.full((2, 3), 8.0))


def test_a_build_over_its_limit_is_killed(monkeypatch):
    children: list[int] = []

    def noting_fork(fork=os.fork):
        child = fork()
        children.append(child)
        return child

    monkeypatch.setattr(stock_meta_schedule.os, "fork", noting_fork)
    monkeypatch.setattr(stock_meta_schedule.tvm, "compile", lambda *args, **kwargs: time.sleep(60))
    with pytest.raises(TuningError, match=r"more than 0\.2 s"):
        build_bounded(workload(OPERATOR), host_target(1).tvm_target(), seconds=0.2)
    # The child is not left behind. Other tests' processes may run on, such as multiprocessing's resource tracker.
    assert len(children) == 1
    with pytest.raises(ChildProcessError):
        os.waitpid(children[0], os.WNOHANG)


def test_a_crash_of_the_compiler_is_an_error(monkeypatch):
    monkeypatch.setattr(
        stock_meta_schedule.tvm, "compile", lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    )
    with pytest.raises(TuningError, match="crashed"):
        build_bounded(workload(OPERATOR), host_target(1).tvm_target())


def test_the_message_of_a_failed_build_is_passed_on(monkeypatch):
    def fail(*args, **kwargs):
        raise ValueError("no such intrinsic")

    monkeypatch.setattr(stock_meta_schedule.tvm, "compile", fail)
    with pytest.raises(TuningError, match="no such intrinsic"):
        build_bounded(workload(OPERATOR), host_target(1).tvm_target())
