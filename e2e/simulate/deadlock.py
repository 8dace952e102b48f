"""Error messages for a simulation that does not end: which rank waits where, for what, and in which cycle."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.base.errors import SimulationError
from e2e.simulate.host_threads import HostThreads
from e2e.simulate.instructions import describe, where
from e2e.simulate.rendezvous import Meeting, Rendezvous
from e2e.simulate.rendezvous import describe as describe_collective
from e2e.step.collective_names import POINT_TO_POINT
from e2e.step.execution_graph import Collective, ExecutionGraph, RankGraph


def check_ended(graph: ExecutionGraph, hosts: Sequence[HostThreads], rendezvous: Rendezvous) -> None:
    """Raise :class:`SimulationError` naming rank, operation and sequence number of the first action that never ends."""
    if rendezvous.open:
        raise SimulationError(_Deadlock(graph, hosts, rendezvous).unmet())
    for host, rank in zip(hosts, graph.ranks, strict=True):
        prefix = f"{where(graph)}rank {rank.rank}"
        blocked = host.blocked()
        if blocked is not None:
            stream, event, recorded = blocked
            reason = "which is recorded behind that" if recorded else "which nothing records"
            raise SimulationError(
                f"{prefix}: stream {stream} waits forever for event {event}, {reason}; record the event before the wait"
            )
        if host.stuck() is not None:
            raise SimulationError(
                f"{prefix}, {_stuck(host, rank)} waits forever: nothing it waits for ever happens; remove that wait"
            )


def check_folded_pairs(graph: ExecutionGraph) -> None:
    """Check that sends to folded ranks are balanced by receives from folded ranks, as in a ring of identical ranks.

    Raises :class:`SimulationError` for the first send or receive without a partner.
    """
    here = {rank.rank for rank in graph.ranks}
    balance: dict[int, int] = {}
    example: dict[tuple[int, int], tuple[int, Collective]] = {}
    for rank in graph.ranks:
        for task in rank.tasks:
            collective = task.collective
            if collective is None or collective.kind not in POINT_TO_POINT or here.issuperset(collective.ranks):
                continue
            sign = 1 if collective.kind == "send" else -1
            size = collective.size_bytes
            balance[size] = balance.get(size, 0) + sign * graph.multiplicity.get(rank.rank, 1)
            example.setdefault((size, sign), (rank.rank, collective))
    for size, surplus in balance.items():
        if surplus and not (0 in balance and sum(balance.values()) == 0):
            alone, collective = example[size, 1 if surplus > 0 else -1]
            other = next(each for each in collective.ranks if each != alone)
            raise SimulationError(
                f"{where(graph)}{describe_collective(collective)}: rank {alone} has no partner: rank {other} is not in "
                "the graph, and no rank of the graph does the opposite with one that is not; name the rank that "
                "stands for it, or add it"
            )


class _Deadlock:
    def __init__(self, graph: ExecutionGraph, hosts: Sequence[HostThreads], rendezvous: Rendezvous) -> None:
        self._graph, self._rendezvous = graph, rendezvous
        self._hosts = {host.program.rank: host for host in hosts}
        self._ranks = {rank.rank: rank for rank in graph.ranks}

    def unmet(self) -> str:
        """Return the message about the collective that has waited longest for a missing rank, with the reason.

        Collectives that the missing rank never calls are preferred, as the root cause: a rank that waits longer
        elsewhere may be in its next iteration.
        """
        meetings = list(self._rendezvous.open.values())
        found = [meeting for meeting in meetings if self._never_call(meeting)] or meetings
        meeting = min(found, key=lambda meeting: min(arrival.start for arrival in meeting.arrivals.values()))
        rank = min(meeting.arrivals)
        missing = (self._never_call(meeting) or self._rendezvous.missing(meeting))[0]
        tasks = self._ranks[rank].tasks
        name = tasks[meeting.arrivals[rank].task % len(tasks)].name
        return (
            f"{where(self._graph)}{describe_collective(meeting.collective)}: rank {rank} waits in {name!r} for rank "
            f"{missing}, which never arrives: {self._reason(missing, meeting, [rank])}; "
            "let all ranks of a group call the same"
        )

    def _never_call(self, meeting: Meeting) -> list[int]:
        """Return the missing ranks whose programs do not contain this call."""
        group, sequence = meeting.collective.group, meeting.collective.sequence
        missing = self._rendezvous.missing(meeting)
        return [rank for rank in missing if all(call.sequence != sequence for call in self._calls(rank, group))]

    def _reason(self, rank: int, meeting: Meeting, before: list[int]) -> str:
        """Reason why ``rank`` does not arrive at ``meeting``.

        ``before``: ranks that wait for it, directly or indirectly.
        """
        calls = self._calls(rank, meeting.collective.group)
        if not any(call.sequence == meeting.collective.sequence for call in calls):
            last = max(calls, key=lambda call: call.sequence, default=None)
            known = "it has none of this group" if last is None else f"its last of this group is {last.sequence}"
            return f"it ends without this call ({known})"
        other = self._waits_in(rank)
        if other is not None:
            return self._chain(rank, other, before)
        host = self._hosts[rank]
        if host.stuck() is not None:
            return f"its {_stuck(host, self._ranks[rank])} does not end"
        blocked = host.blocked()
        if blocked is not None:
            return f"its stream {blocked[0]} waits for event {blocked[1]}, which is never reached"
        return "it ends without this call"

    def _chain(self, rank: int, other: Meeting, before: list[int]) -> str:
        """Describe whom ``rank``, itself waiting in ``other``, waits for, recursively until a rank repeats."""
        target = self._rendezvous.missing(other)[0]
        found = f"it waits in {describe_collective(other.collective)} for rank {target}"
        if target in before or target == rank:
            circle = [*before[before.index(target) :], rank] if target in before else [rank]
            ranks = ", ".join(str(each) for each in circle)
            return f"{found}; a circle of ranks {ranks}: the order of collectives differs"
        return f"{found}, which never arrives: {self._reason(target, other, [*before, rank])}"

    def _waits_in(self, rank: int) -> Meeting | None:
        """Return the open collective in which ``rank`` has waited longest, or ``None``."""
        found = [meeting for meeting in self._rendezvous.open.values() if rank in meeting.arrivals]
        return min(found, key=lambda meeting: meeting.arrivals[rank].start, default=None)

    def _calls(self, rank: int, group: str) -> list[Collective]:
        tasks = self._ranks[rank].tasks
        return [task.collective for task in tasks if task.collective is not None and task.collective.group == group]


def _stuck(host: HostThreads, rank: RankGraph) -> str:
    stuck = host.stuck()
    assert stuck is not None
    thread, place = stuck
    return f"thread {thread!r}, action {place} ({describe(rank.threads[thread][place], rank)})"
