"""Cache of captures of a script: advice predicts one step under many settings, few of which change the script's
calls.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

# The original step, and the last one of another batch or optimizer: a capture of 100,000 calls takes a gigabyte.
MOST_KEPT = 2
_KEPT: ContextVar[dict[Hashable, Any] | None] = ContextVar("kept captures", default=None)
Captured = TypeVar("Captured")


@contextmanager
def captures_kept() -> Iterator[None]:
    """Context in which :func:`kept` caches."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept(key: Hashable, make: Callable[[], Captured]) -> Captured:
    """Return the cached result of ``make`` for ``key``, inside :func:`captures_kept`; otherwise call it."""
    held = _KEPT.get()
    if held is None:
        return make()
    if key not in held:
        found = make()
        while len(held) >= MOST_KEPT:
            held.pop(list(held)[-1])  # the first one is the original step
        held[key] = found
    return held[key]
