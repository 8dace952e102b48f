"""A step that takes long says so, and one that does not end is stopped.

Without data ``.item()`` never becomes what a loop waits for. Such a loop either calls operators without end, which
their number shows, or none at all, which the clock shows.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from costmodel.base.errors import ModelError

# A training step of 36 layers calls 11,000, of the 126 of Llama 3 405B four times as many.
MOST_CALLS = 400_000
# A step may load data or compute on the CPU for so long without one call.
SILENT_SECONDS = 180.0
FIRST_NOTE_SECONDS, NOTES_SECONDS = 20.0, 30.0


class EndlessStepError(ModelError):
    """The step does not come to its end."""

    def __init__(self, what: str = "") -> None:
        super().__init__(
            f"the step {what or f'has called no operator for {SILENT_SECONDS:.0f} seconds'} and has not ended: a loop "
            "that waits for data (.item(), .any()) never sees them in a capture; give it a fixed number of rounds; a "
            "layer that goes token by token needs fewer tokens, or --linear-attention fused where its library "
            "has a kernel"
        )


@contextmanager
def watched(count: Callable[[], int]) -> Iterator[None]:
    """Inside, progress of a long capture is told on standard error, and :class:`EndlessStepError` ends one that calls
    nothing for too long. ``count``: calls so far.
    """
    done = threading.Event()
    watcher = threading.Thread(target=_watch, args=(count, done, threading.get_ident()), daemon=True)
    watcher.start()
    try:
        yield
    finally:
        done.set()
        watcher.join()


def _watch(count: Callable[[], int], done: threading.Event, watched_thread: int) -> None:
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
            # The only way into a loop that calls nothing of ours.
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(watched_thread), ctypes.py_object(EndlessStepError)
            )
            return
