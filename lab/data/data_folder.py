"""Location of the public measurements: one rule for every command, benchmark and test."""

from __future__ import annotations

import os
from pathlib import Path

from costmodel.base.output_files import user_folder

ENVIRONMENT = "COSTMODEL_DATA"
FETCH = "`python -m lab.data fetch`"
BROUGHT = f"{FETCH} brings it, or give the folder of the data with --data"
AGAIN = f"fetch the file again: {FETCH}"
_BESIDE = Path(__file__).resolve().parents[3] / "shared" / "data"  # beside a checkout


def user_data_directory() -> Path:
    """Folder into which `data fetch` writes: ``$XDG_DATA_HOME/costmodel/data``, else
    ``~/.local/share/costmodel/data``.
    """
    return user_folder("data") / "data"


def data_folder(given: Path | None = None) -> Path:
    """Folder of the measurements: ``given``, else ``$COSTMODEL_DATA``, else the user's own if it exists, else
    ``../shared/data`` beside the checkout; the user's own if none exists.
    """
    chosen = os.environ.get(ENVIRONMENT)
    if given is not None or chosen:
        return given if given is not None else Path(str(chosen))
    own = user_data_directory()
    return _BESIDE if not own.is_dir() and _BESIDE.is_dir() else own
