"""JSON form of operators: a mapping with the type's name under ``"type"`` and the dataclass fields beside it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import MISSING, Field, fields
from typing import Any, get_args

from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.index_statistics import IndexStatistics
from costmodel.operators.layers import Epilogue, Prologue
from costmodel.operators.lookups import TableLookup

# Operators, and record types of their fields.
_TYPES: dict[str, Any] = {
    cls.__name__: cls for cls in (*get_args(AnyOperator), Epilogue, Prologue, TableLookup, IndexStatistics)
}


def to_record(value: Any) -> Any:
    """JSON-able data of ``value`` (an operator or one of its fields)."""
    if type(value).__name__ in _TYPES:
        content = {item.name: to_record(getattr(value, item.name)) for item in fields(value)}
        return {"type": type(value).__name__, **content}
    if isinstance(value, tuple):
        return [to_record(item) for item in value]
    return value


def from_record(record: Any) -> Any:
    """Operator from data of :func:`to_record`; ``ValueError`` for anything else."""
    if isinstance(record, list):
        return tuple(from_record(item) for item in record)
    if not isinstance(record, dict):
        return record
    content = dict(record)
    name = content.pop("type", None)
    if name not in _TYPES:
        raise ValueError(f"unknown operator type {name!r}, known: {', '.join(_TYPES)}")
    known = {item.name: item for item in fields(_TYPES[name]) if item.init}
    unknown = sorted(set(content) - set(known))
    missing = sorted(set(_required(known.values())) - set(content))
    if unknown or missing:
        raise ValueError(f"malformed {name}: missing {missing}, not known {unknown}")
    return _TYPES[name](**{key: from_record(item) for key, item in content.items()})


def _required(known: Iterable[Field[Any]]) -> Iterator[str]:
    return (item.name for item in known if item.default is MISSING and item.default_factory is MISSING)
