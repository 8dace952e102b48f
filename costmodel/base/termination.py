"""How processes end before they are done: asked to by a signal, or because the process that started them has ended."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

# What asks a process to end, besides Ctrl-C: `kill`, schedulers and `timeout`; a terminal that was closed.
ASKING = (signal.SIGTERM, signal.SIGHUP)
_LONGEST_CHAIN = 20  # of causes, which may go round
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


class Terminated(BaseException):
    """This process was asked to end. Like ``KeyboardInterrupt`` it passes handlers of errors, but nothing goes on
    after it: what is held is released on its way up. Its text is the signal's name.
    """

    @property
    def status(self) -> int:
        """The exit status that shells give to such an end."""
        return 128 + signal.Signals[str(self)]


@contextmanager
def terminable() -> Iterator[None]:
    """In the block, SIGTERM and SIGHUP raise :class:`Terminated` in the main thread, once: children are ended then, and
    temporary folders taken away, which a signal's default action would leave. In other threads, and where somebody else
    handles or ignores a signal (``nohup``), nothing changes.
    """
    ours: list[signal.Signals] = []

    def end(number: int, frame: FrameType | None) -> None:
        for each in ours:  # `timeout` sends two; the way up is not to be cut short
            signal.signal(each, signal.SIG_IGN)
        raise Terminated(signal.Signals(number).name)

    if threading.current_thread() is threading.main_thread():
        ours += [each for each in ASKING if signal.getsignal(each) is signal.SIG_DFL]
    for each in ours:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in ours:
            if signal.getsignal(each) is end:
                signal.signal(each, signal.SIG_DFL)


def ending_behind(error: BaseException) -> KeyboardInterrupt | Terminated | None:
    """The end that was asked for, where ``error`` is one or was made of one: an extension module that is being loaded
    when a signal comes fails with ``SystemError`` or ``ImportError``, whose cause it is.
    """
    seen: BaseException | None = error
    for _ in range(_LONGEST_CHAIN):
        if seen is None or isinstance(seen, KeyboardInterrupt | Terminated):
            return seen
        seen = seen.__cause__
    return None


def pass_ending(error: BaseException) -> None:
    """Raises the end that was asked for where ``error`` was made of one: for those that take any error for a result, or
    for the fault of an input.
    """
    end = ending_behind(error)
    if end is not None:
        raise end from None


@contextmanager
def interruptible_start() -> Iterator[None]:
    """Ctrl-C while a program is being loaded ends it in one line, with status 130, as its commands do later. After the
    block it ends the process without a word: what is left is the interpreter's own end, where it would be told as an
    error of whatever it meets.
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(ending_behind(error), KeyboardInterrupt):
            raise
        print("stopped", file=sys.stderr)
        raise SystemExit(130) from None
    finally:
        heard = threading.current_thread() is threading.main_thread()
        if heard and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)


def end_with_parent(parent: int | None = None) -> None:
    """Asks Linux to kill this process when the thread that started it ends, in whatever way: deep in a compiler, or in
    a kernel that is timed, it would not notice for minutes.

    ``parent``: the process that started it, where it may have ended before this call.
    """
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


@contextmanager
def interrupts_held() -> Iterator[None]:
    """Ctrl-C waits for the end of the block, and processes that are started in it wait for ever: one that is still
    being loaded when the whole group of a terminal gets it would show where it was.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
