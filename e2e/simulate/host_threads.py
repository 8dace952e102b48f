"""Host threads of one rank during simulation.

Threads of a rank that share a stream or an event act in order of time: the thread whose next call takes effect first
goes on (ties: the first thread of the graph). A thread that waits for the device, while the end of that wait is
unknown, holds the others back at the start of its wait; the simulator lifts that bound once nothing in the whole graph
can happen earlier. So results do not depend on the order in which ranks are processed.
"""

from __future__ import annotations

from enum import Enum, auto
from math import inf, nextafter

from e2e.simulate.device_streams import LAUNCHED, Mark, Streams, action_cause
from e2e.simulate.instructions import HOST, LAUNCH, SHARED, Instruction, RankProgram, ThreadProgram


class Status(Enum):
    """State of a thread: runnable, waiting for streams (``DEVICE``), waiting for a signal (``FLAG``), or done."""

    READY = auto()
    DEVICE = auto()
    FLAG = auto()
    DONE = auto()


class Thread:
    """One host thread, from ``start`` seconds on."""

    def __init__(self, program: ThreadProgram, index: int, start: float) -> None:
        self.program = program
        self.index = index
        self.iteration = 0
        self.place = 0
        self.start = self.clock = start
        # Lower bound of the time at which the next call takes effect.
        self.bound = start
        self.status = Status.READY if program.code else Status.DONE
        # End of each action.
        self.ends: list[float] = []
        # (action, end of the wait, cause) of each wait
        self.waits: list[tuple[int, float, int]] = []
        # While waiting: the action, its cost after the wait, number of marks still to be reached, latest time so far.
        self.action = 0
        self.cost = 0.0
        self.pending = 0
        self.latest = 0.0
        self.latest_cause = LAUNCHED

    def begin_wait(self, action: int, cost: float) -> None:
        """Begin a call that waits and then takes ``cost`` seconds."""
        self.action, self.cost = action, cost
        self.latest = self.clock

    def note(self, seconds: float, cause: int) -> None:
        """Record that one of the awaited marks was reached at ``seconds``."""
        if seconds > self.latest:
            self.latest, self.latest_cause = seconds, cause

    def resume(self) -> None:
        """Continue after everything awaited has ended."""
        if self.latest > self.clock:
            self.waits.append((self.action, self.latest, self.latest_cause))
        self.clock = self.latest + self.cost
        self.ends.append(self.clock)
        self.status = Status.READY
        self.bound = self.clock


