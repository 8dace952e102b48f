"""Tables of results that survive an interruption: one CSV, a row flushed at a time, and a JSON file of its origin."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.plain_json import decoded


class Table:
    """Appends rows to ``directory/name.csv``; ``directory/name.json`` says where they come from.

    Without ``resume`` an existing table is refused, with it its rows stay (a last line that was cut off is dropped) and
    ``rows`` holds them. ``InputError`` for a table of another device or of other columns, ``OutputError`` if it cannot
    be written.
    """

    def __init__(
        self, directory: Path, name: str, columns: Sequence[str], provenance: Mapping[str, Any], resume: bool
    ) -> None:
        self.path, self.columns = directory / f"{name}.csv", tuple(columns)
        self.rows: list[dict[str, str]] = []
        self._sidecar = directory / f"{name}.json"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if self.path.exists():
                self._continue(provenance, resume)
            else:
                self._begin(provenance)
            self._stream = self.path.open("a", newline="", encoding="utf-8")
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written ({error.strerror}); give another folder") from None

    def add(self, **row: Any) -> None:
        """One row, at once on disk; absent columns stay empty."""
        line = io.StringIO()
        csv.DictWriter(line, self.columns, restval="", lineterminator="\n").writerow(row)
        try:
            self._stream.write(line.getvalue())
            self._stream.flush()
        except OSError as error:
            raise OutputError(f"{self.path}: cannot be written ({error.strerror}); free space and --resume") from None

    def __enter__(self) -> Table:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stream.close()

    def _begin(self, provenance: Mapping[str, Any]) -> None:
        self._sidecar.write_text(json.dumps({"runs": [dict(provenance)]}, indent=2) + "\n", encoding="utf-8")
        self.path.write_text(",".join(self.columns) + "\n", encoding="utf-8")

    def _continue(self, provenance: Mapping[str, Any], resume: bool) -> None:
        if not resume:
            raise InputError(f"{self.path}: exists; add --resume to continue it, or give another folder with -o")
        text = self.path.read_text(encoding="utf-8")
        whole = text[: text.rfind("\n") + 1]
        reader = csv.DictReader(io.StringIO(whole))
        if tuple(reader.fieldnames or ()) != self.columns:
            raise InputError(f"{self.path}: not a table of this suite; give another folder with -o")
        self.rows = list(reader)
        self._note_run(provenance)
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")

    def _note_run(self, provenance: Mapping[str, Any]) -> None:
        try:
            origin = decoded(self._sidecar.read_text(encoding="utf-8"))
            device = origin["runs"][0]["device"]
        except (OSError, ValueError, KeyError, IndexError, TypeError):
            raise InputError(
                f"{self._sidecar}: missing or damaged, so that {self.path} cannot be continued; "
                "name another folder with -o"
            ) from None
        if device != provenance["device"]:
            raise InputError(f"{self.path}: was measured on {device}, this is {provenance['device']}; use another -o")
        origin["runs"].append(dict(provenance))
        self._sidecar.write_text(json.dumps(origin, indent=2) + "\n", encoding="utf-8")
