"""What reading a damaged archive raises, beside ``OSError``."""

from __future__ import annotations

import tokenize
import zipfile
import zlib

# Of ``.gz`` and of ``.npz``, whose members say in Python how their arrays are stored. ``RuntimeError`` and
# ``NotImplementedError``: members that are encrypted, or packed as no reader here knows.
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
