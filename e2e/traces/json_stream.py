"""Streaming reader of large JSON files: plain, ``.gz``, or inside a ``.tar``/``.tar.gz``/``.tgz``.

A trace is one object with a few scalars and one very long array. It is decoded element by element with the decoder of
the standard library on a sliding buffer, so that memory is bounded by the largest element, not by the file.
"""

from __future__ import annotations

import gzip
import io
import json
import re
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError
from costmodel.base.input_files import MOST_BYTES, Bounded, count_parts, open_tar, open_unpacked

_CHUNK = 1 << 20
# Limit of memory: an element of a trace is a few kilobytes; something larger is not a trace.
_LARGEST_ELEMENT = 1 << 28
_LITERALS = ("true", "false", "null", "NaN", "-Infinity", "Infinity")
_LONGEST_LITERAL = max(map(len, _LITERALS))
_NUMBER_END = re.compile(r"[-+.eE]{0,2}")
_ARCHIVES = (".tar", ".tar.gz", ".tgz")
# Execution traces that Chakra's converter wrote.
_PROTOBUF = (".et", ".et.gz")
_SPACE = " \t\r\n"


def archive_members(path: Path | str) -> tuple[str, ...]:
    """Return the JSON files inside the tar archive ``path``, in archive order.

    Raises :class:`InputError` if unreadable.
    """
    with _reading(Path(path)), open_tar(path) as archive:
        return tuple(info.name for info in archive if info.isfile() and info.name.endswith(".json"))


def read_members(path: Path | str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) pairs of the object in ``path``; an array gives one pair per element.

    The path of a file in an archive continues the archive's: ``traces.tar.gz/rank_0.json``; for an archive with a
    single JSON file its own path suffices. Numbers of more than 16 characters become ``Decimal``, because a float
    cannot represent the fraction of a time in microseconds since 1970. Raises :class:`InputError` naming the file.
    """
    if str(path).endswith(_PROTOBUF):
        raise InputError(
            f"{path}: a trace in protobuf, as Chakra's converter writes it, is not read; give the JSON that PyTorch "
            "writes (ExecutionTraceObserver), from which it was converted"
        )
    with (
        _reading(Path(path)),
        _opened(Path(path)) as stream,
        io.TextIOWrapper(stream, encoding="utf-8", errors="replace") as text,
    ):
        yield from count_parts(_Decoder(text, str(path)).members(), "trace")


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert errors of reading to a one-line :class:`InputError`."""
    try:
        yield
    except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
        raise InputError(f"{path}: truncated or damaged archive ({error}); record or download it again") from None
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror or error}); check its path and permissions"
        ) from None


@contextmanager
def _opened(path: Path) -> Iterator[io.BufferedReader]:
    archive, member = _split(path)
    if archive is None:
        with open_unpacked(path, "trace") as stream:
            yield stream
        return
    with open_tar(archive) as opened:
        inside = opened.extractfile(_member(opened, archive, member))
        if inside is None:
            raise InputError(f"{path}: not a file inside the archive {archive}; name one that it holds")
        with inside:
            yield io.BufferedReader(Bounded(inside, MOST_BYTES["trace"]))


def _split(path: Path) -> tuple[Path | None, str]:
    """Split ``path`` into the archive that it is or leads into (``None``: no archive), and the rest."""
    for parent in (path, *path.parents):
        if parent.name.endswith(_ARCHIVES) and parent.is_file():
            return parent, path.relative_to(parent).as_posix() if parent != path else ""
    return None, ""


def _member(archive: tarfile.TarFile, path: Path, member: str) -> str:
    names = [info.name for info in archive if info.isfile() and info.name.endswith(".json")]
    if member:
        if member not in names:
            raise InputError(f"{path}: holds no {member}; it holds {', '.join(names) or 'no .json file'}")
        return member
    if len(names) != 1:
        found = f"{len(names)} JSON files ({', '.join(names[:8])})" if names else "no .json file"
        raise InputError(f"{path}: holds {found}; name one of them, as {path.name}/MEMBER.json")
    return names[0]


