"""CPUs with times in a folder of tuning records."""

from __future__ import annotations

import re
from pathlib import Path

from costmodel.base.foreign_files import read_text
from schedules.contract.cpu_target import CpuTarget, target_with
from schedules.records.record_store import RECORDS
from schedules.records.tuning_records import parse_line

_KEY = re.compile(r"([^/]+)/([^/]*)/l1=(\d+)/l2=(\d+)/threads=(\d+)")


def recorded_cpus(directory: Path) -> list[CpuTarget]:
    """CPUs in the order of their first record; foreign and unfinished lines are ignored."""
    try:
        lines = read_text(directory / RECORDS, "table").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    keys: dict[str, None] = {}
    for line in lines:
        try:
            entry = parse_line(line)
        except ValueError:
            continue
        if entry is not None:
            keys[entry[1]["cpu"]] = None
    return [cpu for key in keys if (cpu := _from_key(key)) is not None]


def _from_key(key: str) -> CpuTarget | None:
    """CPU with this :attr:`schedules.contract.cpu_target.CpuTarget.key`, or None."""
    match = _KEY.fullmatch(key)
    if match is None:
        return None
    mcpu, features, l1, l2, threads = match.groups()
    cpu = target_with(frozenset(filter(None, features.split("+"))), int(threads), int(l1), int(l2), mcpu)
    return cpu if cpu.key == key else None
