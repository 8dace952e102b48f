"""Tensors too large for any memory: PyTorch counts their bytes in 64 bits, and its error does not mention the step."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

from costmodel.base.errors import InputError

_SAID = re.compile(
    r"(?:size calculation|multiplication|unpacking long).*?overflow\w*|overflow\w* when unpacking long", re.I
)
_SIZES = re.compile(r"sizes=(\[[^\]]*\])")


def oversized(error: Exception) -> str | None:
    """Return a message about ``error`` if it is of a tensor too large for any memory, or None."""
    said = str(error)
    if not _SAID.search(said):
        return None
    sizes = _SIZES.search(said)
    of = f" of {sizes[1]} elements" if sizes else ""
    return f"a tensor{of} is larger than any memory; give a smaller batch, shorter sequences or a smaller model"


@contextmanager
def oversized_told() -> Iterator[None]:
    """Context that raises ``InputError`` for errors that :func:`oversized` recognises."""
    try:
        yield
    except (RuntimeError, OverflowError) as error:
        told = oversized(error)
        if told is None:
            raise
        raise InputError(told) from None
