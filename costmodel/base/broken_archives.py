"""Exceptions, besides ``OSError``, that reading a damaged archive raises."""

from __future__ import annotations

import tokenize
import zipfile
import zlib

# For ``.gz`` and ``.npz`` files; the members of the latter describe their arrays by Python literals. ``RuntimeError``
# and ``NotImplementedError``: members that are encrypted or use an unsupported compression.
BROKEN_ARCHIVE = (
    EOFError,
    MemoryError,
    NotImplementedError,
    RuntimeError,
    SyntaxError,
    tokenize.TokenError,
    zipfile.BadZipFile,
    zlib.error,
)
