"""Figures of the ranks and collectives of a simulated step: work, waiting, memory, and the last rank to arrive.

Attribution of one rank's time is its critical path, with waiting only while the rank had nothing else to do. While a
rank waits in a collective, kernels may run on its other streams. On the critical path such time is waiting, because
faster kernels would not end it; here it is attributed to these kernels (then to other transfers under way), so that
``collective wait`` and ``bubble`` are time in which the rank did nothing.

The cause of a late rank is on its path (``waits_for`` in :mod:`e2e.explain.critical_path`).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from e2e.explain.breakdowns import kernel_count, operator_count
from e2e.explain.critical_path import CriticalPath, SegmentKind, SimulatedStep, task_kind
from e2e.simulate.timeline import Timeline
from e2e.step.collective_names import POINT_TO_POINT
from e2e.step.execution_graph import ExecutionGraph, RankGraph, Task
from e2e.step.memory import MemoryUsage
from e2e.step.memory_room import Verdict, verdict

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


_FITS: dict[Verdict, bool | None] = {"fits": True, "does not fit": False, "may not fit": None, "not known": None}


@dataclass(frozen=True)
class RankFigures:
    """Figures of one rank of the graph within one step."""

    rank: int
    # Number of identical ranks that it represents.
    multiplicity: int
    # Time from its end of the previous step to its end of this one.
    step_seconds: float
    # Time in which some kernel runs.
    compute_seconds: float
    # Time in which some collective is on a stream, waiting included.
    communication_seconds: float
    # Time in which a transfer is under way and no kernel runs.
    exposed_transfer_seconds: float
    # Time without kernels and transfers, held up by other ranks in a collective.
    exposed_wait_seconds: float
    # Time without kernels and transfers, held up by its neighbours in a pipeline.
    bubble_seconds: float
    # Time without kernels and transfers, held up by its own host, which has nothing ready.
    idle_seconds: float
    # The rank's own critical path by kind, waits included (e2e/explain/rank_figures.py); sums to the step's window.
    attribution: Mapping[str, float]
    # Part of the critical path across ranks on this rank; 0 if the step never waits for it.
    path_seconds: float = 0.0
    # Launches and operator calls of one step.
    kernels: int = 0
    operators: int = 0
    # Peak with the `reserve` of the caching allocator, where that is simulated; `memory_breakdown` sums to it.
    peak_memory_bytes: int | None = None
    memory_breakdown: Mapping[str, int] | None = None
    fits: bool | None = None

    @property
    def allocated_bytes(self) -> int | None:
        """Bytes in use at the peak, without the allocator's reserve."""
        if self.peak_memory_bytes is None:
            return None
        return self.peak_memory_bytes - (self.memory_breakdown or {}).get("reserve", 0)


def rank_figures(
    step: SimulatedStep, rank: RankGraph, path: CriticalPath, memory: MemoryUsage | None, room: int
) -> RankFigures:
    """Return the figures of ``rank``.

    ``path``: path of this rank alone; ``memory``: its usage, ``None`` if unknown; ``room``: bytes available for it.
    """
    memory = None if memory is None else memory.within(room)
    low, high = step.window
    start = 0.0 if step.starts is None else step.starts.get(rank.rank, 0.0)
    activity = step.timeline.activity(rank.rank, (max(low, min(start, high)), high))
    ends = (start, *step.timeline.rank_ends(rank.rank))
    attribution = rank_attribution(path, rank, step.timeline)
    wait, bubble = (attribution.get(kind, 0.0) for kind in WAITS)
    used = activity.compute + activity.exposed_transfer + wait + bubble
    return RankFigures(
        rank=rank.rank,
        multiplicity=step.graph.multiplicity.get(rank.rank, 1),
        step_seconds=ends[step.iteration + 1] - ends[step.iteration],
        compute_seconds=activity.compute,
        communication_seconds=activity.communication,
        exposed_transfer_seconds=activity.exposed_transfer,
        exposed_wait_seconds=wait,
        bubble_seconds=bubble,
        idle_seconds=max(activity.window - used, 0.0),
        attribution=attribution,
        path_seconds=step.path.by_rank.get(rank.rank, 0.0),
        kernels=kernel_count(rank),
        operators=operator_count(rank),
        peak_memory_bytes=None if memory is None else memory.peak_bytes,
        memory_breakdown=None if memory is None else {str(role): size for role, size in memory.breakdown.items()},
        fits=_FITS[verdict(None if memory is None else memory.allocated_bytes, room)],
    )


