"""Imports that must not be left half done."""

from __future__ import annotations

import os
import signal
from concurrent.futures import ThreadPoolExecutor

import pytest

from costmodel.base.errors import OutputError
from costmodel.base.process import Terminated
from schedules.contract.tvm_import import import_tvm_alone, uninterrupted


def test_ctrl_c_waits_until_the_import_is_whole():
    before, reached = signal.getsignal(signal.SIGINT), []
    with pytest.raises(KeyboardInterrupt), uninterrupted():
        os.kill(os.getpid(), signal.SIGINT)
        reached.append("the end")
    assert reached and signal.getsignal(signal.SIGINT) is before


def test_an_import_that_fails_is_told_as_it_is():
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(ImportError, match="no such thing"), uninterrupted():
        raise ImportError("no such thing")
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_leave_signals_alone():
    def inside() -> object:
        with uninterrupted():
            return signal.getsignal(signal.SIGINT)

    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(inside).result() is signal.getsignal(signal.SIGINT)


@pytest.mark.parametrize("ending", [KeyboardInterrupt, Terminated, OutputError])
def test_what_ends_a_pass_of_tvm_is_told_as_it_is(ending: type[BaseException]):
    """C++ lies between the pass, which is written in Python, and who asked for it: errors become errors of TVM's."""
    import_tvm_alone()
    import tvm

    @tvm.transform.module_pass(opt_level=0, name="stopped")
    def stopped(mod: tvm.IRModule, _: tvm.transform.PassContext) -> tvm.IRModule:
        raise ending("SIGTERM")

    with pytest.raises(ending, match="SIGTERM"):
        stopped(tvm.IRModule())
