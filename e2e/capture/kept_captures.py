"""Captures of a script that are asked for again: advice predicts one step under many settings, few of which change what
the script calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

# The step as it is, and the last one of another batch or optimizer: a capture of 100,000 calls takes a gigabyte.
MOST_KEPT = 2
_KEPT: ContextVar[dict[Hashable, Any] | None] = ContextVar("kept captures", default=None)
Captured = TypeVar("Captured")


@contextmanager
def captures_kept() -> Iterator[None]:
    """Inside, :func:`kept` remembers."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept(key: Hashable, make: Callable[[], Captured]) -> Captured:
    """What ``make`` returned for ``key`` before, inside :func:`captures_kept`; else what it returns now."""
    held = _KEPT.get()
    if held is None:
        return make()
    if key not in held:
        found = make()
        while len(held) >= MOST_KEPT:
            held.pop(list(held)[-1])  # the first one is the step as it is
        held[key] = found
    return held[key]
