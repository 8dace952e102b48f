"""Why something could not be written, in one line."""

from __future__ import annotations

import errno
import shutil
import tempfile
from pathlib import Path

from fusion.model.library_messages import sentence

# Below that a disk counts as full when a library could not be written to it.
_LEAST_FREE_BYTES = 2**20


def write_failure(path: Path, error: Exception) -> str:
    """Why a library could not be written, where the compiler or the linker says it only in its own way."""
    if isinstance(error, OSError) and error.errno != errno.ENOSPC:
        return os_reason(error)
    folders = [path if path.is_dir() else path.parent, Path(tempfile.gettempdir())]  # objects are linked there
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
    """The system's own words; what to do where the disk is full."""
    if error.errno == errno.ENOSPC:
        return "no space left on the disk; free some and run again"
    return error.strerror or str(error)
