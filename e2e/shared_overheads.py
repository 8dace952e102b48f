"""The table of host overheads that a prediction uses: the shared one, a file's, or that of the user's own profile."""

from __future__ import annotations

from pathlib import Path

from e2e.operators import OperatorTrace
from e2e.overheads import OverheadTable, fit_table, load_inflation, load_table

DIRECTORY = Path(__file__).parent.parent / "costmodel" / "calibration" / "host_overheads"
SHARED = DIRECTORY / "shared.json"
INFLATION = DIRECTORY / "profiler_inflation.json"


def load_overheads(path: Path | None = None) -> OverheadTable:
    """The table of ``path``, or the shared one of all public profiles. ``InputError`` if it cannot be read."""
    return load_table(path or SHARED)


def overheads_of_profile(trace: OperatorTrace, kineto: Path) -> OverheadTable:
    """The overheads of the host on which ``kineto`` was recorded, without what the profiler added.

    ``InputError`` if the profile cannot be read or is not of the same run as ``trace``.
    """
    from e2e.overhead_samples import extract
    from e2e.traces.kineto import read_kineto
    from e2e.traces.link import link

    profile = read_kineto(kineto)
    link(trace, profile)
    return fit_table(kineto.name, [extract(profile)], load_inflation(INFLATION))
