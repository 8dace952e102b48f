"""A script that takes long says so, and one that does not end is stopped: while it is imported, makes its model, and in
its step.

Without data ``.item()`` never becomes what a loop waits for. Such a loop either calls operators without end, which
their number shows, or none at all, which the clock shows.
"""

from __future__ import annotations

import ctypes
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from costmodel.base.errors import ModelError

# A training step of 36 layers calls 11,000, of the 126 of Llama 3 405B four times as many.
MOST_CALLS = 400_000
# With what makes and settles the step, which is not recorded.
MOST_CALLED = 5 * MOST_CALLS
# A script may load data or compute on the CPU for so long without one call.
SILENT_SECONDS = 180.0
FIRST_NOTE_SECONDS, NOTES_SECONDS, _WAKING_SECONDS = 20.0, 30.0, 2.0
# Without a handler nothing happens.
_WAKING = signal.SIGURG


class EndlessStepError(ModelError):
    """The script does not come to its end."""

    def __init__(self, what: str = "") -> None:
        super().__init__(
            f"the script {what or f'has called no operator for {SILENT_SECONDS:.0f} seconds'} and has not ended: a "
            "loop that waits for data (.item(), .any()) never sees them in a capture; give it a fixed number of "
            "rounds; a layer that goes token by token needs fewer tokens, or --linear-attention fused where its "
            "library has a kernel"
        )


@contextmanager
def watched(count: Callable[[], int]) -> Iterator[None]:
    """Inside, progress of a long capture is told on standard error, and :class:`EndlessStepError` ends one that calls
    nothing for too long. ``count``: calls so far.
    """
    done, stopped = threading.Event(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(count, done, stopped, threading.get_ident()), daemon=True)
    watcher.start()
    try:
        with _wakeable():
            yield
    except BaseException as error:
        if stopped.is_set() and not isinstance(error, EndlessStepError):
            raise EndlessStepError from None  # what it met on its way out
        raise
    finally:
        done.set()
        watcher.join()


def _watch(count: Callable[[], int], done: threading.Event, stopped: threading.Event, watched_thread: int) -> None:
    begin = last_call = time.monotonic()
    calls, told = count(), FIRST_NOTE_SECONDS
    while not done.wait(1.0):
        now = time.monotonic()
        if count() != calls:
            calls, last_call = count(), now
        if now - begin >= told:
            print(f"capturing: {calls:,} operator calls after {now - begin:.0f} s", file=sys.stderr)
            told += NOTES_SECONDS
        if now - last_call > SILENT_SECONDS:
            stopped.set()
            # The only way into a loop that calls nothing of ours.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(watched_thread), ctypes.py_object(EndlessStepError)
            )
            _wake(watched_thread, done)
            return


@contextmanager
def _wakeable() -> Iterator[None]:
    """Inside, :data:`_WAKING` ends a wait of the main thread (for a queue, a lock, a socket): Python calls a handler
    then, in which an exception that was set is raised.
    """
    ours = threading.current_thread() is threading.main_thread() and signal.getsignal(_WAKING) is signal.SIG_DFL
    if ours:
        signal.signal(_WAKING, lambda number, frame: None)
    try:
        yield
    finally:
        if ours:
            signal.signal(_WAKING, signal.SIG_DFL)


def _wake(thread: int, done: threading.Event) -> None:
    if not done.wait(_WAKING_SECONDS) and callable(signal.getsignal(_WAKING)):
        signal.pthread_kill(thread, _WAKING)
