"""Figures of every collective of a simulated step: transfer, waiting, and the last rank to arrive.

The cause of a late rank is on its path (``waits_for`` in :mod:`e2e.explain.critical_path`); the composition of its
whole step is in :mod:`e2e.explain.rank_attribution`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from e2e.simulate.timeline import Timeline
from e2e.step.collective_names import POINT_TO_POINT
from e2e.step.execution_graph import ExecutionGraph, Task


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


def stragglers(figures: Sequence[CollectiveFigures]) -> list[Straggler]:
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
