"""JSON from files that others wrote: whatever is wrong with it is one kind of error."""

from __future__ import annotations

import json
import re
from typing import Any

# No float holds such a number, and converting it raises what no reader expects.
_ENDLESS_NUMBER = re.compile(r"\d{301}")

# What taking a malformed document apart raises: names that are missing, other types, numbers that are none.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def decoded(text: str | bytes, *, once: bool = False) -> Any:
    """What ``text`` says. ``ValueError`` for what is no JSON, also where it is nested deeper than Python goes, is no
    UTF-8, or has a number of more than 300 digits. ``once``: for a key that stands twice in an object too.
    """
    told = text.decode("utf-8") if isinstance(text, bytes) else text
    if _ENDLESS_NUMBER.search(told):
        raise ValueError("a number of more than 300 digits")
    try:
        return json.loads(told, object_pairs_hook=_each_once if once else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _each_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice!r} twice")
    return found
