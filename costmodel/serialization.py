"""Operators as JSON: a mapping with the type's name under ``"type"`` and the dataclass fields beside it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_args

from costmodel.collective_operators import CollectiveTransfer
from costmodel.device_operators import DeviceOperator
from costmodel.embedding.lookups import TableLookup
from costmodel.embedding.statistics import IndexStatistics
from costmodel.operators import Conv2d, Dense, Epilogue, FusedConvs, Pool2d

_TYPES: dict[str, type] = {
    cls.__name__: cls
    for cls in (
        Conv2d,
        FusedConvs,
        Pool2d,
        Dense,
        Epilogue,
        CollectiveTransfer,
        TableLookup,
        IndexStatistics,
        *get_args(DeviceOperator),
    )
}


def to_record(value: Any) -> Any:
    """``value`` (an operator or one of its fields) as JSON-able data."""
    if type(value).__name__ in _TYPES:
        content = {item.name: to_record(getattr(value, item.name)) for item in fields(value)}
        return {"type": type(value).__name__, **content}
    if isinstance(value, tuple):
        return [to_record(item) for item in value]
    return value


def from_record(record: Any) -> Any:
    """The operator that :func:`to_record` described; ``ValueError`` for anything else."""
    if isinstance(record, list):
        return tuple(from_record(item) for item in record)
    if not isinstance(record, dict):
        return record
    content = dict(record)
    name = content.pop("type", None)
    if name not in _TYPES:
        raise ValueError(f"unknown operator type {name!r}, known: {', '.join(_TYPES)}")
    try:
        return _TYPES[name](**{key: from_record(item) for key, item in content.items()})
    except TypeError as error:
        raise ValueError(f"malformed {name}: {error}") from None
