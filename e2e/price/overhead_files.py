"""JSON files of host overheads and of the profiler's cost; every error names the file."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.foreign_files import read_text
from costmodel.base.plain_json import MALFORMED, decoded
from costmodel.base.whole_file import write_whole
from e2e.price.overheads import KINDS, Inflation, Mean, OverheadPart, OverheadTable, Provenance, complete_table

_FORMAT = 1


def save_table(table: OverheadTable, path: Path) -> None:
    """Write ``table`` as JSON for :func:`load_table`; raise ``OutputError`` if it cannot be written."""
    document = {
        "format": _FORMAT,
        "name": table.name,
        "factor": table.factor,
        "level": table.level,
        "units": "seconds; [mean, samples, operator records inside, runtime records inside]",
        "sources": [asdict(source) for source in table.sources],
        "inflation": asdict(table.inflation) if table.inflation else None,
        "means": {kind: {name: _rounded(mean) for name, mean in sorted(table.means[kind].items())} for kind in KINDS},
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, _one_line_per_mean(document))
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place") from None


def load_table(path: Path) -> OverheadTable:
    """Read the table in ``path``; raise :class:`InputError` naming the file if it is missing or not such a table."""
    document = _read_json(path, "install the package again")
    try:
        if document["format"] != _FORMAT:
            raise ValueError(f"format {document['format']}")
        means: dict[OverheadPart, dict[str, Mean]] = {
            kind: {name: Mean(row[0], int(row[1]), row[2], row[3]) for name, row in document["means"][kind].items()}
            for kind in KINDS
        }
        sources = tuple(Provenance(**source) for source in document["sources"])
        inflation = Inflation(**document["inflation"]) if document["inflation"] else None
        # Tables of a single host, fitted before the factor was stored, have none.
        factor = float(document.get("factor", 1.0))
        if not factor >= 1.0:
            raise ValueError(f"factor {factor:g}, must be at least 1")
        level = float(document.get("level", 1.0))
        if not level > 0.0:
            raise ValueError(f"level {level:g}, must be above 0")
        return replace(complete_table(document["name"], means, sources, inflation), factor=factor, level=level)
    except MALFORMED as error:
        raise InputError(f"{path}: not a table of host overheads ({error}); install the package again") from None


def load_inflation(path: Path) -> Inflation:
    """Read the inflation model in ``path``; raise :class:`InputError` naming the file."""
    document = _read_json(path, "restore it from the repository")
    try:
        return Inflation(document["operator_seconds"], document["call_seconds"], document["origin"])
    except KeyError as error:
        raise InputError(f"{path}: no {error}; it needs operator_seconds, call_seconds and origin") from None


def _read_json(path: Path, advice: str) -> dict[str, Any]:
    try:
        document = decoded(read_text(path, "record"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); {advice}") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}); {advice}") from None
    if not isinstance(document, dict):
        raise InputError(f"{path}: not a JSON object; {advice}")
    return document


def _rounded(mean: Mean) -> list[float]:
    return [float(f"{round(mean.seconds, 12):.4g}"), mean.count, round(mean.operators, 3), round(mean.calls, 3)]


def _one_line_per_mean(document: Mapping[str, Any]) -> str:
    """Format JSON for readable diffs: one line per mean and per source."""
    parts = []
    for key, value in document.items():
        if key == "means":
            kinds = [
                f'  "{kind}": {{\n'
                + ",\n".join(f"   {json.dumps(n)}: {json.dumps(row)}" for n, row in rows.items())
                + "\n  }"
                for kind, rows in value.items()
            ]
            parts.append(' "means": {\n' + ",\n".join(kinds) + "\n }")
        elif isinstance(value, list):
            parts.append(f' "{key}": [\n' + ",\n".join(f"  {json.dumps(item)}" for item in value) + "\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
