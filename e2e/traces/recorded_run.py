"""Recorded job: profiles of its ranks, paired and linked with the execution traces of the same processes."""

from __future__ import annotations

import glob
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from costmodel.base.errors import InputError
from e2e.step.operator_trace import OperatorTrace
from e2e.traces.formats.execution_trace import read_execution_trace
from e2e.traces.formats.json_stream import archive_members
from e2e.traces.formats.kineto import read_kineto
from e2e.traces.formats.profile import KinetoTrace
from e2e.traces.linking.link import LinkedTrace, link

_ARCHIVES = (".tar", ".tar.gz", ".tgz")
_WILD = frozenset("*?[")


@dataclass(frozen=True)
class RecordedRun:
    """Profiles in the order of their ranks; ``links``: rank -> its profile linked with its execution trace."""

    profiles: tuple[KinetoTrace, ...]
    links: Mapping[int, LinkedTrace]

    @property
    def gpu(self) -> str:
        """Name of the GPUs given by the driver."""
        return self.profiles[0].gpu


def expand_files(values: Sequence[Path | str]) -> list[Path]:
    """Expand paths, patterns (``"rank*.json.gz"``) and archives with several traces to files, without repetition.

    Raises ``InputError`` for a pattern without matches.
    """
    found: dict[Path, None] = {}
    for value in values:
        text = str(value)
        paths = [Path(text)]
        if _WILD & set(text) and not Path(text).exists():
            paths = [Path(name) for name in sorted(glob.glob(text))]
            if not paths:
                raise InputError(f"{text}: no file fits this pattern; check the path")
        for path in paths:
            found.update(dict.fromkeys(_members(path)))
    return list(found)


def _members(path: Path) -> list[Path]:
    if path.is_file() and path.name.endswith(_ARCHIVES):
        return [path / name for name in archive_members(path)]
    return [path]


def read_recorded_run(kineto: Sequence[Path | str], traces: Sequence[Path | str] = ()) -> RecordedRun:
    """Read all files and link every profile with the execution trace of its process, if ``traces`` are given.

    Raises ``InputError`` if two profiles are of one rank, ranks or their traces are missing, or the GPUs differ.
    """
    profiles = sorted((read_kineto(path) for path in expand_files(kineto)), key=lambda profile: profile.rank)
    _check(profiles)
    links: dict[int, LinkedTrace] = {}
    left = [read_execution_trace(path) for path in expand_files(traces)]
    if left and len(left) != len(profiles):
        raise InputError(
            f"{len(left)} execution traces and {len(profiles)} profiles; give --trace and --kineto of the same ranks"
        )
    for profile in profiles if left else ():
        linked = _partner(profile, left)
        links[profile.rank] = linked
        left.remove(linked.trace)
    return RecordedRun(tuple(profiles), links)


def _check(profiles: Sequence[KinetoTrace]) -> None:
    by_rank: dict[int, KinetoTrace] = {}
    for profile in profiles:
        other = by_rank.setdefault(profile.rank, profile)
        if other is not profile:
            raise InputError(f"{other.source} and {profile.source} are both of rank {profile.rank}; give one of them")
        if profile.gpu != profiles[0].gpu:
            raise InputError(
                f"{profiles[0].source} was recorded on {profiles[0].gpu}, {profile.source} on {profile.gpu}; "
                "give ranks of one kind of GPU"
            )
    world = max((profile.world_size for profile in profiles), default=1)
    missing = sorted(set(range(world)) - by_rank.keys())
    if len(profiles) > 1 and missing:
        ranks = ", ".join(str(rank) for rank in missing[:8])
        raise InputError(
            f"{profiles[0].source}: the job has {world} ranks, but there is no profile of rank {ranks}; give them all"
        )


def _partner(profile: KinetoTrace, traces: Sequence[OperatorTrace]) -> LinkedTrace:
    """Link with the first trace of the same process or, without process ids, with the first one that fits."""
    same = [trace for trace in traces if trace.pid == profile.pid and trace.pid]
    if not same and len(traces) > 1:
        same = [trace for trace in traces if not (trace.pid and profile.pid)]
    reason: InputError | None = None
    for trace in same or traces[:1]:
        try:
            return link(trace, profile)
        except InputError as error:
            reason = reason or error
    raise reason or InputError(f"{profile.source}: no execution trace of its process; give --trace of every rank")
