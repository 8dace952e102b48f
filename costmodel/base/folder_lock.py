"""One writer at a time in a folder, whoever starts it; readers are not kept out."""

from __future__ import annotations

import errno
import fcntl
from pathlib import Path
from typing import IO

from costmodel.base.errors import OutputError

LOCK = ".lock"


def lock_folder(folder: Path, what: str) -> IO[str]:
    """Makes ``folder`` and takes its lock, which is held until what is returned is closed, or the process ends.

    ``what``: what is written there, for the ``OutputError`` where another process holds the lock, or the folder cannot
    be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "w", encoding="utf-8")  # noqa: SIM115 (held until closed)
    except OSError as error:
        raise OutputError(
            f"{folder}: {what} cannot be written: {error.strerror}; choose another place, or free some"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
            raise OutputError(
                f"{folder}: {what} cannot be written: no locks here ({error.strerror}); choose a folder on a local disk"
            ) from error
        raise OutputError(
            f"{folder}: another process is writing {what} here; wait for it, or name another folder"
        ) from error
    return lock
