"""Rendezvous of ranks in collectives: arrivals, agreement checks, start of the transfer.

All ranks of a group meet by (group, sequence). The transfer starts when the last rank is ready and takes the longest of
the given durations; all ranks end together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from costmodel.base.errors import SimulationError
from e2e.step.collective_names import POINT_TO_POINT, same_kind
from e2e.step.execution_graph import Collective

# Kinds in which every rank contributes the same size; in others (broadcast, all-to-all) sizes may differ.
SAME_SIZE = frozenset({"all_reduce", "all_gather", "reduce_scatter"})

# (iteration, group, sequence)
MeetingKey = tuple[int, str, int]


@dataclass(frozen=True, slots=True)
class Arrival:
    """Task of a rank that is ready for its collective."""

    # Position of the rank in the graph.
    position: int
    task: int
    stream: int
    # Time at which it began to wait.
    start: float


@dataclass(frozen=True, slots=True)
class _Group:
    members: frozenset[int]
    expected: int


@dataclass(slots=True)
class Meeting:
    """One collective while its ranks arrive."""

    collective: Collective
    group: _Group
    # Longest given duration of the transfer.
    seconds: float = 0.0
    # Arrivals by rank.
    arrivals: dict[int, Arrival] = field(default_factory=dict)

    def last(self) -> Arrival:
        """Return the last arrival; ties: the lowest rank."""
        rank = max(self.arrivals, key=lambda rank: (self.arrivals[rank].start, -rank))
        return self.arrivals[rank]


class Rendezvous:
    """All collectives of one simulation. ``ranks``: rank -> number of identical ranks that it represents."""

    def __init__(self, ranks: Mapping[int, int], prefix: str = "") -> None:
        self._ranks = ranks
        self._folded = sum(ranks.values()) - len(ranks)
        self._prefix = prefix
        self._groups: dict[tuple[int, ...], _Group] = {}
        self._closed: set[MeetingKey] = set()
        self.open: dict[MeetingKey, Meeting] = {}

    def arrive(
        self, iteration: int, collective: Collective, rank: int, arrival: Arrival, seconds: float
    ) -> Meeting | None:
        """Register an arrival; return the meeting if it is now complete, else ``None``.

        Raises :class:`SimulationError` if the ranks disagree.
        """
        key = (iteration, collective.group, collective.sequence)
        meeting = self.open.get(key)
        if meeting is None:
            meeting = self._begin(key, collective, rank)
        elif collective is not meeting.collective:
            self._check_agreement(meeting, collective, rank)
        if rank not in meeting.group.members:
            raise self._error(collective, f"rank {rank} takes part but its ranks are {collective.ranks}; add it")
        if rank in meeting.arrivals:
            raise self._twice(collective, rank)
        meeting.arrivals[rank] = arrival
        if seconds > meeting.seconds:
            meeting.seconds = seconds
        if len(meeting.arrivals) < meeting.group.expected:
            return None
        del self.open[key]
        self._closed.add(key)
        return meeting

    def missing(self, meeting: Meeting) -> list[int]:
        """Return the sorted ranks of the graph that have not arrived."""
        return sorted(rank for rank in meeting.group.members if rank in self._ranks and rank not in meeting.arrivals)

    def _begin(self, key: MeetingKey, collective: Collective, rank: int) -> Meeting:
        if key in self._closed:
            raise self._twice(collective, rank)
        group = self._groups.get(collective.ranks)
        if group is None:
            group = self._groups[collective.ranks] = self._make_group(collective, rank)
        if collective.kind in POINT_TO_POINT and len(collective.ranks) != 2:
            raise self._error(collective, f"has {len(collective.ranks)} ranks; give it the two that take part")
        meeting = self.open[key] = Meeting(collective, group)
        return meeting

    def _make_group(self, collective: Collective, rank: int) -> _Group:
        """Make the group of a collective: its members and how many the graph has.

        The others must be folded into these.
        """
        members = frozenset(collective.ranks)
        if len(members) != len(collective.ranks):
            raise self._error(
                collective, f"rank {rank} lists a rank of the group twice: {collective.ranks}; name each once"
            )
        absent = sorted(members - self._ranks.keys())
        if len(absent) > self._folded:
            raise self._error(
                collective,
                f"rank {rank} waits for rank {absent[0]}, which is not in the graph; add it, or give the multiplicity "
                "of the rank that stands for it",
            )
        return _Group(members, len(members) - len(absent))

    def _check_agreement(self, meeting: Meeting, collective: Collective, rank: int) -> None:
        first, other = meeting.collective, next(iter(meeting.arrivals))
        if collective.ranks != first.ranks and sorted(collective.ranks) != sorted(first.ranks):
            ranks = (
                f"rank {other} has ranks {first.ranks}, rank {rank} has {collective.ranks}; give both the same group"
            )
            raise self._error(first, ranks)
        if not same_kind(collective.kind, first.kind):
            kinds = f"rank {other} calls {first.kind}, rank {rank} calls {collective.kind}; let both call the same"
            raise self._error(first, kinds)
        if collective.size_bytes != first.size_bytes and first.kind in SAME_SIZE:
            sizes = f"rank {other} has {first.size_bytes} bytes, rank {rank} has {collective.size_bytes} bytes"
            raise self._error(first, f"{sizes}; give both the same size")
        if first.kind in POINT_TO_POINT:
            self._check_message(first, other, collective, rank)

    def _check_message(self, first: Collective, other: int, collective: Collective, rank: int) -> None:
        """Check that the sizes of send and receive agree.

        The receive may give 0 if its source does not record a size.
        """
        ends = {first.kind: (other, first.size_bytes), collective.kind: (rank, collective.size_bytes)}
        (sender, sent), (receiver, received) = ends["send"], ends["recv"]
        if received and sent != received:
            problem = f"rank {sender} sends {sent} bytes, rank {receiver} receives {received}; give both the same size"
            raise self._error(first, problem)

    def _twice(self, collective: Collective, rank: int) -> SimulationError:
        return self._error(collective, f"rank {rank} takes part twice; number the collectives of a group one by one")

    def _error(self, collective: Collective, problem: str) -> SimulationError:
        return SimulationError(f"{self._prefix}{describe(collective)}: {problem}")


def describe(collective: Collective) -> str:
    """Label for messages: kind, group and sequence number."""
    return f"{collective.kind} (group {collective.group!r}, sequence {collective.sequence})"
