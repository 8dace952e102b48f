"""Where a user's own files are, by the XDG Base Directory Specification."""

from __future__ import annotations

import os
from pathlib import Path

# Of users without a home, such as the mere number that a container runs as; Debian's accounts without one say so too.
NO_HOME = Path("/nonexistent")


def user_folder(variable: str, below_home: str) -> Path:
    """The folder ``costmodel`` in ``$variable``, such as ``XDG_CACHE_HOME``, else in ``below_home`` of the user's home.

    Without a home it is below :data:`NO_HOME`: nothing is found there, and who writes there is told that name.
    """
    base = os.environ.get(variable)
    if base:
        return Path(base) / "costmodel"
    try:
        home = Path.home()
    except RuntimeError:  # neither HOME nor an account
        home = NO_HOME
    return home / below_home / "costmodel"