def _number(text: str) -> float | Decimal:
    return float(text) if len(text) <= 16 else Decimal(text)


def _cut(rest: str, message: str) -> bool:
    """True if ``rest``, where a decoder stopped, may be the beginning of a value truncated by the end of the file."""
    rest = rest.strip()
    begun = any(literal.startswith(rest) for literal in _LITERALS) or _NUMBER_END.fullmatch(rest) is not None
    return begun or message.startswith(("Unterminated", "Invalid \\"))


class _Decoder:
    """Decoder of the standard library on a sliding buffer over a text stream."""

    def __init__(self, stream: io.TextIOWrapper, source: str) -> None:
        self._stream = stream
        self._source = source
        self._decode = json.JSONDecoder(strict=False, parse_float=_number).raw_decode
        self._buffer = ""
        self._place = 0
        self._before = 0  # number of characters dropped from the buffer

    def members(self) -> Iterator[tuple[str, Any]]:
        if self._peek() != "{":
            raise InputError(
                f"{self._source}: not a trace; a trace is one JSON object, this begins otherwise; "
                "give a file of torch.profiler or ExecutionTraceObserver"
            )
        self._place += 1
        while self._peek() != "}":
            key = self._value()
            self._expect(":")
            if not isinstance(key, str):
                raise self._broken("a key is not a text")
            if self._peek() == "[":
                self._place += 1
                for item in self._items():
                    yield key, item
            else:
                yield key, self._value()
            self._separator("}")

    def _items(self) -> Iterator[Any]:
        while self._peek() != "]":
            yield self._value()
            self._separator("]")
        self._place += 1

    def _separator(self, closing: str) -> None:
        if self._peek() == ",":
            self._place += 1
            self._peek()
        elif self._peek() != closing:
            raise self._broken(f"expected a comma or {closing!r}")

    def _expect(self, sign: str) -> None:
        if self._peek() != sign:
            raise self._broken(f"expected {sign!r}")
        self._place += 1

    def _peek(self) -> str:
        """Return the next non-space character."""
        while True:
            while self._place < len(self._buffer):
                if self._buffer[self._place] not in _SPACE:
                    return self._buffer[self._place]
                self._place += 1
            if not self._more(_CHUNK):
                raise self._truncated()

    def _value(self) -> Any:
        """Return the next whole value.

        Decoding is retried with twice the text while it does not end inside the buffer.
        """
        self._peek()
        size = _CHUNK
        stopped: tuple[int, str] | None = None  # not the exception, whose traceback would keep old buffers alive
        while True:
            try:
                value, end = self._decode(self._buffer, self._place)
                if end < len(self._buffer):  # a number at the end of the buffer may continue in the file
                    self._place = end
                    return value
            except json.JSONDecodeError as error:
                # Position of the error: at the end of the buffer (read more), or before (not JSON).
                at_end = error.pos >= len(self._buffer) - _LONGEST_LITERAL or error.msg.startswith("Unterminated")
                if not at_end or len(self._buffer) - self._place > _LARGEST_ELEMENT:
                    raise self._broken(error.msg) from None
                stopped = error.pos, error.msg
            except RecursionError:
                raise self._broken("nested too deeply") from None
            except ValueError as error:  # a number of thousands of digits
                raise self._broken(str(error)) from None
            if not self._more(size):
                if stopped is None or _cut(self._buffer[stopped[0] :], stopped[1]):
                    raise self._truncated()
                raise self._broken(stopped[1])
            size *= 2

    def _more(self, size: int) -> bool:
        text = self._stream.read(size)
        if not text:
            return False
        self._before += self._place
        self._buffer = self._buffer[self._place :] + text
        self._place = 0
        return True

    def _truncated(self) -> InputError:
        return InputError(f"{self._source}: ends in the middle of the trace (truncated); record or download it again")

    def _broken(self, reason: str) -> InputError:
        return InputError(
            f"{self._source}: not valid JSON near character {self._before + self._place} ({reason}); "
            "record or download it again"
        )
