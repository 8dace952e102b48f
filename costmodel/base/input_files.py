"""Safe reading of user files: regular files only, up to a size limit per kind of file; strict JSON.

A pipe or a device has no end, a socket and a folder have no content, and files read whole must fit into memory; all
of these are refused before the first byte is read. Compressed data is counted as it is unpacked. Every refusal is an
``OSError`` whose ``strerror`` is worded to follow "cannot be read". Every defect of JSON raises the same kind of
error; :data:`BROKEN_ARCHIVE` are the exceptions, besides ``OSError``, that reading a damaged archive raises.
"""

from __future__ import annotations

import errno
import gzip
import hashlib
import io
import json
import os
import re
import stat
import tarfile
import tokenize
import zipfile
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import IO, Any, Literal, TypeVar, cast

from costmodel.base.errors import InputError

Kind = Literal["settings", "configuration", "record", "table", "log", "trace", "arrays", "model", "library"]

_MIB = 1 << 20
# Largest unpacked file of each kind, in bytes, for which reading and processing stay below 20 s of a processor and 2
# GiB (docs/robustness.md): YAML takes 15 us a byte, JSON that is kept whole some 10 bytes of memory per byte, a trace
# of 512 MiB has some 1.5 million events.
MOST_BYTES: dict[Kind, int] = {
    "settings": 1 * _MIB,  # YAML of machines, clusters, networks, embedding tables, prices
    "configuration": 8 * _MIB,  # a model's config.json, some of which name 22,000 classes; a script
    "record": 64 * _MIB,  # JSON that is read whole: manifests, plans, host overheads, fitted models, summaries
    "table": 128 * _MIB,  # measured kernels, tuning records, results of sweeps: lines that are kept as records
    "log": 64 * _MIB,  # output of a benchmark
    "trace": 512 * _MIB,  # events one after another
    "arrays": 1024 * _MIB,  # samples and outputs; an archive's members together
    "model": 2048 * _MIB,  # limit of protobuf
    "library": 2048 * _MIB,
}
# Limits on the number of parts of a file that is read part by part, since small parts could be many more in as many
# bytes: an event of a trace takes 8 us and 0.6 KB, a row of a table of measured operators 150 us, fit included.
MOST_PARTS: dict[Kind, tuple[int, str]] = {"trace": (1_500_000, "events"), "table": (100_000, "rows")}
_Part = TypeVar("_Part")


@contextmanager
def open_file(path: Path | str, kind: Kind) -> Iterator[io.BufferedReader]:
    """Open the regular file ``path`` for reading; ``OSError`` for anything else and for more than
    :data:`MOST_BYTES`.
    """
    stream = os.fdopen(_descriptor(path), "rb")
    with stream:
        _check(stream.fileno(), kind)
        yield stream


@contextmanager
def open_unpacked(path: Path | str, kind: Kind) -> Iterator[io.BufferedReader]:
    """Open a file like :func:`open_file`, unpacking gzip; reading raises ``OSError`` if the unpacked data is
    too large.
    """
    with open_file(path, kind) as stream:
        packed = stream.read(2) == b"\x1f\x8b"
        stream.seek(0)
        if not packed:
            yield stream
            return
        with gzip.open(stream) as unpacked:
            yield io.BufferedReader(Bounded(cast(IO[bytes], unpacked), MOST_BYTES[kind]), _MIB)


def read_bytes(path: Path | str, kind: Kind) -> bytes:
    """Return the whole content, unpacked if gzipped."""
    with open_unpacked(path, kind) as stream:
        return stream.read()


def read_text(path: Path | str, kind: Kind, errors: str = "strict") -> str:
    """Return the whole content as UTF-8 text, unpacked if gzipped."""
    return read_bytes(path, kind).decode("utf-8", errors=errors)


@contextmanager
def open_arrays(path: Path | str) -> Iterator[Any]:
    """Open ``path`` with ``numpy.load``, without pickled objects: an archive of arrays, or one array."""
    import numpy as np

    with open_file(path, "arrays") as stream:
        if zipfile.is_zipfile(stream):
            stream.seek(0)
            with zipfile.ZipFile(stream) as archive:
                unpacked = sum(each.file_size for each in archive.infolist())
            if unpacked > MOST_BYTES["arrays"]:
                raise too_large(f"its {unpacked / _MIB:,.0f} MiB unpacked are more than", MOST_BYTES["arrays"])
        stream.seek(0)
        yield np.load(stream, allow_pickle=False)


