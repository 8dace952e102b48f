"""The table of host overheads that a prediction uses: that of a GPU's generation, a file's or a known host's, or that
of the user's own profile.

The profiles of ``h100-server`` were recorded with stacks, which lengthen Python between operators (T1) and not what
happens inside them: the operators that both hosts ran take 0.77 of the V100 servers' time there. So T2 to T5 are its
own where it was seen; all else, and T1, are the V100 servers' at that level.
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
# A profile's events begin after what the profiler says of devices and ranks.
_HEAD = 1 << 16
INFLATION = DIRECTORY / "profiler_inflation.json"
# GPUs of 2022 and later stand in servers of 2022 and later.
_NEWER, _NEWER_GPUS = "h100-server", ("ada", "hopper", "blackwell", "blackwell-rtx")


def known_hosts() -> list[str]:
    """Names of the tables that are shipped."""
    return sorted(path.stem for path in DIRECTORY.glob("*.json") if path != INFLATION)


def load_overheads(path: Path | None = None, architecture: str = "") -> OverheadTable:
    """The table of ``path``, a file or one of :func:`known_hosts`; by default the one for hosts of GPUs of this
    ``architecture``. ``InputError`` if it cannot be read.

    ``path`` may also name profiles (a file, a pattern, an archive): those of the very job that is predicted, whose
    table is then fitted here.
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
    """``InputError`` for what :func:`load_overheads` would refuse, before long work; profiles are not opened yet."""
    from e2e.traces.recorded_run import expand_files

    if path is None:
        return
    if _is_name(path) or is_table(path):
        load_overheads(path)
        return
    for profile in expand_files([path]):
        if not any(each.is_file() for each in (profile, *profile.parents)):  # it may be within an archive
            raise InputError(f"{profile}: is no file; give a table of host overheads, a known host or profiles")


def _is_name(path: Path) -> bool:
    return not path.suffix and "*" not in path.name and not path.exists()


def is_table(path: Path) -> bool:
    """Whether ``path`` is read as a table: a JSON file, unless a profiler's events stand in it."""
    if path.suffix != ".json" or "*" in path.name:
        return False
    try:
        with open_file(path, "trace") as file:
            return b'"traceEvents"' not in file.read(_HEAD)
    except OSError:
        return True


def standing_in(table: HostOverheads, *, grace: bool = False) -> str:
    """A line that says which host stands for the user's; empty for a table of the user's own. ``grace``: the GPU is
    sold with a Grace CPU, whose overheads nobody has published.
    """
    if not isinstance(table, OverheadTable) or table.factor == 1.0:
        return ""
    other = ", an x86 server for a Grace CPU that was not measured" if grace else ""
    return (
        f"host overheads are those of {table.name}{other} (the interval takes hosts up to {table.factor:g} times "
        "as fast or slow); name another host or a table of your own with --overheads"
    )


def fitted_overheads(name: str, profile: KinetoTrace) -> OverheadTable:
    """The overheads of the host of ``profile``, without what the profiler added."""
    from e2e.price.overhead_samples import extract

    return _of_job(name, [extract(profile)])


def _of_job(name: str, profiles: Sequence[OverheadSamples]) -> OverheadTable:
    """A short profile lacks some kinds of pieces; these are the shared table's."""
    return fit_table(name, profiles, load_inflation(INFLATION), of_job=True, others=load_table(SHARED))
