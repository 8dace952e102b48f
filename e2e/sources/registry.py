"""Selection of the request class for a user's options, with validation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from costmodel.base.errors import InputError
from e2e.sources import known_requests  # noqa: F401 (registers the sources of this project)
from e2e.sources.request import SOURCES, Request
from e2e.step.option_fields import OptionField, options_of


def all_options() -> dict[str, OptionField]:
    """Return every option of every source by name, with the help of the first source that has it."""
    found: dict[str, OptionField] = {}
    for record in SOURCES:
        for name, each in options_of(record).items():
            found.setdefault(name, each)
    return found


def request_of(options: Mapping[str, Any]) -> Request:
    """Make the request of ``options`` (by field, of all sources).

    Raises ``InputError`` for an option that the selected source does not have, and for a missing one.
    """
    known = all_options()
    read = {name: known[name].taken(value) for name, value in options.items()}
    given = {name: value for name, value in read.items() if known[name].asks(value)}
    record = chosen(given)
    if record is None:
        raise InputError(f"{_one_of(known)} (--trace may go with --kineto)")
    own = options_of(record)
    for name, value in given.items():
        if name not in own and value != known[name].words.harmless:
            raise InputError(_refusal(record, known[name], [each for each in known.values() if each.name in given]))
    missing = [each for name, each in own.items() if each.needed and name not in given]
    if missing:
        raise InputError("give " + "; ".join(f"{each.flag}: {each.words.help.removesuffix('.')}" for each in missing))
    return record(**{name: value for name, value in given.items() if name in own})


def chosen(given: Mapping[str, Any]) -> type[Request] | None:
    """Return the source selected by the options ``given``: the last registered one among the matches, or ``None``."""
    found = [each for each in SOURCES if each.is_meant(given)]
    return found[-1] if found else None


def sources_with(option: str) -> list[type[Request]]:
    """Return the sources that have the option of this name."""
    return [record for record in SOURCES if option in options_of(record)]


def _one_of(known: Mapping[str, OptionField]) -> str:
    *others, last = [each.flag for each in known.values() if each.words.source]
    return f"give exactly one of {', '.join(others)} and {last}"


def _refusal(record: type[Request], refused: OptionField, given: Collection[OptionField]) -> str:
    if refused.words.source:
        saying = [each.flag for each in given if each.words.source or (each.name,) in record.chosen_by]
        return f"{_one_of(all_options())}, got {' and '.join(saying)}"
    others = ", ".join(f"{each.title} ({spelled(each)})" for each in sources_with(refused.name))
    reason = f": {record.reason}" if record.reason else ""
    return f"{refused.flag} is no option of {record.with_article()}{reason}; leave it out (it is for: {others})"


def spelled(record: type[Request]) -> str:
    """Format the options that select ``record``, as on a command line."""
    known = options_of(record)
    return " ".join(known[name].flag for name in record.chosen_by[0])
