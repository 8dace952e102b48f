"""One writer at a time in a folder, whoever starts it; readers are not kept out."""

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
_LONGEST_COMMAND = 120  # of what is told about the process that holds a lock


class FolderLock:
    """A lock that is held until :meth:`close`, or until the process ends in whatever way; a context manager."""

    def __init__(self, path: Path, file: IO[bytes], made: bool) -> None:
        self._path, self._file, self._made = path, file, made

    def clear(self, *patterns: str) -> None:
        """Takes away what matches ``patterns`` in the folder: the temporary files and folders of writers before this
        one, which were killed, as nobody else may write here.
        """
        for pattern in patterns:
            for path in self._path.parent.glob(pattern):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path, ignore_errors=True)
                else:
                    with suppress(OSError):
                        path.unlink()

    def close(self) -> None:
        """Lets others write; harmless a second time. A folder that was made for the lock and is still empty goes."""
        if self._file.closed:
            return
        with suppress(OSError):
            self._path.unlink()  # while it is held: who waits for this very file finds it gone and makes another
        self._file.close()
        if self._made:
            with suppress(OSError):
                self._path.parent.rmdir()

    def __enter__(self) -> FolderLock:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def lock_folder(folder: Path, what: str, name: str = LOCK) -> FolderLock:
    """Makes ``folder`` and takes its lock, the file ``name`` in it.

    ``what``: what is written there, for the ``OutputError`` where another process holds the lock, which it names, or
    where the folder cannot be written. What a process that was killed left behind locks nothing.
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
        file.close()  # its holder took it away between the two calls
    with suppress(OSError):  # on a full disk it locks all the same
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
    """What this process was started as, as somebody would type it."""
    program = Path(sys.argv[0] if sys.argv else "")
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name or "python"
    return " ".join([name, *(shlex.quote(each) for each in sys.argv[1:])])[:_LONGEST_COMMAND]


def _holder(file: IO[bytes]) -> str:
    """Who wrote itself into the lock; nothing where that cannot be told."""
    try:
        for _ in range(10):  # between its lock and its name there is a moment
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
