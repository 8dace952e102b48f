"""Engines for tests: they run in real worker processes, and misbehave on request."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from costmodel.base.errors import Say
from fusion.comparing.engine import Arrays, EngineCall, EngineWorkload, Unavailable


def _nothing() -> None:
    return None


@dataclass
class FakeSession:
    """Computes the tiny model with NumPy; ``call`` is what is timed, ``change`` spoils the outputs."""

    call: EngineCall = _nothing
    change: Callable[[Arrays], Arrays] = lambda outputs: outputs
    mode: str = "fake"

    def run(self, inputs: Mapping[str, np.ndarray]) -> Arrays:
        a, b = inputs["a"], inputs["b"]
        return self.change({"sum": a + b, "file": np.maximum(a * b, 0)})

    def bind(self, inputs: Mapping[str, np.ndarray]) -> EngineCall:
        return self.call


@dataclass
class FakeEngine:
    session: Callable[[EngineWorkload], FakeSession]

    def prepare(self, workload: EngineWorkload, progress: Say) -> FakeSession:
        progress("thinking")
        return self.session(workload)


def _unavailable(_: EngineWorkload) -> FakeSession:
    raise Unavailable("no such instruction here")


def _raising(_: EngineWorkload) -> FakeSession:
    raise ValueError("operator Foo\nis unknown")


def _crashing() -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def _crashing_later() -> EngineCall:
    calls = iter(range(20))

    def call() -> None:
        if next(calls, None) is None:
            _crashing()

    return call


def _exiting(_: EngineWorkload) -> FakeSession:
    os.write(2, b"cannot load libfoo.so\n")
    os._exit(3)


def _spinning() -> None:
    """Leaves a thread busy for a while, as a pool of threads does that waits for more work."""
    end = time.perf_counter() + 0.3

    def spin() -> None:
        while time.perf_counter() < end:
            pass

    threading.Thread(target=spin).start()


def _hang() -> None:
    time.sleep(3600)


def _settings(workload: EngineWorkload) -> FakeSession:
    seen = f"OMP {os.environ['OMP_NUM_THREADS']}, TVM {os.environ['TVM_NUM_THREADS']}, {workload.threads} threads"
    return FakeSession(mode=seen)


GOOD = FakeEngine(lambda _: FakeSession(call=lambda: time.sleep(0.002)))
SLOW = FakeEngine(lambda _: FakeSession(call=lambda: time.sleep(0.02)))
WRONG = FakeEngine(lambda _: FakeSession(change=lambda outputs: {**outputs, "sum": outputs["sum"] + 0.5}))
NOT_A_NUMBER = FakeEngine(lambda _: FakeSession(change=lambda outputs: {**outputs, "sum": outputs["sum"] * np.nan}))
UNAVAILABLE = FakeEngine(_unavailable)
RAISING = FakeEngine(_raising)
CRASHING = FakeEngine(lambda _: FakeSession(call=_crashing))
CRASHING_LATER = FakeEngine(lambda _: FakeSession(call=_crashing_later()))
EXITING = FakeEngine(_exiting)
SPINNING = FakeEngine(lambda _: FakeSession(call=_spinning))
HANGING = FakeEngine(lambda _: FakeSession(call=_hang))
SETTINGS = FakeEngine(_settings)
