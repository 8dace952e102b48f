"""Files that are there whole or not at all: written beside their place under another name, then renamed. And lines that
are.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

_PARTIAL = ".partial"


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A stream whose bytes are the file ``path`` once the block has ended; ``OSError`` where that cannot be.

    If the block raises, nothing is left of them, and an older file stays as it was. A replaced file keeps its mode, a
    new one gets that of any new file. Several processes may write the same ``path``: the last one's file remains. What
    is no file (``/dev/null``, a pipe) is written to as it is.
    """
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    if mode is not None and not stat.S_ISREG(mode):
        with path.open("wb") as stream:
            yield stream
        return
    target = Path(os.path.realpath(path))  # a link stays one
    staged = target.with_name(f".{target.name[:40]}.{secrets.token_hex(8)}{_PARTIAL}")
    try:
        with staged.open("xb") as stream:
            yield stream
        if mode is not None:
            staged.chmod(stat.S_IMODE(mode))
        staged.replace(target)
    except BaseException:
        with suppress(OSError):
            staged.unlink()
        raise


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes ``content`` (text as UTF-8) as :func:`whole_file` does."""
    with whole_file(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def append_whole(stream: IO[bytes], data: bytes) -> None:
    """Appends all of ``data`` to a file that was opened unbuffered for that, or nothing: ``OSError`` then, also of a
    disk that is full in the middle.
    """
    before = stream.seek(0, os.SEEK_END)
    try:
        if stream.write(data) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except BaseException:
        with suppress(OSError):
            stream.truncate(before)
        raise


def remove_partials(*folders: Path) -> None:
    """Takes away what processes that were killed had written of files in ``folders``: nobody else may write there now,
    or need what he writes.
    """
    for folder in folders:
        for path in folder.glob(f".*{_PARTIAL}"):
            with suppress(OSError):
                path.unlink()
