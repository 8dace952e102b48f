"""Output files that appear whole or not at all, alone or as a set, and the lock of a folder with one writer.

A file is written under a temporary name in the same folder, then renamed; appends are atomic too. The files of a
set (:class:`StagedFiles`) appear together once all are complete; an interrupted job resumes with those already
made. A folder lock (:func:`lock_folder`) holds across processes and does not block readers. The folders of the
user's own files follow the XDG Base Directory Specification.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import shlex
import shutil
import socket
import stat
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import IO, TYPE_CHECKING, Any, Literal

from costmodel.base.errors import OutputError

if TYPE_CHECKING:
    from filelock import FileLock

# For users without a home, such as a bare user ID in a container; Debian uses this path for such accounts too.
NO_HOME = Path("/nonexistent")


def user_folder(kind: Literal["cache", "config", "data"]) -> Path:
    """Folder ``costmodel`` among the user's files of ``kind``, such as ``$XDG_CACHE_HOME/costmodel``.

    Without a home it is below :data:`NO_HOME`: reads find nothing, and write errors name that path.
    """
    from platformdirs import PlatformDirs  # not on GPU servers that only measure (docs/measurements.md)

    try:
        return Path(getattr(PlatformDirs("costmodel", appauthor=False), f"user_{kind}_dir"))
    except RuntimeError:  # neither HOME nor an account
        return NO_HOME / kind / "costmodel"


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


LOCK = ".lock"
_LOCK_SECONDS = 0.2  # to wait for a lock that is being released, or for its holder to write its name
_LONGEST_COMMAND = 120  # characters of the command shown for the process that holds a lock


class FolderLock:
    """Lock held until :meth:`close` or the end of the process, however it ends; a context manager.

    ``made``: the folder was created for the lock.
    """

    def __init__(self, lock: FileLock, made: bool) -> None:
        self._path, self._lock, self._made = Path(lock.lock_file), lock, made

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
        if not self._lock.is_locked:
            return
        with suppress(OSError):
            self._path.unlink()  # while it is held: a process waiting for this very file finds it gone, and tries again
        self._lock.release()
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
    from filelock import FileLock, Timeout  # loads asyncio, which most commands do without

    path, made = folder / name, not folder.exists()
    lock = FileLock(path, timeout=_LOCK_SECONDS, thread_local=False, fallback_to_soft=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise OutputError(
            f"{folder}: another process is writing {what} here{_holder(path)}; wait until it has ended"
        ) from None
    except OSError as error:
        raise OutputError(
            f"{folder}: {what} cannot be written: {error.strerror}; choose another place, or free some"
        ) from error
    with suppress(OSError):  # on a full disk the lock holds all the same
        path.write_text(f"{os.getpid()} {socket.gethostname()} {_command()}\n", encoding="utf-8", errors="replace")
    return FolderLock(lock, made)


def _command() -> str:
    """Command line that started this process, as a user would type it."""
    program = Path(sys.argv[0] if sys.argv else "")
    name = f"python -m {program.parent.name}" if program.name == "__main__.py" else program.name or "python"
    return " ".join([name, *(shlex.quote(each) for each in sys.argv[1:])])[:_LONGEST_COMMAND]


def _holder(path: Path) -> str:
    """Process named in the lock file; empty if unreadable."""
    try:
        with path.open("rb") as file:
            number, host, command = file.read(1_000).decode(errors="replace").strip().split(" ", 2)
        elsewhere = "" if host == socket.gethostname() else f" on {host}"
        return f" (process {int(number)}{elsewhere}: {command})"
    except (OSError, ValueError):
        return ""


UNFINISHED = ".unfinished-"  # prefix of the name of the staging folder
PACKAGE = Path(__file__).parents[1]


class StagedFiles:
    """Files of ``output`` that are first written to :attr:`folder`; a context manager, one at a time per ``output``.

    ``made_from``: all inputs of the files, as JSON data. Files finished by an interrupted job with the same inputs and
    the same program are reused; those of other inputs are removed. ``what``: description of the files for the
    ``OutputError`` raised if they cannot be written or another process is writing them.
    """

    def __init__(self, output: Path, what: str, made_from: Any) -> None:
        self.output, self._what = output, what
        text = json.dumps([made_from, _program()], sort_keys=True, default=str)
        self.folder = output / f"{UNFINISHED}{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    def __enter__(self) -> StagedFiles:
        self._lock = lock_folder(self.output, self._what)
        try:
            others = [path.name for path in self.output.glob(f"{UNFINISHED}*") if path != self.folder]
            self._lock.clear(*others)
            self.folder.mkdir(exist_ok=True)
            remove_partials(self.output, self.folder, *(path for path in self.folder.rglob("*") if path.is_dir()))
        except OSError as error:
            self._lock.close()
            raise OutputError(
                f"{self.output}: {self._what} cannot be written: {error.strerror}; choose another place, or free some"
            ) from error
        return self

    def __exit__(self, *exception: object) -> None:
        if not any(path.is_file() for path in self.folder.rglob("*")):
            self._lock.clear(self.folder.name)
        self._lock.close()

    def once(self, name: str, make: Callable[[], object]) -> bool:
        """Run ``make``, which must write ``name``, a path within :attr:`folder`, atomically, unless an interrupted job
        had finished that file. Returns True if it was made now.
        """
        if (self.folder / name).is_file():
            return False
        make()
        return True

    def install(self, names: Sequence[str]) -> list[Path]:
        """Move the files ``names`` to their final places and return their paths; remaining files were only
        intermediate.
        """
        try:
            for name in names:
                (self.output / name).parent.mkdir(parents=True, exist_ok=True)
                (self.folder / name).replace(self.output / name)
        except OSError as error:
            raise OutputError(
                f"{self.output}: {self._what} cannot be written: {error.strerror}; choose another place, or free some"
            ) from error
        self._lock.clear(self.folder.name)
        return [self.output / name for name in names]


def _program() -> str:
    """Digest of this package's modules and machine files: another program version makes other files."""
    return digest_of(path for path in PACKAGE.rglob("*") if path.suffix in (".py", ".yaml"))


def digest_of(paths: Iterable[Path], root: Path = PACKAGE.parent) -> str:
    """Hexadecimal SHA-256 of the names within ``root`` and the contents of ``paths``."""
    found = hashlib.sha256()
    for path in sorted(paths):
        found.update(path.relative_to(root).as_posix().encode())
        found.update(path.read_bytes())
    return found.hexdigest()
