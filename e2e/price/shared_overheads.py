"""The table of host overheads that a prediction uses: the shared one, a file's, or that of the user's own profile."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from e2e.price.overhead_files import load_inflation, load_table
from e2e.price.overheads import OverheadTable, fit_table

if TYPE_CHECKING:
    from e2e.traces.formats.profile import KinetoTrace

DIRECTORY = Path(__file__).parents[2] / "costmodel" / "calibration" / "host_overheads"
SHARED = DIRECTORY / "shared.json"
INFLATION = DIRECTORY / "profiler_inflation.json"


def load_overheads(path: Path | None = None) -> OverheadTable:
    """The table of ``path``, or the shared one of all public profiles. ``InputError`` if it cannot be read."""
    return load_table(path or SHARED)


def fitted_overheads(name: str, profile: KinetoTrace) -> OverheadTable:
    """The overheads of the host of ``profile``, without what the profiler added."""
    from e2e.price.overhead_samples import extract

    return fit_table(name, [extract(profile)], load_inflation(INFLATION))