@contextmanager
def open_tar(path: Path | str) -> Iterator[tarfile.TarFile]:
    """Open the archive of traces ``path``, compressed or not; its unpacked size is limited."""
    most = 4 * MOST_BYTES["trace"]  # listing the members reads through all of them
    with open_file(path, "trace") as stream, tarfile.open(fileobj=stream) as archive:
        total = 0
        for member in archive:
            total += member.size
            if total > most:
                raise too_large(f"its {total / _MIB:,.0f} MiB unpacked are more than", most)
        yield archive


def check_file(path: Path | str, kind: Kind) -> None:
    """Raise ``OSError`` for a file that :func:`open_file` refuses; for readers of other libraries, which open files
    themselves.
    """
    descriptor = _descriptor(path)
    try:
        _check(descriptor, kind)
    finally:
        os.close(descriptor)


def find_refusal(path: Path | str, kind: Kind, missing: str = "no such file") -> str | None:
    """Reason why :func:`open_file` refuses ``path``, worded to follow its name, or ``None`` if it is accepted.
    ``missing``: the reason for a missing file.
    """
    try:
        check_file(path, kind)
    except FileNotFoundError:
        return missing
    except OSError as error:
        return f"cannot be read ({error.strerror or error})"
    return None


def count_parts(parts: Iterable[_Part], kind: Kind) -> Iterator[_Part]:
    """Yield the ``parts`` of a file; raise ``OSError`` at the first beyond :data:`MOST_PARTS`."""
    most, name = MOST_PARTS[kind]
    for number, part in enumerate(parts):
        if number >= most:
            raise OSError(errno.EFBIG, f"it has more than the {most:,} {name} that such a file may have")
        yield part


class Bounded(io.RawIOBase):
    """Stream that raises ``OSError`` after ``most`` bytes."""

    def __init__(self, stream: IO[bytes], most: int) -> None:
        self._stream, self._most, self._read = stream, most, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        self._read += len(data)
        if self._read > self._most:
            raise too_large("unpacks to more than", self._most)
        buffer[: len(data)] = data
        return len(data)


def too_large(what: str, most: int) -> OSError:
    """``OSError`` for data larger than ``most`` bytes, described by ``what``."""
    return OSError(errno.EFBIG, f"{what} the {most / _MIB:,.0f} MiB that such a file may have")


def _descriptor(path: Path | str) -> int:
    # Without O_NONBLOCK opening a pipe waits for a writer.
    return os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)


def _check(descriptor: int, kind: Kind) -> None:
    found = os.fstat(descriptor)
    if stat.S_ISDIR(found.st_mode):
        raise OSError(errno.EISDIR, "it is a folder")
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe or a device, not a file")
    if found.st_size > MOST_BYTES[kind]:
        raise too_large(f"its {found.st_size / _MIB:,.0f} MiB are more than", MOST_BYTES[kind])


_BLOCK = 1 << 20


def content_digest(path: Path) -> str:
    """SHA-256 of the content of ``path``; for a ``.gz`` file, of the decompressed content, since compressors differ.

    Raises :class:`InputError` if the file cannot be read or is truncated.
    """
    try:
        state = path.stat()
        return _digest(path, state.st_size, state.st_mtime_ns)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error}); copy or fetch it again") from None


@lru_cache(maxsize=1024)
def _digest(path: Path, size: int, changed: int) -> str:
    found = hashlib.sha256()
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            found.update(block)
    return found.hexdigest()


# Such a number exceeds the range of floats, and converting it raises an unexpected error.
_ENDLESS_NUMBER = re.compile(r"\d{301}")

# Exceptions raised while parsing a malformed document: missing names, wrong types, invalid numbers.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def decoded(text: str | bytes, *, once: bool = False) -> Any:
    """Parse ``text`` as JSON. Raises ``ValueError`` for invalid JSON, also if it is nested deeper than Python allows,
    is not UTF-8, or has a number of more than 300 digits. ``once``: also for a key that occurs twice in an object.
    """
    told = text.decode("utf-8") if isinstance(text, bytes) else text
    if _ENDLESS_NUMBER.search(told):
        raise ValueError("a number of more than 300 digits")
    try:
        return json.loads(told, object_pairs_hook=_each_once if once else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} twice")
    return found


# For ``.gz`` and ``.npz`` files; the members of the latter describe their arrays by Python literals. ``RuntimeError``
# and ``NotImplementedError``: members that are encrypted or use an unsupported compression.
BROKEN_ARCHIVE = (
    EOFError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
