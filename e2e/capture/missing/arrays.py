"""NumPy's arrays in files that are not there: zeros, as many as no loop over the first steps gets through."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

from e2e.capture.stand_ins import Note

# Elements of a file that is made up.
MADE_UP = 1 << 28


@contextmanager
def made_up_arrays(note: Note) -> Iterator[None]:
    """Context in which arrays in files that are not there are zeros."""
    numpy = import_module("numpy")
    with ExitStack() as stack:
        stack.enter_context(patch.object(numpy, "memmap", _memory_map(numpy, note)))
        stack.enter_context(patch.object(numpy, "fromfile", _from_file(numpy, note)))
        stack.enter_context(patch.object(numpy, "load", _load(numpy, note)))
        yield


def is_missing(file: Any) -> bool:
    """True for the name of a file that is not there."""
    return isinstance(file, (str, os.PathLike)) and not os.path.exists(file)


def _zeros(numpy: Any, file: Any, dtype: Any, count: int, note: Note) -> Any:
    note(f"{os.fspath(file)} is not there: {count:,} zeros of {numpy.dtype(dtype).name}")
    return numpy.zeros(count, dtype)  # takes memory where it is written only


def _memory_map(numpy: Any, note: Note) -> Any:
    class memmap(numpy.memmap):  # type: ignore[misc,name-defined]
        """Array in a file, or zeros where there is no file to be read."""

        def __new__(cls, filename: Any, dtype: Any = numpy.uint8, mode: str = "r+", *args: Any, **kwargs: Any) -> Any:
            if mode in ("r", "c", "readonly", "copyonwrite") and is_missing(filename):
                shape = kwargs.get("shape", args[1] if len(args) > 1 else None)
                count = MADE_UP if shape is None else int(numpy.prod(shape))
                zeros = _zeros(numpy, filename, dtype, count, note)
                return zeros if shape is None else zeros.reshape(shape)
            return numpy.ndarray.view(_original(filename, dtype, mode, *args, **kwargs), cls)

    _original = numpy.memmap
    return memmap


def _from_file(numpy: Any, note: Note) -> Any:
    original = numpy.fromfile

    def fromfile(file: Any, dtype: Any = float, count: int = -1, *args: Any, **kwargs: Any) -> Any:
        if is_missing(file):
            return _zeros(numpy, file, dtype, MADE_UP if count < 0 else count, note)
        return original(file, dtype, count, *args, **kwargs)

    return fromfile


def _load(numpy: Any, note: Note) -> Any:
    original = numpy.load

    def load(file: Any, *args: Any, **kwargs: Any) -> Any:
        if is_missing(file) and str(file).endswith(".npy"):
            return _zeros(numpy, file, numpy.uint16, MADE_UP, note)
        return original(file, *args, **kwargs)

    return load
