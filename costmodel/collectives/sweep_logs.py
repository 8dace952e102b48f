"""Readers of measured collectives: logs of nccl-tests (``*_perf``) and tables of ``costmodel measure``.

nccl-tests: the header names the columns (old: ``size count type redop time algbw busbw error``, new: with ``root`` and
``#wrong``; out of place, whose times count, then in place); ``# Rank`` lines give ranks and hosts. A file may hold
several runs; line prefixes of ``mpirun --tag-output`` and ``srun -l`` are removed. Files that nccl-tests writes with
``-J`` (JSON) are read too.
"""

from __future__ import annotations

import csv
import dataclasses
import gzip
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError
from costmodel.base.input_files import MALFORMED, decoded, read_text
from costmodel.base.units import whole_number
from costmodel.operators.any_operator import from_record
from costmodel.operators.collective_transfer import COLLECTIVE_KINDS, CollectiveKind, CollectiveTransfer

_STARTING = re.compile(r"#\s*Collective test starting:\s*(\S+)")
_RUN = re.compile(r"#\s*nThread\s+\d+\s+nGpus\s+\d+")
_DEVICE = re.compile(r"#\s*Rank\s+(\d+)\s+(?:Group\s+(\d+)\s)?.*?\bon\s+(\S+)\s+device")
_LIBRARY = re.compile(r"nccl-library=(\d+)")
_VERSION = re.compile(r"NCCL version (\d+\.\d+(?:\.\d+)?)")
_FIRST_COLUMNS = ("size", "count", "type")
_BEFORE_LINES = re.compile(r"^\s*(?:\[\d+,\d+\]<std(?:out|err)>:|\d+:)")  # [1,0]<stdout>: of mpirun, 0: of srun

_OUT_OF_BOUNDS = re.compile(r"#\s*Out of bounds values\s*:\s*(\d+)")
# Names of nccl-tests' element types, and their bytes; one-byte types have had several names.
_TYPE_BYTES = {
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "uint32": 4,
    "int64": 8,
    "uint64": 8,
    "half": 2,
    "float": 4,
    "double": 8,
}
_TYPE_BYTES |= {
    "bfloat16": 2,
    "f8e4m3": 1,
    "f8e5m2": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "float8_e4m3": 1,
    "float8_e5m2": 1,
}
_MOST_GPUS_OF_PROCESS = 1024
_WRONG = "nccl-tests found wrong results in this run; repair the machine and run it again"


@dataclass(frozen=True)
class Given:
    """Values given by the user for facts that a log lacks."""

    kind: str | None = None
    ranks: int | None = None
    nodes: int | None = None


@dataclass
class _Run:
    """State of the run whose rows come next, as parsed so far."""

    kind: str | None = None
    nccl: str = ""
    ranks: dict[int, str] = field(default_factory=dict)
    groups: set[int] = field(default_factory=set)
    columns: tuple[str, ...] = ()

    def begin(self) -> None:
        """Reset ranks and columns at the start of a new run."""
        self.ranks, self.groups, self.columns = {}, set(), ()


def read_log(path: Path, given: Given = Given()) -> list[CollectiveRow]:
    """Read the rows of ``path``; the ``InputError`` names a missing fact and the option that adds it."""
    try:
        text = read_text(path, "log", errors="replace")
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its path and permissions") from None
    rows = _rows_of_json(text, given, path) if text.lstrip().startswith("{") else _rows_of_lines(text, given, path)
    if not rows:
        raise InputError(f"{path}: no measured sizes; give the output of nccl-tests (all_reduce_perf ...)")
    return rows


def _rows_of_lines(text: str, given: Given, path: Path) -> list[CollectiveRow]:
    run = _Run(kind=given.kind)
    if given.kind is None and transfer_kind(path.stem.split(".")[0]):
        run.kind = path.stem.split(".")[0]
    rows = []
    for number, whole in enumerate(text.splitlines(), 1):
        line = _BEFORE_LINES.sub("", whole)
        if (match := _OUT_OF_BOUNDS.search(line)) and int(match[1]):
            raise InputError(f"{path}:{number}: {_WRONG}")
        if not _note(line, run, given, f"{path}:{number}"):
            row = _row(line, run, given, f"{path}:{number}")
            rows += [] if row is None else [row]
    return rows


