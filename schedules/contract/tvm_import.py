"""Import of TVM without PyTorch and protected from interruption, and its number of threads.

``tvm_ffi`` imports an installed PyTorch, which doubles the start-up time.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from costmodel.base.errors import OutputError
from costmodel.base.process import Terminated

_THREADS = "TVM_NUM_THREADS"


def import_tvm_alone() -> None:
    """Import ``tvm`` without PyTorch, which can still be imported afterwards."""
    with uninterrupted():
        if "torch" in sys.modules or "tvm" in sys.modules:
            import tvm

            _let_through()
            return
        sys.modules["torch"] = None  # type: ignore[assignment]  # hides a module from imports
        try:
            import tvm  # noqa: F401
        finally:
            del sys.modules["torch"]
        _let_through()


def _let_through() -> None:
    """Register exceptions that must pass unchanged through C++ from Python callbacks of TVM (passes in Python).

    Ctrl-C, SIGTERM and a full disk would otherwise be converted into compilation errors.
    """
    from tvm_ffi import register_error

    for passing in (KeyboardInterrupt, Terminated, OutputError):
        register_error(passing.__name__, passing)


def lacks_compiler() -> bool:
    """True if this process loaded only TVM's runtime, as ``fusion.load`` does: the compiler cannot be added later."""
    return bool(getattr(sys.modules.get("tvm.base"), "_RUNTIME_ONLY", False))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Delay Ctrl-C to the end of the block.

    An interrupted import of TVM leaves modules that no later import in the same process can complete: a notebook would
    have to be restarted.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield  # the signal handler is not Python's, or this thread receives no signals
        return
    waiting: list[FrameType | None] = []
    signal.signal(signal.SIGINT, lambda _, frame: waiting.append(frame))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
        if waiting:
            os.kill(os.getpid(), signal.SIGINT)


@contextmanager
def tvm_threads(count: int) -> Iterator[None]:
    """Set the size of a TVM thread pool created in this context to ``count`` (TVM's default: half of the cores)."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before
