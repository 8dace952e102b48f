"""CPU cores available to this process: its affinity mask, limited by the CPU quota of its container.

``docker run --cpus 2`` and Kubernetes limits leave all cores of the host in the affinity mask and stop the whole
process as soon as its share of a period of 100 ms is used up: threads beyond the quota only make all of them wait.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from costmodel.base.errors import InputError

_ROOT = Path("/")
_GROUPS = PurePosixPath("sys/fs/cgroup")


def usable_cores(root: Path = _ROOT) -> int:
    """Number of cores in the affinity mask, at most the whole cores of the CPU quota of every enclosing control
    group.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = core_quota(root)
    return cores if quota is None else max(1, min(cores, int(quota)))


def threads_to_use(asked: int | None, default: int) -> int:
    """Return ``asked``, or ``default`` limited to the number of usable cores: more threads would spin waiting for each
    other.

    Raises ``InputError`` if ``asked`` exceeds the usable cores.
    """
    cores = usable_cores()
    if asked is not None and asked > cores:
        raise InputError(f"--threads {asked}: this process may use {cores} core{'s' * (cores > 1)}")
    return min(default, cores) if asked is None else asked


def core_quota(root: Path = _ROOT) -> float | None:
    """CPU quota of the control groups (version 1 or 2), in processor seconds per second; ``None`` if unlimited.

    ``root``: folder that holds ``proc`` and ``sys``.
    """
    quotas = [quota for folder in _folders(root) if (quota := _quota(folder)) is not None]
    return min(quotas, default=None)


def _folders(root: Path) -> Iterator[Path]:
    """Folders of this process's control groups that may limit its CPU time, up to the root of the hierarchy."""
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            mounts = [_GROUPS, _GROUPS / "unified"]
        elif "cpu" in controllers.split(","):
            mounts = [_GROUPS / controllers, _GROUPS / "cpu"]
        else:
            continue
        # Inside a container the path may be the host's; then only its end, or nothing of it, is mounted here.
        inside = PurePosixPath(group.lstrip("/"))
        for mount in mounts:
            yield from (root / mount / each for each in (inside, *inside.parents))


def _quota(folder: Path) -> float | None:
    try:
        if (folder / "cpu.max").is_file():
            limit, period = (folder / "cpu.max").read_text(encoding="utf-8").split()
        else:
            limit = (folder / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (folder / "cpu.cfs_period_us").read_text(encoding="utf-8")
        return int(limit) / int(period) if int(limit) > 0 else None
    except (OSError, ValueError, ZeroDivisionError):  # no such controller, or "max"
        return None