def _rows_of_json(text: str, given: Given, path: Path) -> list[CollectiveRow]:
    """Read the JSON of ``-J``: ``args``, ``nccl_version``, ``config`` (``devices``: one per process), ``results``."""
    try:
        record = decoded(text)
        config, devices = record["config"], record["config"]["devices"]
        processes = int(config["nthreads"]) * int(config["ngpus"])
        if not 0 < processes <= _MOST_GPUS_OF_PROCESS:
            raise ValueError(f"{processes} GPUs of one process")
        hosts = [str(each["hostname"]) for each in devices for _ in range(processes)]
        run = _Run(
            _agreed(Path(record["args"][0]).name, given, str(path)),
            _version_of(int(record["nccl_version"])),
            dict(enumerate(hosts)),
            {int(each["group"]) for each in devices},
        )
        rows = [_json_row(each, run, given, f"{path}: size {each['size']}") for each in record["results"]]
    except MALFORMED as error:
        raise InputError(f"{path}: not the JSON that nccl-tests writes with -J ({error!r}); run it again") from None
    return [row for row in rows if row is not None]


def _json_row(record: Mapping[str, Any], run: _Run, given: Given, where: str) -> CollectiveRow | None:
    timed = record["out_of_place"]
    if timed["nwrong"] and float(timed["nwrong"]) > 0:
        raise InputError(f"{where}: {_WRONG}")
    if "time" not in timed:
        raise InputError(f"{where}: holds CPU times; run nccl-tests without -C")
    if "count" in record and "type" in record:
        _check_elements(float(record["size"]), str(record["count"]), str(record["type"]), where)
    return _made(str(run.kind), float(record["size"]), float(timed["time"]) * 1e-6, run, given, where)


def _agreed(told: str, given: Given, where: str) -> str:
    """Name of the collective in a log, which the user may give too; ``InputError`` if they differ."""
    if given.kind is not None and transfer_kind(told) not in (None, transfer_kind(given.kind)):
        raise InputError(f"{where}: {told} ran, and --collective says {given.kind}; leave --collective out")
    return given.kind or told


def _note(line: str, run: _Run, given: Given, where: str) -> bool:
    """Parse ``line`` as a fact about the run and record it; returns False if it is none."""
    if match := _STARTING.search(line):
        run.kind = _agreed(match[1], given, where)
        run.begin()
    elif _RUN.search(line):
        run.begin()
    elif match := _DEVICE.search(line):
        run.ranks[int(match[1])] = match[3]
        run.groups.add(int(match[2] or 0))
    elif match := _LIBRARY.search(line):
        run.nccl = _version_of(int(match[1]))
    elif match := _VERSION.search(line):
        run.nccl = match[1]
    elif line.lstrip().startswith("#"):
        words = tuple(line.replace("#wrong", "wrong").replace("#", " ").split())
        run.columns = words if words[:3] == _FIRST_COLUMNS else run.columns
    else:
        return False
    return True


def _version_of(code: int) -> str:
    """Text of NCCL_VERSION_CODE: 22703 is 2.27.3, 2708 (before 2.9) is 2.7.8."""
    large = 10000 if code >= 10000 else 1000
    return f"{code // large}.{code % large // 100}.{code % 100}"


def _row(line: str, run: _Run, given: Given, where: str) -> CollectiveRow | None:
    words = line.split()
    stamped = run.columns[-1:] == ("timestamp",)  # with -S: a date and a time after the last column
    columns = len(run.columns) + (1 if stamped else 0)
    if not run.columns or len(words) != columns or whole_number(words[0]) is None:
        return None
    size, seconds = float(words[0]), _time(words, run.columns, where)
    _check_elements(size, words[1], words[2], where)
    if run.kind is None:
        raise InputError(f"{where}: does not say which collective ran; give it with --collective all_reduce, or so")
    return _made(run.kind, size, seconds, run, given, where)


def _check_elements(size: float, count: str, kind: str, where: str) -> None:
    """Raise ``InputError`` unless nccl-tests' element count and type fit ``size`` bytes; an empty row has size 0."""
    if kind not in _TYPE_BYTES:
        raise InputError(
            f"{where}: element type {kind!r} is none of nccl-tests ({', '.join(_TYPE_BYTES)}); run it again"
        )
    elements = whole_number(count)
    # An all-gather reports the input of one rank.
    if elements is None or (size > 0 and not 0 < elements * _TYPE_BYTES[kind] <= size):
        raise InputError(f"{where}: {count} elements of {kind} are not {size:.0f} bytes; run it again")


def _time(words: Sequence[str], columns: Sequence[str], where: str) -> float:
    wrong = [words[place] for place, name in enumerate(columns) if name == "wrong"]
    if any(_number(word) > 0 for word in wrong):  # N/A without validation, 1e+06 for many
        raise InputError(f"{where}: {_WRONG}")
    if "cputime" in columns:
        raise InputError(f"{where}: holds CPU times; run nccl-tests without -C")
    try:
        return float(words[columns.index("time")]) * 1e-6
    except (ValueError, IndexError):
        raise InputError(
            f"{where}: no time in microseconds where the header has one; give the log as it was printed"
        ) from None


