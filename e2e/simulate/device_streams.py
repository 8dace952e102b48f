"""Streams of one rank during simulation: each runs its tasks in order, as early as possible.

A stream is *blocked* behind a collective (or a kernel that others may slow down) that is not complete, or behind an
event that is not reached; work submitted meanwhile is queued. Otherwise the times of a task are known at its launch, so
no event calendar is needed.

Causes are numbers: ``n >= 0`` is task n of the rank (numbered through all iterations), ``LAUNCHED`` the task's own
launch, and smaller numbers are actions (:func:`action_cause`).
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

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
