"""The table of host overheads that a prediction uses unless it is given another."""

from __future__ import annotations

from pathlib import Path

from e2e.overheads import OverheadTable, load_table

DIRECTORY = Path(__file__).parent.parent / "costmodel" / "calibration" / "host_overheads"
SHARED = DIRECTORY / "shared.json"


def load_overheads(path: Path | None = None) -> OverheadTable:
    """The table of ``path``, or the shared one of all public profiles. ``InputError`` if it cannot be read."""
    return load_table(path or SHARED)
