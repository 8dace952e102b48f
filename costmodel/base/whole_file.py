"""Files that are there whole or not at all: written beside their place under another name, then renamed. And lines that
are.
"""

from __future__ import annotations

import errno
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO

from costmodel.base.errors import OutputError

Paths = str | os.PathLike[str]
_PARTIAL = ".partial"


@contextmanager
def whole_file(path: Path) -> Iterator[IO[bytes]]:
    """A stream whose bytes are the file ``path`` once the block has ended; ``OSError`` where that cannot be.

    If the block raises, nothing is left of them, and an older file stays as it was. A replaced file keeps its mode, a
    new one gets that of any new file. Several processes may write the same ``path``: the last one's file remains. What
    is no file (``/dev/null``, a pipe) is written to as it is.
    """
    mode = _mode(path)
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


def _mode(path: Path) -> int | None:
    """Kind and permissions of what is there, ``None`` for nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def check_writable(path: Path, option: str, makes_folder: bool = False) -> None:
    """``OutputError`` now for a file that could not be written later, when what goes into it has been computed.

    ``option``: who asks for it. ``makes_folder``: its folder is made where it does not exist, else it must be there.
    Nothing is left of the attempt but that folder, and what is in ``path`` stays.
    """
    told = f"{option} {path}"
    try:
        mode = _mode(path)
        if mode is not None and not stat.S_ISREG(mode):
            if stat.S_ISDIR(mode):
                raise OutputError(f"{told}: is a directory; name a file")
            if not os.access(path, os.W_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return
        folder = Path(os.path.realpath(path)).parent
        if makes_folder:
            folder.mkdir(parents=True, exist_ok=True)
        elif not folder.is_dir():
            raise OutputError(f"{told}: there is no folder {folder}; make it, or name another file")
        with tempfile.TemporaryFile(dir=folder):
            pass
    except (OSError, ValueError) as error:  # ValueError: a name with a zero byte, told in other words by each Python
        reason = error.strerror if isinstance(error, OSError) else "a zero byte in the name"
        raise OutputError(f"{told}: cannot be written ({reason}); name another file") from None


def check_outputs(
    written: Mapping[str, Paths | None],
    read: Mapping[str, Paths | None] = MappingProxyType({}),
    makes_folder: bool = False,
) -> None:
    """:func:`check_writable` for the files of ``written`` by option, which must be others than those that are ``read``
    and than one another.
    """
    there = {os.path.realpath(path): option for option, path in read.items() if path is not None}
    for option, path in written.items():
        if path is None:
            continue
        check_writable(Path(path), option, makes_folder)
        other = there.setdefault(os.path.realpath(path), option)
        if other != option and os.path.realpath(path) != os.devnull:
            raise OutputError(f"{option} {path}: is the file of {other}; name another")


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
