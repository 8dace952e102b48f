"""Results of a sweep on disk: one line of JSON each, written as they come, never computed twice.

The key of a result (:func:`e2e.parallelism.capture_cache.digest`) covers the request, the cell, the program's own files
and the versions of captured libraries: after any change of these a cell is computed anew.
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
    """Result of one cell. Times in seconds, memory in bytes; ``None`` if ``status`` says that there is no step."""

    gpu: str
    gpus: int
    nodes: int
    # The way that was built, recomputation included, as `--parallel` takes it.
    parallel: str
    # `failed` (error of the program, lost worker) is not stored: the next run tries again
    status: CellStatus
    # Reason why there is no step, in words.
    reason: str = ""
    iteration_seconds: float | None = None
    interval_seconds: tuple[float, float] | None = None
    samples: int | None = None
    samples_per_second: float | None = None
    tokens_per_second_per_gpu: float | None = None
    # Communication that no kernel overlaps, on the rank that computes longest.
    exposed_seconds: float | None = None
    # Waits of that rank for its neighbours in a pipeline.
    bubble_seconds: float | None = None
    peak_memory_bytes: int | None = None
    memory_capacity_bytes: int | None = None
    mfu: float | None = None
    # The cell's batch size, recipe and precision, if different from the request's.
    batch_size: int | None = None
    recipe: str | None = None
    precision: str | None = None

    @property
    def way(self) -> str:
        """Way as given on the command line.

        ``parallel``, and the values in which this row differs from others of the sweep.
        """
        more = (("--batch-size", self.batch_size), ("--recipe", self.recipe), ("--precision", self.precision))
        return " ".join([self.parallel, *(f"{option} {value}" for option, value in more if value is not None)])


class ResultFile:
    """File ``DIRECTORY/results.jsonl``. Raises ``OutputError`` if it cannot be written."""

    def __init__(self, directory: Path) -> None:
        self.path = directory / "results.jsonl"
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise OutputError(
                f"{directory}: cannot be made: {error.strerror}; choose another folder with -o"
            ) from error
        self._ends_line = True  # False if an editor, or an interrupted run, left the last line without a newline
        self._rows = self._read()

    def get(self, key: str) -> SweepRow | None:
        """Return the result of an earlier run, or ``None``."""
        return self._rows.get(key)

    def add(self, key: str, row: SweepRow) -> None:
        """Store a result; it is on disk when this returns."""
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
                    self._cut_last_line(lines)  # the run was interrupted while writing
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
