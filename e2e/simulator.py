"""Discrete-event simulation of an execution graph: when everything happens, and why then.

Nothing here keeps a global calendar. A thread runs on through its program, a task's times are known as soon as it is
launched on a free stream, and ranks meet only in collectives; so a work-list of ranks is enough.

What a reader of the results should know:

- A wait for an event means the event as recorded last before the wait; if there is none yet, as recorded first after.
- A collective holds its stream from when it is ready there, waiting included, to its end on all ranks.
- Calls of different threads on one stream take their places in the order of time. So a longer host overhead can swap
  two tasks, and then, as in every list schedule, even shorten a step; with streams of their own it cannot.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from costmodel.errors import SimulationError
from e2e.graph import ExecutionGraph
from e2e.host import Host
from e2e.program import compile_graph, describe, where
from e2e.rendezvous import Arrival, Meeting, Rendezvous
from e2e.rendezvous import describe as describe_collective
from e2e.timeline import Timeline
from e2e.timeline_builder import build_timeline


@dataclass(frozen=True)
class SteadyState:
    """Iterations one after another. ``period_seconds``: of one, after the first half of them; ``settled``: whether the
    last iterations took alike (to a millionth), so that more of them would not change it.
    """

    timeline: Timeline
    period_seconds: float
    settled: bool


def simulate(graph: ExecutionGraph) -> Timeline:
    """One iteration from a standing start; :class:`SimulationError` for a graph that is not priced or does not end."""
    return _Simulation(graph, 1).run()


def simulate_iterations(graph: ExecutionGraph, count: int = 8) -> SteadyState:
    """``count`` iterations: every thread begins the next one when it has ended the last, streams carry over.

    So the host may run ahead of the device, without limit. Events and flags belong to one iteration.
    """
    if count < 2:
        raise SimulationError(f"{where(graph)}{count} iterations have no steady state; ask for two or more")
    timeline = _Simulation(graph, count).run()
    periods = timeline.iteration_seconds
    middle = count // 2
    late = periods[middle:]
    spread = max(late) - min(late)
    return SteadyState(timeline, sum(late) / len(late), bool(spread <= 1e-6 * max(late)))


class _Simulation:
    def __init__(self, graph: ExecutionGraph, iterations: int) -> None:
        self._graph = graph
        self._iterations = iterations
        self._programs = compile_graph(graph)
        self._hosts = [Host(program, iterations) for program in self._programs]
        counts = {program.rank: graph.multiplicity.get(program.rank, 1) for program in self._programs}
        self._rendezvous = Rendezvous(counts, where(graph))
        self._work = deque(range(len(self._hosts)))
        self._queued = [True] * len(self._hosts)

    def run(self) -> Timeline:
        while self._work or self._lift_earliest():
            position = self._work.popleft()
            self._queued[position] = False
            self._hosts[position].advance()
            if self._hosts[position].streams.arriving:
                self._arrange(position)
                self._queue(position)
        self._check_ended()
        return build_timeline(self._graph, self._programs, self._hosts, self._iterations)

    def _queue(self, position: int) -> None:
        if not self._queued[position]:
            self._queued[position] = True
            self._work.append(position)

    def _lift_earliest(self) -> bool:
        """Of the ranks with a held thread, lets the one go on that acts first in the whole graph."""
        held = [
            (host.held.bound, host.program.rank, at) for at, host in enumerate(self._hosts) if host.held is not None
        ]
        if not held:
            return False
        position = min(held)[2]
        self._hosts[position].lift()
        self._queue(position)
        return True

    def _arrange(self, position: int) -> None:
        """Takes the collectives that became ready on a rank to their meetings, and what follows from those."""
        changed = [position]
        while changed:
            at = changed.pop()
            arriving = self._hosts[at].streams.arriving
            while arriving:
                meeting = self._arrive(at, *arriving.pop())
                if meeting is not None:
                    changed.extend(self._finish(meeting))

    def _arrive(self, position: int, task: int, slot: int, start: float) -> Meeting | None:
        program = self._programs[position]
        iteration, place = divmod(task, program.tasks)
        collective, seconds = program.collectives[place]
        arrival = Arrival(position, task, slot, start)
        return self._rendezvous.arrive(iteration, collective, program.rank, arrival, seconds)

    def _finish(self, meeting: Meeting) -> list[int]:
        """Ends a collective on all its ranks; returns those on which further collectives became ready."""
        last = meeting.last()
        end = last.start + meeting.seconds
        changed = []
        for arrival in meeting.arrivals.values():
            host = self._hosts[arrival.position]
            host.streams.finish_collective(arrival.task, arrival.stream, last.start, end, (last.position, last.task))
            host.settle()
            self._queue(arrival.position)
            if host.streams.arriving:
                changed.append(arrival.position)
        return changed

    # --- graphs that do not end ------------------------------------------------------------------------

    def _check_ended(self) -> None:
        """:class:`SimulationError` says which rank waits where, and for what."""
        if self._rendezvous.open:
            raise SimulationError(self._unmet())
        for host, rank in zip(self._hosts, self._graph.ranks, strict=True):
            prefix = f"{where(self._graph)}rank {rank.rank}"
            blocked = host.blocked()
            if blocked is not None:
                stream, event, recorded = blocked
                reason = "which is recorded behind that" if recorded else "which nothing records"
                raise SimulationError(f"{prefix}: stream {stream} waits forever for event {event}, {reason}")
            if host.stuck() is not None:
                raise SimulationError(
                    f"{prefix}, {self._where_stuck(host)} waits forever: nothing it waits for ever happens"
                )

    def _unmet(self) -> str:
        """The collective that has waited longest for a rank that does not come."""
        meetings = self._rendezvous.open.values()
        meeting = min(meetings, key=lambda meeting: min(arrival.start for arrival in meeting.arrivals.values()))
        rank = min(meeting.arrivals)
        missing = self._rendezvous.missing(meeting)[0]
        task = self._graph.ranks[meeting.arrivals[rank].position].tasks
        name = task[meeting.arrivals[rank].task % len(task)].name
        return (
            f"{where(self._graph)}{describe_collective(meeting.collective)}: rank {rank} waits in {name!r} for rank "
            f"{missing}, which never arrives: {self._reason(missing)}"
        )

    def _reason(self, rank: int) -> str:
        for meeting in self._rendezvous.open.values():
            if rank in meeting.arrivals:
                return f"it waits in {describe_collective(meeting.collective)}; the order of collectives differs"
        host = next(host for host in self._hosts if host.program.rank == rank)
        if host.stuck() is not None:
            return f"its {self._where_stuck(host)} does not end"
        return "it ends without this call"

    def _where_stuck(self, host: Host) -> str:
        stuck = host.stuck()
        assert stuck is not None
        thread, place = stuck
        graph = next(rank for rank in self._graph.ranks if rank.rank == host.program.rank)
        return f"thread {thread!r}, action {place} ({describe(graph.threads[thread][place], graph)})"
