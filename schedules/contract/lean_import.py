"""Importing TVM: without PyTorch, which ``tvm_ffi`` imports wherever it is installed (it doubles the time of a start),
whole, whatever happens meanwhile, and with how many threads it runs kernels.
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
from costmodel.base.termination import Terminated

_THREADS = "TVM_NUM_THREADS"


def import_tvm_alone() -> None:
    """Imports ``tvm``; for processes that never use PyTorch, which they may import afterwards all the same."""
    with uninterrupted():
        if "torch" in sys.modules or "tvm" in sys.modules:
            import tvm

            _let_through()
            return
        sys.modules["torch"] = None  # type: ignore[assignment]  # Python's way to hide a module
        try:
            import tvm  # noqa: F401
        finally:
            del sys.modules["torch"]
        _let_through()


def _let_through() -> None:
    """Ctrl-C, SIGTERM and a full disk in what TVM calls back (its passes that are written in Python) stay what they are
    on their way through C++, which otherwise makes errors of a compilation of them.
    """
    from tvm_ffi import register_error

    for passing in (KeyboardInterrupt, Terminated, OutputError):
        register_error(passing.__name__, passing)


def lacks_compiler() -> bool:
    """Whether this process has loaded TVM's runtime alone, as ``fusion.load`` does: its compiler cannot follow."""
    return bool(getattr(sys.modules.get("tvm.base"), "_RUNTIME_ONLY", False))


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Ctrl-C waits for the end of the block.

    An import of TVM that it ends leaves modules behind that no later import in the same process completes: a notebook
    would have to be started anew.
    """
    before = signal.getsignal(signal.SIGINT)
    if before is None or threading.current_thread() is not threading.main_thread():
        yield  # nothing of Python's is asked, or signals do not come here
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
    """TVM's thread pool, which takes half of the cores by default, made in this context has ``count`` threads."""
    before = os.environ.get(_THREADS)
    os.environ[_THREADS] = str(count)
    try:
        yield
    finally:
        if before is None:
            del os.environ[_THREADS]
        else:
            os.environ[_THREADS] = before
