"""Statistics of tables on disk: ``.json`` for people, ``.npz`` for many tables; also batches of indices (``.npz``).

statistics .json   {"format": 1, "tables": {NAME: {"rows", "group_rows", "group_shares", "origin"}}}
statistics .npz    NAME.rows (), NAME.group_rows (groups,), NAME.group_shares (groups,), NAME.origin (text)
batches    .npz    NAME.indices, NAME.offsets, NAME.rows: costmodel/embedding/index_batches.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.broken_archives import BROKEN_ARCHIVE
from costmodel.base.errors import InputError, OutputError
from costmodel.base.foreign_files import open_arrays, read_text
from costmodel.base.plain_json import MALFORMED, decoded
from costmodel.base.whole_file import write_whole
from costmodel.embedding.index_batches import load_batches, statistics_of_batch
from costmodel.operators.index_statistics import IndexStatistics

_FORMAT = 1
_FIELDS = ("rows", "group_rows", "group_shares", "origin")
_WANTED = f"every table needs {', '.join(_FIELDS)}, or indices and offsets of its batches (.npz)"


def save_statistics(statistics: Mapping[str, IndexStatistics], path: Path) -> None:
    """Write the tables' statistics in the format of the suffix of ``path``; ``OutputError`` on failure, ``InputError``
    for another suffix.
    """
    check_suffix(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            record = {"format": _FORMAT, "tables": {name: to_record(each) for name, each in statistics.items()}}
            write_whole(path, json.dumps(record, indent=1) + "\n")
        else:
            arrays: dict[str, Any] = {
                f"{name}.{key}": np.array(value)
                for name, each in statistics.items()
                for key, value in to_record(each).items()
            }
            np.savez_compressed(path, **arrays)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place") from None


def load_statistics(path: Path) -> dict[str, IndexStatistics]:
    """Read statistics by table from a file of :func:`save_statistics`, or compute them from the batches in an ``.npz``.

    ``InputError`` names a file that is missing, malformed or of another kind.
    """
    check_suffix(path)
    try:
        records = _read_json(path) if path.suffix == ".json" else _read_npz(path)
        return {name: _named(name, record) for name, record in records.items()}
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror or error}); check its path and permissions"
        ) from None
    except (*MALFORMED, *BROKEN_ARCHIVE) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else error
        raise InputError(f"{path}: no statistics of tables: {what}; {_WANTED}") from None


def to_record(statistics: IndexStatistics) -> dict[str, Any]:
    """JSON-able content of ``statistics``."""
    return {name: getattr(statistics, name) for name in _FIELDS}


def from_record(record: Mapping[str, Any]) -> IndexStatistics:
    """Inverse of :func:`to_record`; ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
    rows, shares = (tuple(float(each) for each in record[name]) for name in ("group_rows", "group_shares"))
    return IndexStatistics(int(record["rows"]), rows, shares, str(record["origin"]))


def _named(name: str, record: Any) -> IndexStatistics:
    try:
        if not isinstance(record, Mapping):
            raise ValueError("is not a mapping; write one of names")
        return from_record(record)
    except KeyError as error:
        raise ValueError(f"table {name!r} lacks {error}; add it") from None
    except MALFORMED as error:
        raise ValueError(f"table {name!r}: {error}") from None


def check_suffix(path: Path) -> None:
    """Raise ``InputError`` unless the suffix is ``.json`` or ``.npz``."""
    if path.suffix not in (".json", ".npz"):
        raise InputError(f"{path}: statistics are kept in .json or .npz; give such a file")


def _read_json(path: Path) -> dict[str, Any]:
    record = decoded(read_text(path, "record"))
    if record.get("format") != _FORMAT:
        raise ValueError(f"format {record.get('format')!r}, known: {_FORMAT}")
    if not isinstance(record["tables"], dict):
        raise ValueError("tables is not a mapping of names; write each table's under its name")
    return dict(record["tables"])


def _read_npz(path: Path) -> dict[str, Any]:
    records: dict[str, dict[str, Any]] = {}
    with open_arrays(path) as content:
        if any(key.endswith(".indices") for key in content.files):
            batches = load_batches(path).items()
            return {name: to_record(statistics_of_batch(each, f"{path.name}: {name}")) for name, each in batches}
        for key in content.files:
            name, dot, part = key.rpartition(".")
            if not dot:
                raise ValueError(f"array {key!r} names no table; call it TABLE.indices or so")
            records.setdefault(name, {})[part] = content[key]
    return records
