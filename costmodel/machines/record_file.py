"""Conversion between files (strict YAML, JSON) and records. Every error names the file and the key."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import yaml
from pydantic import BaseModel, ConfigDict, PlainValidator, TypeAdapter, ValidationError

from costmodel.base.errors import InputError, ProjectError
from costmodel.base.input_files import MALFORMED, decoded, read_text
from costmodel.machines.machine_records import NotInFile, Written, key_of

Content = TypeVar("Content")
_ADAPTERS: dict[type, TypeAdapter[Any]] = {}  # construction takes milliseconds
_EXPECTED = {"dataclass_type": "must be a mapping", "tuple_type": "must be a list"}
_MOST_VALUES = 1_000_000
_MOST_TOLD = 10
_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")


class StrictModel(BaseModel):
    """Schema of a file, or a part of one, that is converted to something other than a record of the same fields."""

    model_config = ConfigDict(extra="forbid", strict=True, arbitrary_types_allowed=True)


def read_mapping(path: Path, failure: type[ProjectError], otherwise: str) -> dict[str, Any]:
    """Read the mapping in the YAML file ``path``; ``failure`` names the file if it cannot be read, is not YAML, repeats
    a key, or is no mapping (then with the text ``otherwise``).
    """
    try:
        document = yaml.load(read_text(path, "settings"), Loader=UniqueKeyLoader)
    except OSError as error:
        raise failure(f"{path}: cannot be read ({error.strerror}); check its path and permissions") from None
    except (
        yaml.YAMLError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
    ) as error:  # such as an invalid date
        raise failure(f"{path}: not valid YAML ({' '.join(str(error).split())}); correct it there") from None
    except RecursionError:
        raise failure(f"{path}: not valid YAML (nested too deeply); write it flatter") from None
    if not isinstance(document, dict):
        raise failure(f"{path}: {otherwise}")
    if _written_out(document, {}) > _MOST_VALUES:
        raise failure(f"{path}: aliases (*name) that stand for themselves, or for too much; write out what they mean")
    return document


def _written_out(value: Any, known: dict[int, float]) -> float:
    """Number of values in ``value`` with its aliases expanded; infinite for recursive aliases."""
    if not isinstance(value, dict | list):
        return 1.0
    if id(value) not in known:
        known[id(value)] = math.inf  # while it is being counted
        inside = value.values() if isinstance(value, dict) else value
        known[id(value)] = 1.0 + sum(_written_out(each, known) for each in inside)
    return known[id(value)]


def convert_record(
    document: Mapping[str, Any], schema: type[Content], path: Path, failure: type[ProjectError]
) -> Content:
    """Convert ``document``, the content of ``path``, to ``schema``, a record of
    :mod:`costmodel.machines.machine_records` or a :class:`StrictModel`; ``failure`` names file and key.
    """
    try:
        return validated(document, schema)
    except ValidationError as error:
        raise failure(f"{path}: {explain_problems(error)}") from None


def read_record(path: Path, schema: type[Content], remedy: str) -> Content:
    """Read the JSON file ``path`` as ``schema``, a dataclass; keys that it lacks are ignored. ``InputError`` names the
    file and the key, and ends with ``remedy``.
    """
    try:
        return validated(decoded(read_text(path, "record")), schema)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror or error}); {remedy}") from None
    except ValidationError as error:
        raise InputError(f"{path}: corrupt ({explain_problems(error)}); {remedy}") from None
    except (EOFError, ValueError, zlib.error) as error:
        raise InputError(f"{path}: corrupt, no JSON ({error}); {remedy}") from None


def made_by(read: Callable[[Any], Any]) -> PlainValidator:
    """Marker of a field that ``read`` makes of its JSON; ``read`` may raise any of :data:`MALFORMED`."""

    def run(value: Any) -> Any:
        try:
            return read(value)
        except MALFORMED as error:
            raise ValueError(f"{type(error).__name__}: {error}") from None

    return PlainValidator(run)


def validated(document: Any, schema: type[Content]) -> Content:
    """Convert ``document`` to ``schema``; raise pydantic's ``ValidationError``."""
    if schema not in _ADAPTERS:
        _ADAPTERS[schema] = TypeAdapter(schema)
    adapter: TypeAdapter[Content] = _ADAPTERS[schema]
    return adapter.validate_python(document)


def file_content(record: Any) -> dict[str, Any]:
    """Content of the file of ``record``, quantities as text; defaults are omitted, origins come last."""
    content: dict[str, Any] = {}
    hints = get_type_hints(type(record), include_extras=True)
    for each in fields(record):
        value, markers = getattr(record, each.name), _markers(hints[each.name])
        if value != each.default and not any(isinstance(marker, NotInFile) for marker in markers):
            content[key_of(each.name)] = _written(value, markers)
    if "origin" in content:
        content["origin"] = content.pop("origin")
    return content


def explain_problems(error: ValidationError) -> str:
    """Describe the problems, each with its key and a remedy; only the first few of many."""
    problems = error.errors()
    told = [_problem(each) for each in problems[:_MOST_TOLD]]
    rest = len(problems) - len(told)
    return "; ".join(told) + (f"; correct {rest} more too" if rest else "")


def _problem(problem: Any) -> str:
    key = ".".join(str(part) for part in problem["loc"] if part != "[key]")
    if problem["type"] in _UNKNOWN_KEY:
        return f"{key}: unknown key; remove it or correct its spelling"
    if problem["type"] == "missing":
        return f"{key}: missing; add it"
    message = _EXPECTED.get(problem["type"], problem["msg"].removeprefix("Value error, "))
    return f"{key}: {message}" if key else str(message)


class UniqueKeyLoader(yaml.SafeLoader):
    """YAML loader that refuses repeated keys: silently dropping a number would give wrong prices."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Mapping of ``node``; a YAML error for a repeated key."""
        keys: set[Hashable] = set()
        for each, _ in node.value:
            key = self.construct_object(each, deep=True)
            if isinstance(key, Hashable):  # the loader itself reports an unhashable one
                if key in keys:
                    raise yaml.constructor.ConstructorError(None, None, f"key {key!r} twice", node.start_mark)
                keys.add(key)
        return super().construct_mapping(node, deep)


def _markers(hint: Any) -> list[Any]:
    """Metadata of an annotated type, also inside an optional one."""
    if get_origin(hint) is Annotated:
        return list(hint.__metadata__)
    return [marker for part in get_args(hint) if get_origin(part) is Annotated for marker in part.__metadata__]


def _written(value: Any, markers: Sequence[object]) -> Any:
    for marker in markers:
        if isinstance(marker, Written):
            return marker.format(value)
    if is_dataclass(value):
        return file_content(value)
    if isinstance(value, Mapping):
        return {key: _written(each, ()) for key, each in value.items()}
    return [_written(each, ()) for each in value] if isinstance(value, tuple) else value
