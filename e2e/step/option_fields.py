"""Options as fields of records: each is one field with its description, from which the command line, the Python API,
help, error messages and reports are made.

A record that derives from :class:`Options` declares its fields by :func:`option`::

    @dataclass(frozen=True, kw_only=True)
    class Sizes(Options):
        batch_size: int | None = option("Samples per GPU.", default=None, least=1)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from costmodel.base.errors import InputError
from costmodel.base.units import check_count, check_number

_KEY = "option"
_SIMPLE = (int, float, bool, str)


@dataclass(frozen=True)
class Words:
    """Description of an option, with the conversion of its values."""

    help: str
    # Name on the command line; empty: --name-of-the-field.
    flag: str = ""
    # Smallest integer allowed.
    least: int | None = None
    # Smallest and largest number allowed.
    within: tuple[float, float] | None = None
    # Section of the help, if it differs from that of the record.
    panel: str = ""
    # Conversion of a user's value to a value of the field; values of the field stay unchanged.
    read: Callable[[Any], Any] | None = None
    # True if a command line gives `read` the text of the value, such as 500ms.
    as_text: bool = False
    # Conversion of a value to a text that `read` accepts.
    write: Callable[[Any], str] | None = None
    # Advice for an unsupported name that other tools have.
    instead: Callable[[str], str | None] | None = None
    # Text of the default in reports; empty: none.
    default_text: str = ""
    # True if the option may be repeated.
    several: bool = False
    # True if it selects the source of the prediction; exactly one of these options is given.
    source: bool = False
    # Value that has no effect and is accepted by commands without the option, such as one GPU.
    harmless: Any = None


def option(help: str, default: Any = MISSING, *, kw_only: bool = True, **words: Any) -> Any:
    """Declare a field of a record of options; ``words``: as in :class:`Words`."""
    return field(default=default, kw_only=kw_only, metadata={_KEY: Words(help, **words)})


@dataclass(frozen=True)
class OptionField:
    """Resolved option field; ``kind`` is its type without ``None``, ``panel`` its section of the help."""

    name: str
    kind: Any
    default: Any
    words: Words
    panel: str

    @property
    def flag(self) -> str:
        """Name on the command line."""
        return self.words.flag or f"--{self.name.replace('_', '-')}"

    @property
    def needed(self) -> bool:
        """True if the option is required."""
        return self.default is MISSING

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed values, if it is one of a few names."""
        return get_args(self.kind) if get_origin(self.kind) is Literal else ()

    @property
    def simple(self) -> bool:
        """True if a command-line parser can read the type without conversion."""
        return self.kind in (*_SIMPLE, Path) or self.kind == tuple[str, ...] or bool(self.choices)

    def is_given(self, value: Any) -> bool:
        """True if ``value`` differs from the default."""
        return value is not None and value != () and (self.needed or bool(value != self.default))

    def convert(self, value: Any) -> Any:
        """Convert ``value`` to a value of the field; raise ``InputError`` if it is not allowed."""
        if value is None:
            return None
        if self.words.read is not None:
            value = self.words.read(value)
        elif self.kind is Path:
            value = Path(value)
        elif self.kind == tuple[str, ...]:
            single = isinstance(value, str | os.PathLike)
            value = (os.fspath(value),) if single else tuple(os.fspath(each) for each in value)
        if self.choices and value not in self.choices:
            instead = self.words.instead(str(value)) if self.words.instead is not None else None
            choose = f"choose one of {', '.join(self.choices)}"
            raise InputError(f"{self.flag} {value}: {instead or choose}")
        if self.words.least is not None:
            check_count(self.flag.removeprefix("--"), value)
        if self.words.within is not None:
            check_number(self.flag.removeprefix("--"), value, *self.words.within)
        return value

    def text(self, value: Any) -> str:
        """Format ``value`` for a report."""
        if self.words.write is not None:
            return self.words.write(value)
        if isinstance(value, bool):
            return "yes" if value else "no"
        if isinstance(value, tuple):
            return " ".join(map(str, value))
        return os.fspath(value) if isinstance(value, os.PathLike) else str(value)


class Options:
    """Base of option records: values are converted and checked when a record is created."""

    # Section of the help for the fields of a class.
    panel: ClassVar[str] = "Options"

    def __post_init__(self) -> None:
        for name, each in options_of(type(self)).items():
            value = getattr(self, name)
            taken = each.convert(value)
            if taken is not value:
                object.__setattr__(self, name, taken)

    def given_values(self) -> dict[str, Any]:
        """Return the values that differ from their defaults, by name."""
        options = options_of(type(self)).values()
        return {each.name: getattr(self, each.name) for each in options if each.is_given(getattr(self, each.name))}


_RESOLVED: dict[type, Mapping[str, OptionField]] = {}


def options_of(record: type) -> Mapping[str, OptionField]:
    """Return the options of a record by name, in declaration order."""
    if record not in _RESOLVED:
        hints = get_type_hints(record)
        own = {each.name: each for each in fields(record) if _KEY in each.metadata}
        _RESOLVED[record] = {name: _resolved(record, hints[name], each) for name, each in own.items()}
    return _RESOLVED[record]


def _resolved(record: type, hint: Any, own: Field[Any]) -> OptionField:
    kinds = [each for each in get_args(hint) if each is not NoneType] if NoneType in get_args(hint) else [hint]
    home = next(each for each in record.__mro__ if own.name in each.__dict__.get("__annotations__", ()))
    words: Words = own.metadata[_KEY]
    panel = words.panel or (home.panel if issubclass(home, Options) else Options.panel)
    return OptionField(own.name, kinds[0], own.default, words, panel)
