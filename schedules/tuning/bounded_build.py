"""Builds with a time limit: LLVM needs many minutes for some candidates of a search (large bodies, fully unrolled).

Each build runs in a forked child, which is cheap (no import, no copy of the module), and is killed at its limit.
"""

from __future__ import annotations

import os
import select
import signal
import tempfile
from pathlib import Path
from typing import Any

import tvm

from costmodel.base.errors import TuningError
from costmodel.base.termination import end_with_parent

# Limit of MetaSchedule's own LocalBuilder.
BUILD_SECONDS = 30.0


def build_bounded(module: tvm.IRModule, target: tvm.target.Target, seconds: float = BUILD_SECONDS) -> Any:
    """``tvm.compile(module)``, loaded from a library; raises ``TuningError`` on failure or after ``seconds``."""
    with tempfile.TemporaryDirectory(prefix="candidate-") as folder:
        library = Path(folder) / "candidate.so"
        failure = _in_child(lambda: tvm.compile(module, target=target).export_library(str(library)), seconds)
        if failure is not None:
            raise TuningError(failure)
        return tvm.runtime.load_module(str(library))


def _in_child(work: Any, seconds: float) -> str | None:
    """Run ``work`` in a forked child; return an error message, or None on success."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        _report(work, write_end)
    os.close(write_end)
    try:
        return _await(child, read_end, seconds)
    finally:
        os.close(read_end)


def _report(work: Any, write_end: int) -> None:
    """Run the child, which never returns; its message is the error, or ``done``."""
    word = "done"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    end_with_parent()
    try:
        work()
    except BaseException as error:
        word = str(error)[-2000:] or type(error).__name__
    finally:
        os.write(write_end, word.encode())
        os._exit(0)


def _await(child: int, read_end: int, seconds: float) -> str | None:
    readable: list[int] = []
    try:
        readable, _, _ = select.select([read_end], [], [], seconds)
    finally:  # also on Ctrl-C
        if not readable:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
    if not readable:
        return f"compiling takes more than {seconds:g} s"
    word = os.read(read_end, 4096).decode(errors="replace")
    os.waitpid(child, 0)
    if word == "done":
        return None
    return word or "the compiler crashed"
