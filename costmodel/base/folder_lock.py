"""Folder lock: one writer at a time per folder, across processes; readers are not blocked."""

from __future__ import annotations

import errno
import fcntl
import os
import shlex
import shutil
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO

from costmodel.base.errors import OutputError

LOCK = ".lock"
_LONGEST_COMMAND = 120  # characters of the command shown for the process that holds a lock


class FolderLock:
    """Lock held until :meth:`close` or the end of the process, however it ends; a context manager."""

    def __init__(self, path: Path, file: IO[bytes], made: bool) -> None:
        self._path, self._file, self._made = path, file, made

    def clear(self, *patterns: str) -> None:
        """Remove files and folders that match ``patterns`` from the folder: temporary files of earlier writers that
        were killed (this process is the only writer).
        """
        for pattern in patterns:
            for path in self._path.parent.glob(pattern):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with suppress(OSError):
                        path.unlink()

    def close(self) -> None:
        """Release the lock; safe to call twice. Removes a folder that was created for the lock and is still empty."""
        if self._file.closed:
            return
        with suppress(OSError):
            # while it is held: a process waiting for this very file finds it gone and creates another
            self._path.unlink()
        self._file.close()
        if self._made:
            with suppress(OSError):
                self._path.parent.rmdir()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def lock_folder(folder: Path, what: str, name: str = LOCK) -> FolderLock:
    """Create ``folder`` and acquire its lock, the file ``name`` in it.

    ``what``: description of the data written there, for the ``OutputError`` raised if another process holds the lock
    (which it names) or the folder cannot be written. A lock file left by a killed process does not block.
    """
    path, made = folder / name, not folder.exists()
    while True:
        file = _opened(path, what)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = _holder(file)
            file.close()
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise OutputError(
                    f"{folder}: {what} cannot be written: no locks here ({error.strerror}); "
                    "choose a folder on a local disk"
                ) from error
            raise OutputError(
                f"{folder}: another process is writing {what} here{holder}; wait until it has ended"
            ) from error
        if _is_at(path, file):
            break
        file.close()  # its holder removed it between the two calls
    with suppress(OSError):  # on a full disk the lock holds all the same
        file.truncate(0)
        file.write(f"{os.getpid()} {socket.gethostname()} {_command()}\n".encode(errors="replace"))
    return FolderLock(path, file, made)


def _opened(path: Path, what: str) -> IO[bytes]:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return open(path, "a+b", buffering=0)
    except OSError as error:
        raise OutputError(
            f"{path.parent}: {what} cannot be written: {error.strerror}; choose another place, or free some"
        ) from error


def _is_at(path: Path, file: IO[bytes]) -> bool:
    try:
        there = path.stat()
    except OSError:
        return False
    own = os.fstat(file.fileno())
    return (there.st_dev, there.st_ino) == (own.st_dev, own.st_ino)


def _command() -> str:
    """Command line that started this process, as a user would type it."""
    program = Path(sys.argv[0] if sys.argv else "")
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name or "python"
    return " ".join([name, *(shlex.quote(each) for each in sys.argv[1:])])[:_LONGEST_COMMAND]


def _holder(file: IO[bytes]) -> str:
    """Process named in the lock file; empty if unreadable."""
    try:
        for _ in range(10):  # the holder writes its name a moment after locking
            file.seek(0)
            text = file.read(1_000).decode(errors="replace").strip()
            if text:
                break
            time.sleep(0.05)
        number, host, command = text.split(" ", 2)
        elsewhere = "" if host == socket.gethostname() else f" on {host}"
        return f" (process {int(number)}{elsewhere}: {command})"
    except (OSError, ValueError):
        return ""
