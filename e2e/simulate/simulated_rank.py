"""One rank during simulation: its host threads and its streams.

Threads of a rank that share a stream or an event act in order of time: the thread whose next call takes effect first
goes on (ties: the first thread of the graph). A thread that waits for the device, while the end of that wait is
unknown, holds the others back at the start of its wait; the simulator lifts that bound once nothing in the whole graph
can happen earlier. So results do not depend on the order in which ranks are processed.

Streams run their tasks in order, as early as possible. A stream is *blocked* behind a collective (or a kernel that
others may slow down) that is not complete, or behind an event that is not reached; work submitted meanwhile is queued.
Otherwise the times of a task are known at its launch, so no event calendar is needed.

Causes are numbers: ``n >= 0`` is task n of the rank (numbered through all iterations), ``LAUNCHED`` the task's own
launch, and smaller numbers are actions (:func:`action_cause`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import Enum, auto
from math import inf, nextafter
from typing import Any

from e2e.simulate.instructions import HOST, LAUNCH, SHARED, CompiledRank, CompiledThread, Instruction

LAUNCHED = -1

# Kinds of queued work.
_TASK, _SHARED, _WAIT, _MARK = range(4)


def action_cause(action: int) -> int:
    """Convert an action to its cause number, or a cause number to its action (the function is its own inverse)."""
    return -2 - action


@dataclass(slots=True, eq=False)
class Mark:
    """Point on a stream: an event, or the end of the work that a synchronising call waits for."""

    # Slot of the event, `None` if this is no event.
    event: int | None = None
    # True once it has been put on a stream.
    recorded: bool = False
    # Time at which it was reached, `None` before.
    seconds: float | None = None
    cause: int = LAUNCHED
    # Slots of the streams that it blocks.
    streams: list[int] = field(default_factory=list)
    # Host threads that wait for it.
    threads: list[Any] = field(default_factory=list)


class Streams:
    """State of all streams of a rank, by slot. The caller empties ``unblocked`` and ``reached``."""

    def __init__(self, streams: int, tasks: int) -> None:
        nan = float("nan")
        # End time of the work so far on each stream, and the cause number of that work.
        self.ready = [0.0] * streams
        self.last = [LAUNCHED] * streams
        self.blocked = [False] * streams
        # Event that blocks the stream, or `None`.
        self.barriers: list[Mark | None] = [None] * streams
        self.queues: list[deque[tuple[Any, ...]]] = [deque() for _ in range(streams)]
        self.starts = [nan] * tasks
        self.ends = [nan] * tasks
        self.causes = [LAUNCHED] * tasks
        # (task, start of the transfer, position of the last rank, its task)
        self.transfers: list[tuple[int, float, int, int]] = []
        self.unblocked: list[int] = []
        self.reached: list[Mark] = []
        # Collectives and kernels that others may slow down, once they are ready: (task, slot, start).
        self.arriving: list[tuple[int, int, float]] = []

    def launch(self, task: int, slot: int, launched: float, seconds: float) -> None:
        """Submit a task to a stream; ``launched``: end of its launch call, in seconds."""
        if self.blocked[slot]:
            self.queues[slot].append((_TASK, task, launched, seconds))
        else:
            self._run(task, slot, launched, seconds)

    def launch_shared(self, task: int, slot: int, launched: float) -> None:
        """Submit a task that occupies its stream until :meth:`finish` or :meth:`finish_collective`."""
        if self.blocked[slot]:
            self.queues[slot].append((_SHARED, task, launched, 0.0))
        else:
            self._arrive(task, slot, launched)

    def finish_collective(self, task: int, slot: int, transfer: float, end: float, last: tuple[int, int]) -> None:
        """End a collective whose transfer runs from ``transfer`` to ``end``.

        ``last``: position and task of the last rank.
        """
        self.transfers.append((task, transfer, *last))
        self.finish(task, slot, end)

    def finish(self, task: int, slot: int, end: float) -> None:
        """End a task that was submitted by :meth:`launch_shared`."""
        self.ends[task] = end
        self.ready[slot] = end
        self.last[slot] = task
        self.unblocked.append(slot)

    def follower(self, slot: int, moment: float) -> int | None:
        """Return the next task of a blocked stream if it is a shared one launched before ``moment``, else ``None``."""
        queue = self.queues[slot]
        if queue and queue[0][0] == _SHARED and queue[0][2] < moment:
            return int(queue[0][1])
        return None

    def follow(self, task: int, slot: int, moment: float) -> None:
        """End ``task`` and start its :meth:`follower` at the same moment."""
        follower = self.queues[slot].popleft()[1]
        self.ends[task] = self.starts[follower] = moment
        self.causes[follower] = task

    def wait(self, slot: int, mark: Mark) -> None:
        """Make all later work on the stream start after ``mark``."""
        if self.blocked[slot]:
            self.queues[slot].append((_WAIT, mark, 0.0, 0.0))
        else:
            self._wait(slot, mark)

    def put(self, slot: int, mark: Mark, called: float, action: int) -> None:
        """Put ``mark`` at the present end of the stream.

        ``called``: time of the call, ``action``: the host's action.
        """
        mark.recorded = True
        if self.blocked[slot]:
            self.queues[slot].append((_MARK, mark, called, action))
        else:
            self._reach(slot, mark, called, action)

    def settle(self) -> None:
        """Run the queues of all streams that are no longer blocked, as far as possible."""
        while self.unblocked:
            self._drain(self.unblocked.pop())

    def _drain(self, slot: int) -> None:
        self.blocked[slot] = False
        self.barriers[slot] = None
        queue = self.queues[slot]
        while queue and not self.blocked[slot]:
            kind, what, moment, rest = queue.popleft()
            if kind == _TASK:
                self._run(what, slot, moment, rest)
            elif kind == _SHARED:
                self._arrive(what, slot, moment)
            elif kind == _WAIT:
                self._wait(slot, what)
            else:
                self._reach(slot, what, moment, rest)

    def _run(self, task: int, slot: int, launched: float, seconds: float) -> None:
        start = self._start(task, slot, launched)
        self.ends[task] = self.ready[slot] = start + seconds
        self.last[slot] = task

    def _arrive(self, task: int, slot: int, launched: float) -> None:
        self.blocked[slot] = True
        self.arriving.append((task, slot, self._start(task, slot, launched)))

    def _start(self, task: int, slot: int, launched: float) -> float:
        start = self.ready[slot]
        if start > launched:
            self.causes[task] = self.last[slot]
        else:
            start = launched
        self.starts[task] = start
        return start

    def _wait(self, slot: int, mark: Mark) -> None:
        if mark.seconds is None:
            self.blocked[slot] = True
            self.barriers[slot] = mark
            mark.streams.append(slot)
        elif mark.seconds > self.ready[slot]:
            self.ready[slot] = mark.seconds
            self.last[slot] = mark.cause

    def _reach(self, slot: int, mark: Mark, called: float, action: int) -> None:
        ready = self.ready[slot]
        late = ready > called
        mark.seconds = ready if late else called
        mark.cause = self.last[slot] if late else action_cause(action)
        for waiting in mark.streams:
            # The wait left the queue when it blocked the stream, so it is executed here.
            self._wait(waiting, mark)
            self.unblocked.append(waiting)
        if mark.threads:
            self.reached.append(mark)


class Status(Enum):
    """State of a thread: runnable, waiting for streams (``DEVICE``), waiting for a signal (``FLAG``), or done."""

    READY = auto()
    DEVICE = auto()
    FLAG = auto()
    DONE = auto()


class Thread:
    """One host thread, from ``start`` seconds on."""

    def __init__(self, program: CompiledThread, index: int, start: float) -> None:
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

    def __init__(self, program: CompiledRank, iterations: int, start: float = 0.0) -> None:
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
