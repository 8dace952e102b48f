"""Result tables that survive an interruption: a CSV file flushed row by row, and a JSON file with its provenance."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.folder_lock import lock_folder
from costmodel.base.foreign_files import read_text
from costmodel.base.plain_json import decoded
from costmodel.base.whole_file import append_whole, remove_partials, write_whole


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