def memory_verdict(ranks: Sequence[RankFigures], room: int) -> Verdict:
    """Return the worst memory verdict of ``ranks``."""
    found = {verdict(rank.allocated_bytes, room) for rank in ranks}
    worst: tuple[Verdict, ...] = ("does not fit", "may not fit", "not known")
    return next((each for each in worst if each in found), "fits")


def fits_memory(found: Verdict) -> bool | None:
    """Convert a verdict to ``fits``; ``None``: too close to the capacity, or unknown for some rank."""
    return _FITS[found]


def fullest_rank(ranks: Sequence[RankFigures]) -> RankFigures | None:
    """Return the rank with the largest peak memory, ``None`` if no peak is known."""
    known = [rank for rank in ranks if rank.peak_memory_bytes is not None]
    return max(known, key=lambda rank: rank.peak_memory_bytes or 0, default=None)


@dataclass(frozen=True)
class CollectiveFigures:
    """Figures of one collective of the step."""

    name: str
    kind: str
    group: str
    sequence: int
    # Number of ranks that take part.
    ranks: int
    # The largest contribution of a rank.
    size_bytes: int
    # Time from the last arrival to the end, of which `sharing_seconds` are due to other users of the same links.
    transfer_seconds: float
    sharing_seconds: float
    # Rank of the graph -> time from its arrival to the last one.
    waiting_seconds: Mapping[int, float]
    last_rank: int
    # Begin and end of the transfer, from the start of the step.
    start_seconds: float
    end_seconds: float
    source: str

    @property
    def skew_seconds(self) -> float:
        """Seconds between the first and the last arrival."""
        return max(self.waiting_seconds.values(), default=0.0)


@dataclass(frozen=True)
class Straggler:
    """Rank that came last in ``collectives`` of the step and delayed the second last by ``caused_seconds``."""

    rank: int
    collectives: int
    caused_seconds: float


def collective_figures(graph: ExecutionGraph, timeline: Timeline, iteration: int = 0) -> list[CollectiveFigures]:
    """Return the collectives of ``iteration`` in the order in which their transfers begin."""
    taking_part: dict[tuple[str, int], list[tuple[int, Task]]] = {}
    for rank in graph.ranks:
        for task in rank.tasks:
            if task.collective is not None:
                key = (task.collective.group, task.collective.sequence)
                taking_part.setdefault(key, []).append((rank.rank, task))
    begin = timeline.window(iteration)[0]
    figures = [_figures(parties, timeline, iteration, begin) for parties in taking_part.values()]
    return sorted(figures, key=lambda each: (each.start_seconds, each.group, each.sequence))


def _figures(
    parties: Sequence[tuple[int, Task]], timeline: Timeline, iteration: int, begin: float
) -> CollectiveFigures:
    spans = {rank: timeline.task(rank, task.id, iteration) for rank, task in parties}
    first = parties[0][1]
    collective, span = first.collective, spans[parties[0][0]]
    assert collective is not None
    # Ties: the lowest rank, as in the simulator.
    last = max(spans, key=lambda rank: (spans[rank].start, -rank))
    durations = [task.duration for _, task in parties if task.duration is not None]
    alone = max(durations, key=lambda duration: duration.seconds)
    transfer = span.end - span.ready
    kind = "send_recv" if collective.kind in POINT_TO_POINT else collective.kind
    return CollectiveFigures(
        name=first.name,
        kind=kind,
        group=collective.group,
        sequence=collective.sequence,
        ranks=len(collective.ranks),
        size_bytes=max(task.collective.size_bytes for _, task in parties if task.collective is not None),
        transfer_seconds=transfer,
        sharing_seconds=max(transfer - alone.seconds, 0.0),
        waiting_seconds={rank: span.ready - span.start for rank, span in sorted(spans.items())},
        last_rank=last,
        start_seconds=span.ready - begin,
        end_seconds=span.end - begin,
        source=alone.source,
    )


def find_stragglers(figures: Sequence[CollectiveFigures]) -> list[Straggler]:
    """Return the ranks that came last in collectives of several ranks of the graph, the most costly first.

    Sends and receives are left out: in a pipeline one end always waits for the other.
    """
    counts: dict[int, int] = {}
    caused: dict[int, float] = {}
    for each in figures:
        waits = sorted(each.waiting_seconds.values())
        if len(waits) > 1 and each.kind != "send_recv" and waits[1] > 0:
            counts[each.last_rank] = counts.get(each.last_rank, 0) + 1
            caused[each.last_rank] = caused.get(each.last_rank, 0.0) + waits[1]
    found = [Straggler(rank, count, caused[rank]) for rank, count in counts.items()]
    return sorted(found, key=lambda straggler: (-straggler.caused_seconds, straggler.rank))
