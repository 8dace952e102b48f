"""File of :class:`costmodel.cpu.learned_residual.ResidualModel`: measurements and their provenance."""

from __future__ import annotations

import json
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.foreign_files import read_text
from costmodel.base.plain_json import decoded
from costmodel.base.whole_file import write_whole
from costmodel.model.measurements import Measurement, measurement_from_record, measurement_to_record

FILE_NAME = "residual-model.json"
_FORMAT = 1


def write_measurements(directory: Path, key: str, measurements: Sequence[Measurement]) -> Path:
    """Write ``directory/residual-model.json`` atomically; ``OutputError`` on failure."""
    record = {
        "format": _FORMAT,
        "key": key,
        "provenance": {
            "written": datetime.now(UTC).isoformat(timespec="seconds"),
            "measurements": len(measurements),
            "operators": len({each.operator for each in measurements}),
            "xgboost": _version(),
        },
        "measurements": [measurement_to_record(each) for each in measurements],
    }
    path = directory / FILE_NAME
    try:
        directory.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(record))
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place, or free some") from None
    return path


def read_measurements(directory: Path, key: str) -> list[Measurement]:
    """Read measurements from :func:`write_measurements`; ``InputError`` names the file and the remedy."""
    path = directory / FILE_NAME
    try:
        record = decoded(read_text(path, "record"))
        if not isinstance(record, dict) or record.get("format") != _FORMAT:
            raise ValueError("unknown format")
        measurements = [measurement_from_record(each) for each in _list(record.get("measurements"))]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its path and permissions") from None
    except ValueError as error:
        raise InputError(f"{path}: corrupt ({error}); delete it to learn anew") from None
    if record.get("key") != key:
        raise InputError(f"{path}: was learned on {record.get('key')!r}, not on {key!r}; use another directory")
    return measurements


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError("measurements are missing")
    return value


def _version() -> str | None:
    for name in ("xgboost", "xgboost-cpu"):
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
