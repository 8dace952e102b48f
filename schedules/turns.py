"""Workers that build side by side and time one at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO


class Turns:
    """A lock file: any number of processes may be busy with it, or one may be alone.

    The operating system releases a lock when its process dies, however that happens.
    """

    def __init__(self, path: str | None) -> None:
        self._file: IO[bytes] | None = None if path is None else open(path, "rb")  # noqa: SIM115 (as long as the process)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Anything that uses the cores: it must not run while another process is timing."""
        with self._held(fcntl.LOCK_SH):
            yield

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Timing: nobody else is busy."""
        with self._held(fcntl.LOCK_EX):
            yield

    @contextmanager
    def _held(self, kind: int) -> Iterator[None]:
        if self._file is None:
            yield
            return
        fcntl.flock(self._file, kind)
        try:
            yield
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)
