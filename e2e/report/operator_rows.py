"""Operators and modules of one rank: launches, device and host time, and their part of the critical path."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from e2e.explain.breakdowns import device_seconds
from e2e.explain.critical_path import HOST_KINDS, CriticalPath
from e2e.step.execution_graph import HostWork, Launch, RankGraph

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.|$)")


@dataclass
class OperatorRow:
    """Figures of one operator within one step."""

    name: str
    launches: int = 0
    # Device time, regardless of overlap.
    device_seconds: float = 0.0
    host_seconds: float = 0.0
    # Time on the critical path; `path_host_seconds`: the part of it on the host.
    path_seconds: float = 0.0
    path_host_seconds: float = 0.0
    # Seconds by limiting resource.
    bounds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    @property
    def bound(self) -> str:
        """Limiting resource of most of its device time."""
        return max(self.bounds, key=lambda name: self.bounds[name], default="")


def operator_rows(rank: RankGraph, path: CriticalPath) -> list[OperatorRow]:
    """Return rows, most device time first. ``path``: through all ranks, or the rank's own."""
    rows: dict[str, OperatorRow] = {}

    def row(name: str) -> OperatorRow:
        return rows.setdefault(name, OperatorRow(name))

    for (name, bound), seconds in device_seconds(
        rank, lambda task, duration: (_operator(rank, task.call, task.name), duration.bound or task.kind)
    ).items():
        row(name).device_seconds += seconds
        row(name).bounds[bound] += seconds
    for name, count in Counter(
        _operator(rank, each.call, each.name) for task in rank.tasks for each in (task.kernels or (task,))
    ).items():
        row(name).launches = count
    for action in rank.actions():
        if isinstance(action, HostWork | Launch) and action.duration is not None:
            call = rank.tasks[action.task].call if isinstance(action, Launch) else action.call
            if call is not None and call in rank.calls:
                row(rank.calls[call].name).host_seconds += action.duration.seconds
    for segment in path.segments:
        if segment.rank == rank.rank and segment.operator in rows:
            rows[segment.operator].path_seconds += segment.seconds
            if segment.kind in HOST_KINDS:
                rows[segment.operator].path_host_seconds += segment.seconds
    return sorted(rows.values(), key=lambda each: (-each.device_seconds, -each.host_seconds))


def module_seconds(rank: RankGraph) -> Mapping[str, float]:
    """Device time by module, identical layers merged (``h.*.mlp``), in descending order.

    Empty if no module is known.
    """

    def module(call: int | None) -> str:
        return "" if call is None or call not in rank.calls else _NUMBER.sub("*", rank.calls[call].module)

    found = device_seconds(rank, lambda task, _: module(task.call))
    named = {name: seconds for name, seconds in found.items() if name}
    return named and {**named, **({"(none)": found[""]} if "" in found else {})}


def _operator(rank: RankGraph, call: int | None, name: str) -> str:
    return name if call is None or call not in rank.calls else rank.calls[call].name
