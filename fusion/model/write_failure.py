"""Reasons of write failures as one line."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

from fusion.model.library_messages import sentence

# A disk with less free space counts as full after a failed write of a library.
_LEAST_FREE_BYTES = 2**20


def write_failure(path: Path, error: Exception) -> str:
    """Reason why a library could not be written, also for errors of compiler and linker."""
    if isinstance(error, OSError) and error.errno != errno.ENOSPC:
        return os_reason(error)
    folders = [
        path if path.is_dir() else path.parent,
        Path(tempfile.gettempdir()),
    ]  # object files are linked in the temporary folder
    full = next((folder for folder in folders if _is_full(folder)), None)
    if full is not None or isinstance(error, OSError) or "no space left" in str(error).lower():
        return f"no space left on {full or folders[0]}; free some and run again"
    return sentence(error)


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _LEAST_FREE_BYTES
    except OSError:
        return False


def os_reason(error: OSError) -> str:
    """Reason given by the system, with advice if the disk is full."""
    if error.errno == errno.ENOSPC:
        return "no space left on the disk; free some and run again"
    return error.strerror or str(error)
