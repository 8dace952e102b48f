"""The table of host overheads that a prediction uses: the shared one, a file's, or that of the user's own profile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from e2e.price.overhead_files import load_inflation, load_table
from e2e.price.overheads import OverheadTable, fit_table

if TYPE_CHECKING:
    from e2e.price.overhead_samples import OverheadSamples
    from e2e.traces.formats.profile import KinetoTrace

DIRECTORY = Path(__file__).parents[2] / "costmodel" / "calibration" / "host_overheads"
SHARED = DIRECTORY / "shared.json"
# A profile's events begin after what the profiler says of devices and ranks.
_HEAD = 1 << 16
INFLATION = DIRECTORY / "profiler_inflation.json"


def load_overheads(path: Path | None = None) -> OverheadTable:
    """The table of ``path``, or the shared one of all public profiles. ``InputError`` if it cannot be read.

    ``path`` may also name profiles (a file, a pattern, an archive): those of the very job that is predicted, whose
    table is then fitted here.
    """
    if path is None or is_table(path):
        return load_table(path or SHARED)
    from e2e.price.overhead_samples import extract
    from e2e.traces.formats.kineto import read_kineto
    from e2e.traces.recorded_run import expand_files

    profiles = [extract(read_kineto(file)) for file in expand_files([path])]
    return _of_job(path.name, profiles)


def is_table(path: Path) -> bool:
    """Whether ``path`` is read as a table: a JSON file, unless a profiler's events stand in it."""
    if path.suffix != ".json" or "*" in path.name:
        return False
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            return '"traceEvents"' not in file.read(_HEAD)
    except OSError:
        return True


def fitted_overheads(name: str, profile: KinetoTrace) -> OverheadTable:
    """The overheads of the host of ``profile``, without what the profiler added."""
    from e2e.price.overhead_samples import extract

    return _of_job(name, [extract(profile)])


def _of_job(name: str, profiles: Sequence[OverheadSamples]) -> OverheadTable:
    """A short profile lacks some kinds of pieces; these are the shared table's."""
    return fit_table(name, profiles, load_inflation(INFLATION), of_job=True, others=load_table(SHARED))