def _number(word: str) -> float:
    try:
        return float(word)
    except ValueError:
        return 0.0


def _made(name: str, size: float, seconds: float, run: _Run, given: Given, where: str) -> CollectiveRow | None:
    """Row of a measurement; ``None`` for sizes too small for the ranks, which nccl-tests reports as 0."""
    kind = transfer_kind(name)
    if kind is None:
        raise InputError(f"{where}: collective {name} is not modelled; known: {', '.join(COLLECTIVE_KINDS)}")
    if len(run.groups) > 1 and given.ranks is None:
        raise InputError(
            f"{where}: {len(run.groups)} groups ran at once (NCCL_TESTS_SPLIT) and shared links; measure one group, "
            "or give --ranks and --nodes of one"
        )
    ranks = given.ranks or len(run.ranks)
    if ranks < 2:
        raise InputError(f"{where}: does not say how many ranks ran; give --ranks N, and --nodes N if more than one")
    nodes = given.nodes or len(set(run.ranks.values())) or 1
    if nodes > ranks:
        raise InputError(f"{where}: {nodes} nodes and {ranks} ranks do not go together; give --ranks and --nodes")
    if not (math.isfinite(size) and math.isfinite(seconds)) or seconds < 0:
        raise InputError(f"{where}: {size:g} bytes in {seconds:g} s are no measurement; run it again")
    if size <= 0 or seconds <= 0:
        return None
    return CollectiveRow(_transfer(kind, size, ranks, nodes), seconds, run.nccl)


def _transfer(kind: CollectiveKind, size: float, ranks: int, nodes: int) -> CollectiveTransfer:
    """Transfer of a log row. ``sendrecv_perf`` sends around a ring: a message between two ranks, the slowest pair of
    which is on two nodes.
    """
    transfer = whole_buffer(kind, size, ranks, nodes)
    return dataclasses.replace(transfer, ranks=2, nodes=min(nodes, 2)) if kind == "send_recv" else transfer


KINDS: Mapping[str, CollectiveKind] = {
    "all_reduce": "all_reduce",
    "all_gather": "all_gather",
    "reduce_scatter": "reduce_scatter",
    "alltoall": "all_to_all",
    "all_to_all": "all_to_all",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "sendrecv": "send_recv",
    "send_recv": "send_recv",
}


@dataclass(frozen=True)
class CollectiveRow:
    """Measured time of ``transfer`` in seconds, with NCCL version ``nccl`` (empty: unknown)."""

    transfer: CollectiveTransfer
    seconds: float
    nccl: str = ""


def read_own_table(path: Path) -> list[CollectiveRow]:
    """Read the rows of a table of ``python -m costmodel measure --suite collectives``, plain or ``.gz``; rows with an
    error are skipped. ``InputError`` for another file.
    """
    return read_sweep(_own_rows, path)


def _own_rows(path: Path) -> Iterator[CollectiveRow]:
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", newline="", encoding="utf-8") as stream:
        for row in csv.DictReader(stream):
            if not row["error"]:
                transfer = from_record(decoded(row["operator"]))
                if not isinstance(transfer, CollectiveTransfer):
                    raise ValueError(f"a {type(transfer).__name__}")
                yield CollectiveRow(transfer, float(row["median_s"]), row["nccl"])


def transfer_kind(name: str) -> CollectiveKind | None:
    """Kind that nccl-tests or NCCL call ``name``, or ``None`` if unknown."""
    words = re.sub(r"[\s\-]+", "_", name.strip().lower()).removesuffix("_perf")
    return KINDS.get(words) or KINDS.get(words.replace("_", "")) or _JOINED.get(words.replace("_", ""))


_JOINED: Mapping[str, CollectiveKind] = {name.replace("_", ""): kind for name, kind in KINDS.items()}


def whole_buffer(kind: CollectiveKind, size_bytes: float, ranks: int, nodes: int = 1) -> CollectiveTransfer:
    """Transfer that nccl-tests reports with ``size_bytes``, the larger of a rank's two buffers."""
    size = size_bytes / ranks if kind == "all_gather" else size_bytes
    return CollectiveTransfer(kind, size, ranks, nodes)


SweepReader = Callable[[Path], Iterator[CollectiveRow]]


def read_sweep(read: SweepReader, path: Path) -> list[CollectiveRow]:
    try:
        rows = list(read(path))
    except (OSError, EOFError) as error:
        raise InputError(f"{path}: cannot be read ({error}); measure or fetch it again") from None
    except MALFORMED as error:
        raise InputError(f"{path}: not a sweep of collectives ({error!r}); measure or fetch it again") from None
    if not rows or not all(each.seconds > 0 for each in rows):
        raise InputError(f"{path}: no rows, or times that are not above zero; measure or fetch it again")
    return rows
