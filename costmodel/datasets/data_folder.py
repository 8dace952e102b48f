"""Where the public measurements are: one rule for every command, benchmark and test."""

from __future__ import annotations

import gzip
import hashlib
import os
import zlib
from functools import lru_cache
from pathlib import Path

from costmodel.base.errors import InputError
from costmodel.base.user_folders import user_folder

ENVIRONMENT = "COSTMODEL_DATA"
FETCH = "`python -m costmodel data fetch`"
BROUGHT = f"{FETCH} brings it, or give the folder of the data with --data"
AGAIN = f"fetch the file again: {FETCH}"
_BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"  # beside a checkout
_BLOCK = 1 << 20


def user_data_directory() -> Path:
    """``$XDG_DATA_HOME/costmodel/data``, else ``~/.local/share/costmodel/data``: where `data fetch` writes."""
    return user_folder("XDG_DATA_HOME", ".local/share") / "data"


def data_folder(given: Path | None = None) -> Path:
    """The folder of the measurements: ``given``, else ``$COSTMODEL_DATA``, else the user's own if it is there, else
    ``../shared/data`` beside the checkout; the user's own, which is not there then, if nothing is.
    """
    chosen = os.environ.get(ENVIRONMENT)
    if given is not None or chosen:
        return given if given is not None else Path(str(chosen))
    own = user_data_directory()
    return _BESIDE if not own.is_dir() and _BESIDE.is_dir() else own


def digest(path: Path) -> str:
    """SHA-256 of what ``path`` holds; of a ``.gz`` file, of what it decompresses to, for compressors differ.

    :class:`InputError` where it cannot be read or is cut short.
    """
    try:
        state = path.stat()
        return _digest(path, state.st_size, state.st_mtime_ns)
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({error}); copy or fetch it again") from None


@lru_cache(maxsize=1024)
def _digest(path: Path, size: int, changed: int) -> str:
    found = hashlib.sha256()
    with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as stream:
        while block := stream.read(_BLOCK):
            found.update(block)
    return found.hexdigest()
