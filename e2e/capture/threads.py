"""Threads started by a step: PyTorch's modes apply to one thread, so each enters its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from e2e.capture.functions import GpuDecisions
from e2e.capture.recorder import Recorder
from e2e.step.choices import AttentionForm


@contextmanager
def followed_threads(recorder: Recorder, attention: AttentionForm) -> Iterator[None]:
    """Context in which operators of started threads are recorded too, in the order of their calls.

    The host alternates between threads, as with Python's threads. On exit an exception that ended one of them is
    raised.
    """
    failed: list[BaseException] = []
    start = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        thread.run = _followed(thread.run, recorder, attention, failed)  # type: ignore[method-assign]
        start(thread)

    with patch.object(threading.Thread, "start", started):
        yield
    if failed:
        raise failed[0]


def _followed(
    run: Callable[[], Any], recorder: Recorder, attention: AttentionForm, failed: list[BaseException]
) -> Callable[[], None]:
    def follow() -> None:
        try:
            with GpuDecisions(recorder, attention), recorder:
                run()
        except SystemExit:
            raise
        except BaseException as error:
            failed.append(error)  # reported by the capture, not by the thread

    return follow
