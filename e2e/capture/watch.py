"""Progress messages of a long capture, and an end to endless scripts: during import, model construction, and the step.

Without data ``.item()`` never becomes the value that a loop waits for. Such a loop either calls operators endlessly,
detected by their number, or none at all, detected by time.
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

# A training step of 36 layers calls 11,000, one of the 126 layers of Llama 3 405B four times as many.
MOST_CALLS = 400_000
# Limit including the unrecorded calls that make the model and settle the step.
MOST_CALLED = 5 * MOST_CALLS
# Longest time that a script may load data or compute on the CPU without a call.
SILENT_SECONDS = 180.0
FIRST_NOTE_SECONDS, NOTES_SECONDS, _WAKING_SECONDS = 20.0, 30.0, 2.0
# A signal that is ignored without a handler.
_WAKING = signal.SIGURG


class EndlessStepError(ModelError):
    """Raised for a script that does not end."""

    def __init__(self, what: str = "") -> None:
        super().__init__(
            f"the script {what or f'has called no operator for {SILENT_SECONDS:.0f} seconds'} and has not ended: a "
            "loop that waits for data (.item(), .any()) never sees them in a capture; give it a fixed number of "
            "rounds; a layer that goes token by token needs fewer tokens, or --linear-attention fused where its "
            "library has a kernel"
        )


@contextmanager
def watched(count: Callable[[], int]) -> Iterator[None]:
    """Context that prints progress of a long capture on standard error, and raises :class:`EndlessStepError` after too
    long without a call.

    ``count``: function that returns the number of calls so far.
    """
    done, stopped = threading.Event(), threading.Event()
    watcher = threading.Thread(target=_watch, args=(count, done, stopped, threading.get_ident()), daemon=True)
    watcher.start()
    try:
        with _wakeable():
            yield
    except BaseException as error:
        if stopped.is_set() and not isinstance(error, EndlessStepError):
            raise EndlessStepError from None  # errors on its way out
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
            # The only way to interrupt a loop without calls of this package.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(watched_thread), ctypes.py_object(EndlessStepError)
            )
            _wake(watched_thread, done)
            return


@contextmanager
def _wakeable() -> Iterator[None]:
    """Context in which :data:`_WAKING` ends a wait of the main thread (for a queue, a lock, a socket).

    Python then calls a handler, in which a pending exception is raised.
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
