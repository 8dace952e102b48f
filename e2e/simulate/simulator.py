"""Discrete-event simulation of an execution graph: the time of every action and task, and its cause.

A thread runs on through its program, the times of a task are known as soon as it is launched on a free stream, and
ranks interact only in collectives; so a work-list of ranks is enough, without a calendar of all events. Only transfers
that use links (:attr:`Task.links`) and kernels that overlap with collectives (:attr:`Task.load`) have a calendar: it
advances when no rank can, so that nothing begins before its present moment.

Semantics:

- A wait for an event refers to its last record before the wait or, without one, to its first record after it.
- All ranks of a group meet by (group, sequence) in a :class:`Rendezvous`. A collective occupies its stream from when it
  is ready there, waiting included, to its end on all ranks; the transfer starts when the last rank is ready and takes
  the longest of their durations. Ranks must agree on kind, group and size.
- Concurrent transfers on one link share it (:mod:`e2e.simulate.link_sharing`) and then take longer than alone; so do
  kernels and collectives on one GPU, if both have a load.
- With ``starts``, all threads of a rank begin that many seconds after zero.
- Calls of different threads on one stream are ordered by time. So a longer host overhead can swap two tasks and, as in
  every list schedule, even shorten a step; with one stream per thread it cannot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf

from costmodel.base.errors import SimulationError
from e2e.simulate.instructions import action_label, compile_graph, error_prefix
from e2e.simulate.link_sharing import LinkSharing, LinkTransfer
from e2e.simulate.simulated_rank import HostThreads
from e2e.simulate.timeline import Timeline, build_timeline
from e2e.step.collective_names import POINT_TO_POINT, same_kind
from e2e.step.execution_graph import Collective, ExecutionGraph, RankGraph

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
        return SimulationError(f"{self._prefix}{describe_collective(collective)}: {problem}")


def describe_collective(collective: Collective) -> str:
    """Label for messages: kind, group and sequence number."""
    return f"{collective.kind} (group {collective.group!r}, sequence {collective.sequence})"


def check_ended(graph: ExecutionGraph, hosts: Sequence[HostThreads], rendezvous: Rendezvous) -> None:
    """Raise :class:`SimulationError` naming rank, operation and sequence number of the first action that never ends."""
    if rendezvous.open:
        raise SimulationError(_Deadlock(graph, hosts, rendezvous).unmet())
    for host, rank in zip(hosts, graph.ranks, strict=True):
        prefix = f"{error_prefix(graph)}rank {rank.rank}"
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
                f"{error_prefix(graph)}{describe_collective(collective)}: rank {alone} has no partner: rank {other} is "
                "not in the graph, and no rank of the graph does the opposite with one that is not; name the rank that "
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
            f"{error_prefix(self._graph)}{describe_collective(meeting.collective)}: rank {rank} waits in {name!r} for "
            f"rank {missing}, which never arrives: {self._reason(missing, meeting, [rank])}; "
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
    return f"thread {thread!r}, action {place} ({action_label(rank.threads[thread][place], rank)})"


# Least number of iterations whose second half without the last one has at least two.
ENOUGH_ITERATIONS = 6


@dataclass(frozen=True)
class SteadyState:
    """Result of simulating consecutive iterations."""

    timeline: Timeline
    # Mean seconds of one iteration, over the second half; without the last one if there are six or more.
    period_seconds: float
    # Difference between the longest and the shortest of these iterations, relative to the longest.
    spread: float

    @property
    def settled(self) -> bool:
        """True if these iterations took the same time to a millionth, so that more iterations would not change it."""
        return self.spread <= 1e-6


def simulate(graph: ExecutionGraph, starts: Mapping[int, float] | None = None) -> Timeline:
    """Simulate one iteration from an idle start. ``starts``: rank -> seconds by which it begins late.

    Raises :class:`SimulationError` for a graph that is not priced or does not end.
    """
    return _Simulation(graph, 1, starts or {}).run()


def simulate_iterations(graph: ExecutionGraph, count: int = 8) -> SteadyState:
    """Simulate ``count`` iterations: a thread begins the next one when it has ended the last; streams carry over.

    So the host may run ahead of the device without limit. Events and flags belong to one iteration.
    """
    if count < 2:
        raise SimulationError(f"{error_prefix(graph)}{count} iterations have no steady state; ask for two or more")
    timeline = _Simulation(graph, count, {}).run()
    # The last iteration is left out: no transfers of a next one share its links, so it ends earlier.
    periods = timeline.iteration_seconds[: -1 if count >= ENOUGH_ITERATIONS else count]
    late = periods[count // 2 :]
    spread = (max(late) - min(late)) / max(late) if max(late) > 0 else 0.0
    return SteadyState(timeline, sum(late) / len(late), spread)


class _Simulation:
    def __init__(self, graph: ExecutionGraph, iterations: int, starts: Mapping[int, float]) -> None:
        self._graph = graph
        self._iterations = iterations
        self._programs = compile_graph(graph)
        self._hosts = [HostThreads(program, iterations, starts.get(program.rank, 0.0)) for program in self._programs]
        counts = {program.rank: graph.multiplicity.get(program.rank, 1) for program in self._programs}
        self._rendezvous = Rendezvous(counts, error_prefix(graph))
        self._sharing = LinkSharing()
        self._work = deque(range(len(self._hosts)))
        self._queued = [True] * len(self._hosts)

    def run(self) -> Timeline:
        if self._graph.multiplicity:
            check_folded_pairs(self._graph)
        while self._work or self._move_on():
            position = self._work.popleft()
            self._queued[position] = False
            self._hosts[position].advance()
            if self._hosts[position].streams.arriving:
                self._arrange([position])
                self._queue(position)
        check_ended(self._graph, self._hosts, self._rendezvous)
        return build_timeline(self._graph, self._programs, self._hosts, self._iterations)

    def _move_on(self) -> bool:
        """Let the earliest pending event happen when no rank can go on; return ``False`` if there is none."""
        position, bound = self._earliest_held()
        while not self._work:
            moment = self._sharing.next_moment()
            if min(bound, moment) == inf:
                return False
            # An end at the same moment may wake a thread that comes first.
            if moment <= bound:
                transfer = self._sharing.step()
                if transfer is None:
                    continue
                if isinstance(transfer.what, Meeting):
                    self._arrange(self._finish(transfer.what, transfer.start, moment))
                else:
                    self._finish_kernel(transfer, moment)
            else:
                self._hosts[position].lift()
                self._queue(position)
        return True

    def _queue(self, position: int) -> None:
        if not self._queued[position]:
            self._queued[position] = True
            self._work.append(position)

    def _earliest_held(self) -> tuple[int, float]:
        """Position of the rank whose held thread acts first in the whole graph, and the time of that.

        Infinity if none.
        """
        held = [
            (host.held.bound, host.program.rank, at) for at, host in enumerate(self._hosts) if host.held is not None
        ]
        if not held:
            return 0, inf
        bound, _, position = min(held)
        return position, bound

    def _arrange(self, changed: list[int]) -> None:
        """Register the collectives that became ready on these ranks, and all that follow from them."""
        while changed:
            at = changed.pop()
            arriving = self._hosts[at].streams.arriving
            while arriving:
                meeting = self._arrive(at, *arriving.pop())
                if meeting is not None:
                    changed.extend(self._transfer(meeting))

    def _arrive(self, position: int, task: int, slot: int, start: float) -> Meeting | None:
        program = self._programs[position]
        iteration, place = divmod(task, program.tasks)
        if place not in program.collectives:
            what = position, task, slot
            busy = program.loads[place].memory
            self._sharing.add_kernel(what, start, program.seconds[place], _memory_of(program.rank), busy)
            return None
        collective, seconds = program.collectives[place]
        arrival = Arrival(position, task, slot, start)
        return self._rendezvous.arrive(iteration, collective, program.rank, arrival, seconds)

    def _transfer(self, meeting: Meeting) -> list[int]:
        """Start the transfer of a complete meeting.

        Its end is known now, or depends on the other users of its links.
        """
        start = meeting.last().start
        links: dict[str, float] = {}
        held: dict[str, float] = {}
        for arrival in meeting.arrivals.values():
            program = self._programs[arrival.position]
            place = arrival.task % program.tasks
            for name, share in program.links.get(place, ()):
                links[name] = max(share, links.get(name, 0.0))
            load = program.loads.get(place)
            if load is not None:
                name = _memory_of(program.rank)
                links[name], held[name] = load.memory, load.held
        if links:
            self._sharing.add(meeting, start, meeting.seconds, links, held)
            return []
        return self._finish(meeting, start, start + meeting.seconds)

    def _finish_kernel(self, kernel: LinkTransfer, end: float) -> None:
        """End a kernel and advance its rank as far as no host thread is needed."""
        position, task, slot = kernel.what
        host, program = self._hosts[position], self._programs[position]
        following = host.streams.follower(slot, end)
        if following is not None:
            place = following % program.tasks
            if place not in program.collectives:
                host.streams.follow(task, slot, end)
                what = position, following, slot
                self._sharing.succeed(kernel, what, program.seconds[place], program.loads[place].memory, end)
                return
        self._sharing.leave(kernel, end)
        host.streams.finish(task, slot, end)
        if host.settle():
            self._queue(position)
        if host.streams.arriving:
            self._arrange([position])

    def _finish(self, meeting: Meeting, start: float, end: float) -> list[int]:
        """End a collective on all its ranks; return those on which further collectives became ready."""
        last = meeting.last()
        changed = []
        for arrival in meeting.arrivals.values():
            host = self._hosts[arrival.position]
            host.streams.finish_collective(arrival.task, arrival.stream, start, end, (last.position, last.task))
            host.settle()
            self._queue(arrival.position)
            if host.streams.arriving:
                changed.append(arrival.position)
        return changed


def _memory_of(rank: int) -> str:
    """Link name of the memory of a rank's GPU."""
    return f"memory of gpu {rank}"
