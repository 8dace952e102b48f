"""Run of a suite: its time budget, its progress lines, and its table of results, which survives an interruption.

A table is a CSV file flushed row by row, and a JSON file with its provenance.
"""

from __future__ import annotations

import csv
import io
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from costmodel.base.errors import InputError, OutputError, Say
from costmodel.base.input_files import decoded, read_text
from costmodel.base.output_files import append_whole, lock_folder, remove_partials, write_whole

_REPORT_SECONDS = 10.0


class TimeBudget:
    """Budget of ``minutes`` from construction; ``InputError`` unless above zero. ``clock`` (seconds) is replaced in
    tests.
    """

    def __init__(self, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 < minutes < math.inf:
            raise InputError(f"--minutes {minutes}: must be above zero")
        self._clock = clock
        self._start = clock()
        self.seconds = 60 * minutes

    def restart(self) -> None:
        """Restart the budget, to exclude the loading of libraries and waiting for other ranks."""
        self._start = self._clock()

    @property
    def elapsed(self) -> float:
        """Seconds since the start."""
        return self._clock() - self._start

    def left(self, needed: float = 0.0) -> bool:
        """True if ``needed`` more seconds fit."""
        return self.elapsed + needed < self.seconds


class SuiteProgress:
    """Progress reporter: at most every ten seconds, work done and time left (or the estimate for the rest, if less)."""

    def __init__(self, budget: TimeBudget, report: Say, total: int | None = None) -> None:
        self._budget, self._report, self._total = budget, report, total
        self._last = 0.0
        self.done = 0

    def step(self, what: str) -> None:
        """Count one finished piece of work and report if due."""
        self.done += 1
        if self._budget.elapsed - self._last < _REPORT_SECONDS:
            return
        self._last = self._budget.elapsed
        left = max(self._budget.seconds - self._budget.elapsed, 0.0)
        if self._total:
            left = min(left, self._budget.elapsed / self.done * (self._total - self.done))
        of = f" of {self._total}" if self._total else ""
        self._report(f"{self.done}{of} done, {self._budget.elapsed:.0f} s, about {left:.0f} s left; last: {what}")


class Table:
    """Table that appends rows to ``directory/name.csv``; ``directory/name.json`` holds their provenance.

    Without ``resume`` an existing table is refused; with it, its rows are kept in ``rows`` (a truncated last line is
    dropped). ``InputError`` for a table of another device or of other columns, ``OutputError`` if it cannot be written,
    or while another process writes it.
    """

    def __init__(
        self, directory: Path, name: str, columns: Sequence[str], provenance: Mapping[str, Any], resume: bool
    ) -> None:
        self.path, self.columns = directory / f"{name}.csv", tuple(columns)
        self.rows: list[dict[str, str]] = []
        self._sidecar = directory / f"{name}.json"
        self._lock = lock_folder(directory, f"{name}.csv", f".{name}.lock")
        try:
            remove_partials(directory)
            if self.path.exists():
                self._continue(provenance, resume)
            else:
                self._begin(provenance)
            self._stream = self.path.open("ab", buffering=0)
        except OSError as error:
            self._lock.close()
            raise OutputError(f"{self.path}: cannot be written ({error.strerror}); give another folder") from None
        except BaseException:
            self._lock.close()
            raise

    def add(self, **row: Any) -> None:
        """Append one row, flushed at once; absent columns stay empty."""
        line = io.StringIO()
        csv.DictWriter(line, self.columns, restval="", lineterminator="\n").writerow(row)
        try:
            append_whole(self._stream, line.getvalue().encode())
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written ({error.strerror}); free space and --resume") from None

    def __enter__(self) -> Table:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()
        self._lock.close()

    def _begin(self, provenance: Mapping[str, Any]) -> None:
        write_whole(self._sidecar, json.dumps({"runs": [dict(provenance)]}, indent=2) + "\n")
        write_whole(self.path, ",".join(self.columns) + "\n")

    def _continue(self, provenance: Mapping[str, Any], resume: bool) -> None:
        if not resume:
            raise InputError(f"{self.path}: exists; add --resume to continue it, or give another folder with -o")
        text = read_text(self.path, "table")
        whole = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(io.StringIO(whole))
        if tuple(reader.fieldnames or ()) != self.columns:
            raise InputError(f"{self.path}: not a table of this suite; give another folder with -o")
        self.rows = list(reader)
        self._note_run(provenance)
        if whole != text:
            write_whole(self.path, whole)

    def _note_run(self, provenance: Mapping[str, Any]) -> None:
        try:
            origin = decoded(read_text(self._sidecar, "record"))
            device = origin["runs"][0]["device"]
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            raise InputError(
                f"{self._sidecar}: missing or damaged, so that {self.path} cannot be continued; "
                "name another folder with -o"
            ) from None
        if device != provenance["device"]:
            raise InputError(f"{self.path}: was measured on {device}, this is {provenance['device']}; use another -o")
        origin["runs"].append(dict(provenance))
        write_whole(self._sidecar, json.dumps(origin, indent=2) + "\n")
