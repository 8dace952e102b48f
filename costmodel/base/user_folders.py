"""Folders of the user's own files, by the XDG Base Directory Specification."""

from __future__ import annotations

import os
from pathlib import Path

# For users without a home, such as a bare user ID in a container; Debian uses this path for such accounts too.
NO_HOME = Path("/nonexistent")


def user_folder(variable: str, below_home: str) -> Path:
    """The folder ``costmodel`` in ``$variable``, such as ``XDG_CACHE_HOME``, else in ``below_home`` of the user's home.

    Without a home it is below :data:`NO_HOME`: reads find nothing, and write errors name that path.
    """
    base = os.environ.get(variable)
    if base:
        return Path(base) / "costmodel"
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor an account
        home = NO_HOME
    return home / below_home / "costmodel"
