"""Atomic file writes: files are written under a temporary name in the same folder, then renamed. Atomic appends too."""

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
    """Open a stream whose bytes become the file ``path`` at the end of the block; ``OSError`` if that fails.

    If the block raises, nothing is left behind and an older file stays unchanged. A replaced file keeps its mode, a new
    one gets the default mode. Several processes may write the same ``path``: the last one wins. Anything but a regular
    file (``/dev/null``, a pipe) is written to directly.
    """
    mode = _mode(path)
    if mode is not None and not stat.S_ISREG(mode):
        with path.open("wb") as stream:
            yield stream
        return
    target = Path(os.path.realpath(path))  # a symbolic link stays one
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
    """File type and permissions of ``path``, or ``None`` if it does not exist."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def check_writable(path: Path, option: str, makes_folder: bool = False) -> None:
    """Raise ``OutputError`` early for a file that could not be written after its content has been computed.

    ``option``: option that names the file. ``makes_folder``: the parent folder is created if missing, else it must
    exist. The check leaves nothing but that folder, and does not change existing content.
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
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the name
        reason = error.strerror if isinstance(error, OSError) else "a zero byte in the name"
        raise OutputError(f"{told}: cannot be written ({reason}); name another file") from None


def check_outputs(
    written: Mapping[str, Paths | None],
    read: Mapping[str, Paths | None] = MappingProxyType({}),
    makes_folder: bool = False,
) -> None:
    """Apply :func:`check_writable` to the files of ``written`` by option, which must differ from the files that are
    ``read`` and from each other.
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
    """Write ``content`` (text as UTF-8) atomically by :func:`whole_file`."""
    with whole_file(path) as stream:
        stream.write(content.encode() if isinstance(content, str) else content)


def append_whole(stream: IO[bytes], data: bytes) -> None:
    """Append all of ``data`` to a file opened unbuffered for appending, or nothing; raises ``OSError`` on failure, such
    as a disk that fills up midway.
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
    """Remove partial files left in ``folders`` by killed processes; no other process may be writing there."""
    for folder in folders:
        for path in folder.glob(f".*{_PARTIAL}"):
            with suppress(OSError):
                path.unlink()
