"""Data caches of this machine, as reported by the operating system."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

SYSFS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True)
class Cache:
    """One cache level. ``shared``: by several cores (hardware threads of one core do not count)."""

    level: int
    capacity_bytes: int
    shared: bool
    origin: str

    @property
    def name(self) -> str:
        """The level's name, such as ``L2``."""
        return f"L{self.level}"


def find_caches(sysfs: Path = SYSFS) -> tuple[Cache, ...]:
    """Data and unified caches from the core outwards; empty if none are reported.

    With ``sysfs`` other than this machine's, only its files are read.
    """
    caches = _from_sysfs(sysfs)
    if sysfs != SYSFS:
        return tuple(sorted(caches, key=lambda cache: cache.level))
    if not caches:
        caches = _from_getconf()
    return tuple(sorted(caches, key=lambda cache: cache.level))


def memory_bytes() -> int | None:
    """Available memory in bytes (Linux), else total memory; ``None`` if unknown."""
    try:
        for line in Path("/proc/meminfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        return None


def parse_size(text: str) -> int:
    """Parse a sysfs size such as ``48K`` or ``2M`` into bytes; ``ValueError`` for anything else."""
    text = text.strip()
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(text[-1:], 1)
    return int(text.rstrip("KMG")) * scale


def parse_cpu_list(text: str) -> frozenset[int]:
    """Parse a sysfs list such as ``0-3,8`` into CPU numbers."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return frozenset(cpus)


def _from_sysfs(sysfs: Path) -> list[Cache]:
    cpu = min(os.sched_getaffinity(0)) if sysfs == SYSFS else 0
    root = sysfs / f"cpu{cpu}"
    caches = []
    for index in sorted((root / "cache").glob("index*")):
        try:
            if (index / "type").read_text().strip() not in ("Data", "Unified"):
                continue
            level = int((index / "level").read_text())
            size = parse_size((index / "size").read_text())
            sharers = parse_cpu_list((index / "shared_cpu_list").read_text())
        except (OSError, ValueError):
            continue
        if size:
            # The last level belongs to the package even where this machine sees only one of its cores.
            shared = level >= 3 or not sharers <= _siblings(root, cpu)
            caches.append(Cache(level, size, shared, f"capacity from {root / 'cache' / index.name}"))
    return caches


def _siblings(root: Path, cpu: int) -> frozenset[int]:
    try:
        return parse_cpu_list((root / "topology" / "thread_siblings_list").read_text())
    except (OSError, ValueError):
        return frozenset({cpu})


def _from_getconf() -> list[Cache]:
    names = {1: "LEVEL1_DCACHE_SIZE", 2: "LEVEL2_CACHE_SIZE", 3: "LEVEL3_CACHE_SIZE"}
    caches = []
    for level, name in names.items():
        size = _command_number(["getconf", name])
        if size:
            caches.append(Cache(level, size, level >= 3, f"capacity from getconf {name}"))
    return caches


def _command_number(command: list[str]) -> int:
    """Number printed by ``command``, or 0 on failure."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
        return int(result.stdout.strip()) if result.returncode == 0 else 0
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return 0
