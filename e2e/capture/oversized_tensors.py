"""Tensors that no memory holds: PyTorch counts their bytes in 64 bits, and raises what says nothing of the step."""

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
    """What to tell about ``error`` where it is of a tensor that is too large for any memory; ``None`` otherwise."""
    said = str(error)
    if not _SAID.search(said):
        return None
    sizes = _SIZES.search(said)
    of = f" of {sizes[1]} elements" if sizes else ""
    return f"a tensor{of} is larger than any memory; give a smaller batch, shorter sequences or a smaller model"


@contextmanager
def oversized_told() -> Iterator[None]:
    """``InputError`` for what :func:`oversized` knows."""
    try:
        yield
    except (RuntimeError, OverflowError) as error:
        told = oversized(error)
        if told is None:
            raise
        raise InputError(told) from None
