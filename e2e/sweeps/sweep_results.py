"""Results of a sweep on disk: one line of JSON each, written as they come, never computed twice.

The key of a result (:func:`e2e.parallelism.capture_cache.digest`) covers the request, the cell, the program's
own files and the versions of what is captured: after any change of these a cell is computed anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from costmodel.base.errors import InputError, OutputError
from costmodel.base.foreign_files import read_text
from costmodel.base.plain_json import MALFORMED, decoded
from costmodel.base.whole_file import append_whole, write_whole

CellStatus = Literal["ok", "may not fit", "does not fit", "not possible", "failed"]


@dataclass(frozen=True)
class SweepRow:
    """One cell. Times in seconds, memory in bytes; ``None`` where ``status`` says that there is no step.

    ``parallel``: what was built, recomputation included, as ``--parallel`` takes it; ``reason``: in words, why there is
    no step. What ``failed`` (an error of the program, a worker that died) is not kept: the next run tries it again.
    ``batch_size``, ``recipe`` and ``precision``: of the cell, where it has others than the request.
    ``exposed_seconds``: communication that no kernel of the rank that computes longest overlaps; ``bubble_seconds``:
    its waits for neighbours of a pipeline.
    """

    gpu: str
    gpus: int
    nodes: int
    parallel: str
    status: CellStatus
    reason: str = ""
    iteration_seconds: float | None = None
    interval_seconds: tuple[float, float] | None = None
    samples: int | None = None
    samples_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    exposed_seconds: float | None = None
    bubble_seconds: float | None = None
    peak_memory_bytes: int | None = None
    memory_capacity_bytes: int | None = None
    mfu: float | None = None
    batch_size: int | None = None
    recipe: str | None = None
    precision: str | None = None

    @property
    def way(self) -> str:
        """As it is asked for: ``parallel``, with what of this row differs from others in the sweep."""
        more = (("--batch-size", self.batch_size), ("--recipe", self.recipe), ("--precision", self.precision))
        return " ".join([self.parallel, *(f"{option} {value}" for option, value in more if value is not None)])


class ResultFile:
    """``DIRECTORY/results.jsonl``. ``OutputError`` where it cannot be written."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "results.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"{directory}: cannot be made: {error.strerror}; choose another folder with -o"
            ) from error
        self._ends_line = True  # else an editor, or a run that was stopped, left the last line open
        self._rows = self._read()

    def get(self, key: str) -> SweepRow | None:
        """The result of an earlier run."""
        return self._rows.get(key)

    def add(self, key: str, row: SweepRow) -> None:
        """Keeps a result; it is on disk when this returns."""
        self._rows[key] = row
        try:
            with self.path.open("ab", buffering=0) as file:
                line = ("" if self._ends_line else "\n") + json.dumps({"key": key, **asdict(row)}) + "\n"
                append_whole(file, line.encode())
        except OSError as error:
            raise OutputError(
                f"{self.path}: cannot be written: {error.strerror}; choose another place, or free some"
            ) from error
        self._ends_line = True

    def _read(self) -> dict[str, SweepRow]:
        if not self.path.exists():
            return {}
        try:
            text = read_text(self.path, "table")
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{self.path}: cannot be read: {error}; move the file away") from error
        rows, lines = {}, text.splitlines()
        for number, line in enumerate(lines, 1):
            try:
                record = decoded(line)
                key = record.pop("key")
                rows[key] = _row(record)
            except MALFORMED as error:
                if number == len(lines):
                    self._cut_last_line(lines)  # the run was stopped while it wrote
                    return rows
                raise InputError(f"{self.path}:{number}: is no result of a sweep; move the file away") from error
        self._ends_line = text.endswith("\n")
        return rows

    def _cut_last_line(self, lines: list[str]) -> None:
        try:
            write_whole(self.path, "".join(line + "\n" for line in lines[:-1]))
        except OSError as error:
            raise OutputError(
                f"{self.path}: cannot be written: {error.strerror}; choose another place, or free some"
            ) from error


def _row(record: Mapping[str, Any]) -> SweepRow:
    interval = record["interval_seconds"]
    return SweepRow(**{**record, "interval_seconds": None if interval is None else (interval[0], interval[1])})