class HostThreads:
    """Threads and streams of one rank over ``iterations``.

    After :meth:`advance`, ``streams.arriving`` holds the tasks that became ready and whose end depends on others
    (mostly collectives); ``held`` is the thread that only another thread's unfinished wait keeps from going on.
    """

    def __init__(self, program: RankProgram, iterations: int, start: float = 0.0) -> None:
        self.program = program
        self.iterations = iterations
        self.streams = Streams(len(program.streams), program.tasks * iterations)
        self.threads = [Thread(thread, index, start) for index, thread in enumerate(program.threads)]
        self.held: Thread | None = None
        self._events: list[Mark | None] = [None] * (len(program.events) * iterations)
        # Flag -> (time, action that signalled it); flag -> waiting threads.
        self._signals: list[tuple[float, int] | None] = [None] * (len(program.flags) * iterations)
        self._awaiting: dict[int, list[Thread]] = {}

    def advance(self) -> None:
        """Run the threads until all have ended or wait, or until a collective is to be arranged."""
        self.held = None
        while not self.streams.arriving:
            thread, limit = self._next()
            if thread is None:
                return
            if thread.bound > limit:
                self.held = thread
                return
            self._run(thread, limit)

    def lift(self) -> None:
        """Raise the bounds of waiting threads past the held thread's next call: nothing can happen before it."""
        assert self.held is not None
        bound = nextafter(self.held.bound, inf)
        for thread in self.threads:
            if thread.status is Status.DEVICE and thread.bound < bound:
                thread.bound = bound

    def settle(self) -> bool:
        """Run all work that is no longer blocked and wake the threads that waited for it.

        Return ``True`` if any woke.
        """
        self.streams.settle()
        reached = self.streams.reached
        woken = False
        while reached:
            mark = reached.pop()
            assert mark.seconds is not None
            for thread in mark.threads:
                thread.note(mark.seconds, mark.cause)
                thread.pending -= 1
                if not thread.pending:
                    thread.resume()
                    woken = True
        return woken

    def _next(self) -> tuple[Thread | None, float]:
        """Return the next thread to run (``None``: all wait or are done) and the time limit up to which it may act."""
        ready = [thread for thread in self.threads if thread.status is Status.READY]
        if not ready:
            return None, inf
        thread = min(ready, key=_order) if len(ready) > 1 else ready[0]
        limit = inf
        if self.program.ordered:
            for other in self.threads:
                if other is not thread and (other.status is Status.READY or other.status is Status.DEVICE):
                    # Ties: the first thread of the graph goes first.
                    last = other.bound if thread.index < other.index else nextafter(other.bound, -inf)
                    limit = min(limit, last)
        return thread, limit

    def _run(self, thread: Thread, limit: float) -> None:
        """Inner loop: executes host work and launches on free streams inline.

        Every other instruction has its own method.
        """
        streams, program = self.streams, self.program
        ready, last, blocked = streams.ready, streams.last, streams.blocked
        starts, task_ends, causes = streams.starts, streams.ends, streams.causes
        code, record = thread.program.code, thread.ends.append
        clock, place, length = thread.clock, thread.place, len(thread.program.code)
        first_task = thread.iteration * program.tasks
        while place < length:
            instruction = code[place]
            operation, seconds, task, slot, work = instruction
            if operation == HOST:
                clock += seconds
                record(clock)
                place += 1
                continue
            moment = clock + seconds if operation <= SHARED else clock
            if moment > limit:
                thread.bound = moment
                break
            if operation == LAUNCH and not blocked[slot]:
                clock = moment
                record(clock)
                task += first_task
                start = ready[slot]
                if start > clock:
                    causes[task] = last[slot]
                else:
                    start = clock
                starts[task] = start
                task_ends[task] = ready[slot] = start + work
                last[slot] = task
                place += 1
                continue
            thread.clock, thread.place = clock, place
            place += 1
            stop = _RARE[operation - LAUNCH](self, thread, instruction)
            clock = thread.clock
            if stop:
                break
        thread.clock, thread.place = clock, place
        if place == length and thread.status is Status.READY:
            self._end_iteration(thread)
        thread.bound = max(thread.bound, clock)

    def _end_iteration(self, thread: Thread) -> None:
        thread.iteration += 1
        thread.place = 0
        if thread.iteration == self.iterations:
            thread.status = Status.DONE

    # --- instructions other than host work and launches on free streams; true: stop the loop ------------

    def _launch(self, thread: Thread, instruction: Instruction) -> bool:
        _, seconds, task, slot, work = instruction
        thread.clock += seconds
        thread.ends.append(thread.clock)
        self.streams.launch(thread.iteration * self.program.tasks + task, slot, thread.clock, work)
        return False

    def _shared(self, thread: Thread, instruction: Instruction) -> bool:
        _, seconds, task, slot, _ = instruction
        thread.clock += seconds
        thread.ends.append(thread.clock)
        self.streams.launch_shared(thread.iteration * self.program.tasks + task, slot, thread.clock)
        return bool(self.streams.arriving)

    def _record(self, thread: Thread, instruction: Instruction) -> bool:
        event = thread.iteration * len(self.program.events) + instruction[2]
        mark = self._events[event]
        if mark is None or mark.recorded:
            mark = self._events[event] = Mark(instruction[2])
        self.streams.put(instruction[3], mark, thread.clock, self._action(thread))
        thread.ends.append(thread.clock)
        if self.streams.unblocked or self.streams.reached:
            self.settle()
            return True
        return False

    def _wait(self, thread: Thread, instruction: Instruction) -> bool:
        self.streams.wait(instruction[3], self._mark(thread, instruction[2]))
        thread.ends.append(thread.clock)
        return False

    def _stream(self, thread: Thread, instruction: Instruction) -> bool:
        self._begin_wait(thread, instruction[1])
        self._await_stream(thread, instruction[3])
        return self._end_wait(thread)

    def _device(self, thread: Thread, instruction: Instruction) -> bool:
        self._begin_wait(thread, instruction[1])
        for slot in range(len(self.program.streams)):
            self._await_stream(thread, slot)
        return self._end_wait(thread)

    def _event(self, thread: Thread, instruction: Instruction) -> bool:
        self._begin_wait(thread, instruction[1])
        mark = self._mark(thread, instruction[2])
        if mark.seconds is None:
            mark.threads.append(thread)
            thread.pending = 1
        else:
            thread.note(mark.seconds, mark.cause)
        return self._end_wait(thread)

    def _signal(self, thread: Thread, instruction: Instruction) -> bool:
        flag = thread.iteration * len(self.program.flags) + instruction[2]
        thread.ends.append(thread.clock)
        signal = self._signals[flag] = (thread.clock, self._action(thread))
        waiting = self._awaiting.pop(flag, [])
        for other in waiting:
            other.note(signal[0], action_cause(signal[1]))
            other.resume()
        return bool(waiting)

    def _await(self, thread: Thread, instruction: Instruction) -> bool:
        flag = thread.iteration * len(self.program.flags) + instruction[2]
        signal = self._signals[flag]
        self._begin_wait(thread, 0.0)
        if signal is None:
            thread.status = Status.FLAG
            self._awaiting.setdefault(flag, []).append(thread)
            return True
        thread.note(signal[0], action_cause(signal[1]))
        thread.resume()
        return False

    # --- waiting ---------------------------------------------------------------------------------------

    def _begin_wait(self, thread: Thread, cost: float) -> None:
        thread.begin_wait(self._action(thread), cost)

    def _await_stream(self, thread: Thread, slot: int) -> None:
        streams = self.streams
        if streams.blocked[slot]:
            thread.pending += 1
            streams.put(slot, Mark(threads=[thread]), thread.clock, thread.action)
        else:
            thread.note(streams.ready[slot], streams.last[slot])

    def _end_wait(self, thread: Thread) -> bool:
        if not thread.pending:
            thread.resume()
            return False
        thread.status = Status.DEVICE
        thread.bound = thread.clock
        return True

    def _mark(self, thread: Thread, slot: int) -> Mark:
        """Return the latest recorded mark of an event, or else the mark of its first future record."""
        event = thread.iteration * len(self.program.events) + slot
        mark = self._events[event]
        if mark is None:
            mark = self._events[event] = Mark(slot)
        return mark

    def _action(self, thread: Thread) -> int:
        return thread.iteration * self.program.actions + thread.program.first + thread.place

    # --- diagnosis of deadlocks --------------------------------------------------------------------------

    def stuck(self) -> tuple[str, int] | None:
        """Return thread name and place of the first action that never ends, ``None`` if all threads have ended."""
        for thread in self.threads:
            if thread.status in (Status.FLAG, Status.DEVICE):
                return thread.program.name, thread.place - 1
        return None

    def blocked(self) -> tuple[int, int, bool] | None:
        """First stream blocked by an event that never comes: (stream, event, whether it was recorded), or ``None``."""
        for stream, mark in zip(self.program.streams, self.streams.barriers, strict=True):
            if mark is not None and mark.event is not None:
                return stream, self.program.events[mark.event], mark.recorded
        return None


def _order(thread: Thread) -> tuple[float, int]:
    return thread.bound, thread.index


# By operation code. Plain functions: bound methods would create reference cycles, freed late.
_RARE = (
    HostThreads._launch,
    HostThreads._shared,
    HostThreads._record,
    HostThreads._wait,
    HostThreads._stream,
    HostThreads._event,
    HostThreads._device,
    HostThreads._signal,
    HostThreads._await,
)
