"""JSON from user files: every defect raises the same kind of error."""

from __future__ import annotations

import json
import re
from typing import Any

# Such a number exceeds the range of floats, and converting it raises an unexpected error.
_ENDLESS_NUMBER = re.compile(r"\d{301}")

# Exceptions raised while parsing a malformed document: missing names, wrong types, invalid numbers.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


def decoded(text: str | bytes, *, once: bool = False) -> Any:
    """Parse ``text`` as JSON. Raises ``ValueError`` for invalid JSON, also if it is nested deeper than Python allows,
    is not UTF-8, or has a number of more than 300 digits. ``once``: also for a key that occurs twice in an object.
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
