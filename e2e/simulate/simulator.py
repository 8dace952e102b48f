"""Discrete-event simulation of an execution graph: the time of every action and task, and its cause.

A thread runs on through its program, the times of a task are known as soon as it is launched on a free stream, and
ranks interact only in collectives; so a work-list of ranks is enough, without a calendar of all events. Only transfers
that use links (:attr:`Task.links`) and kernels that overlap with collectives (:attr:`Task.load`) have a calendar: it
advances when no rank can, so that nothing begins before its present moment.

Semantics:

- A wait for an event refers to its last record before the wait or, without one, to its first record after it.
- A collective occupies its stream from when it is ready there, waiting included, to its end on all ranks.
- Concurrent transfers on one link share it (:mod:`e2e.simulate.link_sharing`) and then take longer than alone; so do
  kernels and collectives on one GPU, if both have a load.
- With ``starts``, all threads of a rank begin that many seconds after zero.
- Calls of different threads on one stream are ordered by time. So a longer host overhead can swap two tasks and, as in
  every list schedule, even shorten a step; with one stream per thread it cannot.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from math import inf

from costmodel.base.errors import SimulationError
from e2e.simulate.instructions import compile_graph, where
from e2e.simulate.link_sharing import LinkSharing, LinkTransfer
from e2e.simulate.rendezvous import Arrival, Meeting, Rendezvous, check_ended, check_folded_pairs
from e2e.simulate.simulated_rank import HostThreads
from e2e.simulate.timeline import Timeline, build_timeline
from e2e.step.execution_graph import ExecutionGraph

# Least number of iterations whose second half without the last one has at least two.
ENOUGH_ITERATIONS = 6


@dataclass(frozen=True)
class SteadyState:
    """Result of simulating consecutive iterations."""

    timeline: Timeline
    # Mean seconds of one iteration, over the second half without the last one.
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
        raise SimulationError(f"{where(graph)}{count} iterations have no steady state; ask for two or more")
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
        self._rendezvous = Rendezvous(counts, where(graph))
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
