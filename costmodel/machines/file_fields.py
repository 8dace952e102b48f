"""Markers for ``Annotated`` that describe how a record's fields are written in its YAML file; used by
:mod:`costmodel.machines.record_file`.

A record defines its file: a key is the name of the field without the unit suffix (``clock`` for ``clock_hz``), and the
marker gives the unit of a quantity. Importing this module loads no pydantic.
"""

from __future__ import annotations

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from annotated_types import Ge, MinLen

from costmodel.base.units import format_quantity, parse_quantity
from costmodel.operators.layers import DTYPE_BYTES

_UNITS_OF_NAMES = ("_bytes", "_seconds", "_hz", "_watts")
Handler = Callable[[Any], Any]


def key_of(field: str) -> str:
    """Key in a file for a record's ``field``."""
    return next((field.removesuffix(unit) for unit in _UNITS_OF_NAMES if field.endswith(unit)), field)


class Written(ABC):
    """Marker of a field whose representation in the file differs from its value."""

    @abstractmethod
    def parse(self, value: object) -> Any:
        """Parse the field's value from the file; ``ValueError`` describes the error."""

    @abstractmethod
    def format(self, value: Any) -> Any:
        """Representation of ``value`` in the file."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_plain_validator_function(self.parse)


@dataclass(frozen=True)
class Quantity(Written):
    """Number written with its unit (``48 GB/s``) and held in SI units."""

    unit: str
    above_zero: bool = True
    most: float = math.inf

    def parse(self, value: object) -> float:
        number = parse_quantity(value, self.unit)
        if self.above_zero and number <= 0:
            raise ValueError(f"{value!r} must be above zero")
        if number > self.most:
            raise ValueError(
                f"{value!r} is more than any has ({self.format(self.most)}); correct the number or its unit"
            )
        return number

    def format(self, value: float) -> str:
        return format_quantity(value, self.unit)


@dataclass(frozen=True)
class Exactly:
    """Marker that accepts only values of the field's own type: no text for a number, no number for a text."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Any:
        return {**handler(source), "strict": True}


@dataclass(frozen=True)
class KnownDtype:
    """Marker of a name in :data:`costmodel.operators.layers.DTYPE_BYTES`."""

    def check(self, name: str) -> str:
        """Return ``name``; ``ValueError`` lists the known dtypes."""
        if name not in DTYPE_BYTES:
            raise ValueError(f"unknown dtype {name!r}, known: {', '.join(DTYPE_BYTES)}")
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.check, handler(source))


@dataclass(frozen=True)
class NotInFile:
    """Marker of a field absent from files, such as the file's own name."""

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Any:
        from pydantic_core import PydanticKnownError, core_schema

        def refuse(value: object) -> object:
            raise PydanticKnownError("unexpected_keyword_argument")

        return core_schema.no_info_plain_validator_function(refuse)


class FileRecord:
    """Base of records that are read from files: unknown keys are refused."""

    __pydantic_config__ = {"extra": "forbid", "alias_generator": key_of, "arbitrary_types_allowed": True}


Text = Annotated[str, Exactly(), MinLen(1)]
NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+-]{0,99}"


@dataclass(frozen=True)
class PlainName:
    """Marker of a name by which files are found and written: no folder, not hidden, no longer than a file name."""

    def check(self, name: str) -> str:
        """Return ``name``; raise ``ValueError`` if it is invalid."""
        if not re.fullmatch(NAME, name):
            raise ValueError(
                f"{name[:120]!r} is no name of letters, digits, _ . + -, at most 100 of them; choose another"
            )
        return name

    def __get_pydantic_core_schema__(self, source: Any, handler: Handler) -> Any:
        from pydantic_core import core_schema

        return core_schema.no_info_after_validator_function(self.check, handler(source))


Name = Annotated[str, Exactly(), PlainName()]
Names = tuple[Annotated[str, Exactly()], ...]
Flag = Annotated[bool, Exactly()]
Count = Annotated[int, Exactly(), Ge(1)]
DtypeKey = Annotated[str, Exactly(), KnownDtype()]
