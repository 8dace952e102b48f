"""Selection of the table of host overheads: the default for a GPU generation, a file or known host, or a fit to the
user's profile.

The profiles of ``h100-server`` were recorded with stacks, which lengthen Python between operators (T1) but not the time
inside them: operators that ran on both hosts take 0.77 of the V100 servers' time there. So its T2 to T5 are its own
where they were sampled; the rest, and T1, are the V100 servers' times at that level.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from costmodel.base.errors import InputError
from costmodel.base.foreign_files import open_file
from e2e.price.overhead_files import load_inflation, load_table
from e2e.price.overheads import OverheadTable, fit_table
from e2e.price.pricing import HostOverheads

if TYPE_CHECKING:
    from e2e.price.overhead_samples import OverheadSamples
    from e2e.traces.formats.profile import KinetoTrace

DIRECTORY = Path(__file__).parents[2] / "costmodel" / "calibration" / "host_overheads"
SHARED = DIRECTORY / "shared.json"
# Bytes read to find a profile's events, which follow metadata on devices and ranks.
_HEAD = 1 << 16
INFLATION = DIRECTORY / "profiler_inflation.json"
# GPUs of 2022 and later are in servers of 2022 and later.
_NEWER, _NEWER_GPUS = "h100-server", ("ada", "hopper", "blackwell", "blackwell-rtx")


def known_hosts() -> list[str]:
    """Return the names of the tables in the package."""
    return sorted(path.stem for path in DIRECTORY.glob("*.json") if path != INFLATION)


def load_overheads(path: Path | None = None, architecture: str = "") -> OverheadTable:
    """Load the table of ``path``, a file or a name in :func:`known_hosts`; by default the table for GPUs of
    ``architecture``.

    ``path`` may also name profiles (a file, a pattern, an archive) of the predicted job, to which a table is then
    fitted. Raise ``InputError`` if the table cannot be read.
    """
    if path is None:
        return load_table(DIRECTORY / f"{_NEWER}.json" if architecture in _NEWER_GPUS else SHARED)
    if _is_name(path):
        if path.name not in known_hosts():
            raise InputError(f"{path}: no such file, and no host of that name; known: {', '.join(known_hosts())}")
        return load_table(DIRECTORY / f"{path.name}.json")
    if is_table(path):
        return load_table(path)
    from e2e.price.overhead_samples import extract
    from e2e.traces.formats.kineto import read_kineto
    from e2e.traces.recorded_run import expand_files

    profiles = [extract(read_kineto(file)) for file in expand_files([path])]
    return _of_job(path.name, profiles)


def check_overheads(path: Path | None) -> None:
    """Raise ``InputError`` where :func:`load_overheads` would, before long work; profiles are not opened yet."""
    from e2e.traces.recorded_run import expand_files

    if path is None:
        return
    if _is_name(path) or is_table(path):
        load_overheads(path)
        return
    for profile in expand_files([path]):
        if not any(each.is_file() for each in (profile, *profile.parents)):  # it may be inside an archive
            raise InputError(f"{profile}: is no file; give a table of host overheads, a known host or profiles")


def _is_name(path: Path) -> bool:
    return not path.suffix and "*" not in path.name and not path.exists()


def is_table(path: Path) -> bool:
    """True if ``path`` is read as a table: a JSON file without a profiler's events."""
    if path.suffix != ".json" or "*" in path.name:
        return False
    try:
        with open_file(path, "trace") as file:
            return b'"traceEvents"' not in file.read(_HEAD)
    except OSError:
        return True


def standing_in(table: HostOverheads, *, grace: bool = False) -> str:
    """Return a note that names the host used instead of the user's; empty for a table of the user's own host.

    ``grace``: the GPU is sold with a Grace CPU, for which no overheads have been published.
    """
    if not isinstance(table, OverheadTable) or table.factor == 1.0:
        return ""
    other = ", an x86 server for a Grace CPU that was not measured" if grace else ""
    return (
        f"host overheads are those of {table.name}{other} (the interval takes hosts up to {table.factor:g} times "
        "as fast or slow); name another host or a table of your own with --overheads"
    )


def fitted_overheads(name: str, profile: KinetoTrace) -> OverheadTable:
    """Fit the overheads of the host of ``profile``, without the profiler's cost."""
    from e2e.price.overhead_samples import extract

    return _of_job(name, [extract(profile)])


def _of_job(name: str, profiles: Sequence[OverheadSamples]) -> OverheadTable:
    """Fit the table of a job; kinds that a short profile lacks are taken from the shared table."""
    return fit_table(name, profiles, load_inflation(INFLATION), of_job=True, others=load_table(SHARED))
