"""Attribution of one rank's time: its critical path, with waiting only while the rank had nothing else to do.

While a rank waits in a collective, kernels may run on its other streams. On the critical path such time is waiting,
because faster kernels would not end it; here it is attributed to these kernels (then to other transfers under way), so
that ``collective wait`` and ``bubble`` are time in which the rank did nothing.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from e2e.explain.critical_path import CriticalPath, SegmentKind, task_kind
from e2e.simulate.timeline import Timeline
from e2e.step.execution_graph import RankGraph

WAITS: tuple[SegmentKind, ...] = ("collective wait", "bubble")
Interval = tuple[float, float]


def rank_attribution(path: CriticalPath, graph: RankGraph, timeline: Timeline) -> Mapping[str, float]:
    """Seconds by kind, in descending order; they sum to the window of ``path``, which is that of this rank alone."""
    parts: dict[str, list[float]] = {}
    busy: tuple[_Busy, _Busy] | None = None
    for segment in path.segments:
        if segment.kind not in WAITS:
            parts.setdefault(segment.kind, []).append(segment.seconds)
            continue
        busy = busy or _busy(graph, timeline, path.window)
        left = [(segment.start, segment.start + segment.seconds)]
        for layer in busy:
            gaps: list[Interval] = []
            for interval in left:
                gaps.extend(layer.take(interval, parts))
            left = gaps
        parts.setdefault(segment.kind, []).extend(end - start for start, end in left)
    sums = {kind: math.fsum(values) for kind, values in parts.items()}
    return dict(sorted(((kind, value) for kind, value in sums.items() if value), key=lambda item: -item[1]))


def _busy(graph: RankGraph, timeline: Timeline, window: Interval) -> tuple[_Busy, _Busy]:
    """Intervals of kernels and copies, and of transfers under way."""
    kernels: list[tuple[float, float, SegmentKind]] = []
    transfers: list[tuple[float, float, SegmentKind]] = []
    kinds = [task_kind(task) for task in graph.tasks]
    ready, end = timeline.task_times(graph.rank)
    for iteration, task in np.argwhere((end > window[0]) & (ready < window[1])).tolist():
        group = kernels if graph.tasks[task].collective is None else transfers
        group.append((float(ready[iteration, task]), float(end[iteration, task]), kinds[task]))
    return _Busy.of(kernels), _Busy.of(transfers)


@dataclass(frozen=True)
class _Busy:
    """Sorted disjoint intervals with the kind of work in each."""

    starts: list[float]
    ends: list[float]
    kinds: list[SegmentKind]

    @staticmethod
    def of(intervals: Iterable[tuple[float, float, SegmentKind]]) -> _Busy:
        """Build from intervals; where they overlap, the one that began first counts."""
        made = _Busy([], [], [])
        reached = -math.inf
        for start, end, kind in sorted(intervals):
            if end > max(start, reached):
                made.starts.append(max(start, reached))
                made.ends.append(end)
                made.kinds.append(kind)
                reached = end
        return made

    def take(self, interval: Interval, parts: dict[str, list[float]]) -> Iterator[Interval]:
        """Add the time covered within ``interval`` to ``parts`` and yield the gaps."""
        now, end = interval
        place = max(bisect_right(self.starts, now) - 1, 0)
        while place < len(self.starts) and self.starts[place] < end:
            begin, until = max(self.starts[place], now), min(self.ends[place], end)
            if until > begin:
                if begin > now:
                    yield now, begin
                parts.setdefault(self.kinds[place], []).append(until - begin)
                now = until
            place += 1
        if end > now:
            yield now, end
