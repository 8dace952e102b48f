"""The streams of one rank while it is simulated: each runs its tasks in order, as early as it can.

A stream is *blocked* behind a collective (or a kernel that others may slow down) that is not complete, or an event that
is not reached; what is put on it meanwhile queues up. Otherwise a task's times are known when it is launched, so no
calendar of events is needed.

Causes are numbers: ``n >= 0`` is task n of the rank (all iterations counted through), ``LAUNCHED`` the task's own
launch, and below that :func:`action_cause` of an action.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

LAUNCHED = -1

# Kinds of queued work.
_TASK, _SHARED, _WAIT, _MARK = range(4)


def action_cause(action: int) -> int:
    """The cause number of an action, and back."""
    return -2 - action


@dataclass(slots=True, eq=False)
class Mark:
    """A point on a stream: an event, or what a synchronising call waits for. ``seconds``: when it was reached.

    ``event``: its slot, if it is one; ``recorded``: it has been put on a stream. ``streams`` are blocked by it,
    ``threads`` of the host wait for it.
    """

    event: int | None = None
    recorded: bool = False
    seconds: float | None = None
    cause: int = LAUNCHED
    streams: list[int] = field(default_factory=list)
    threads: list[Any] = field(default_factory=list)


class Streams:
    """State of all streams of a rank, by slot. ``unblocked`` and ``reached`` are for the caller to empty."""

    def __init__(self, streams: int, tasks: int) -> None:
        nan = float("nan")
        # When everything so far has ended, and what that was.
        self.ready = [0.0] * streams
        self.last = [LAUNCHED] * streams
        self.blocked = [False] * streams
        # What a stream is blocked by, if that is an event.
        self.barriers: list[Mark | None] = [None] * streams
        self.queues: list[deque[tuple[Any, ...]]] = [deque() for _ in range(streams)]
        self.starts = [nan] * tasks
        self.ends = [nan] * tasks
        self.causes = [LAUNCHED] * tasks
        # (task, start of the transfer, position of the last rank, its task)
        self.transfers: list[tuple[int, float, int, int]] = []
        self.unblocked: list[int] = []
        self.reached: list[Mark] = []
        # Collectives and kernels that others may slow down, which have become ready: (task, slot, start).
        self.arriving: list[tuple[int, int, float]] = []

    def launch(self, task: int, slot: int, launched: float, seconds: float) -> None:
        """Puts a task on a stream; ``launched``: when its launch call ended."""
        if self.blocked[slot]:
            self.queues[slot].append((_TASK, task, launched, seconds))
        else:
            self._run(task, slot, launched, seconds)

    def launch_shared(self, task: int, slot: int, launched: float) -> None:
        """Puts a task on a stream, which it occupies until :meth:`finish` or :meth:`finish_collective`."""
        if self.blocked[slot]:
            self.queues[slot].append((_SHARED, task, launched, 0.0))
        else:
            self._arrive(task, slot, launched)

    def finish_collective(self, task: int, slot: int, transfer: float, end: float, last: tuple[int, int]) -> None:
        """All ranks have met: the transfer runs from ``transfer`` to ``end``; ``last``: position and task."""
        self.transfers.append((task, transfer, *last))
        self.finish(task, slot, end)

    def finish(self, task: int, slot: int, end: float) -> None:
        """A task of :meth:`launch_shared` has ended."""
        self.ends[task] = end
        self.ready[slot] = end
        self.last[slot] = task
        self.unblocked.append(slot)

    def follower(self, slot: int, moment: float) -> int | None:
        """The task of :meth:`launch_shared` that is launched before ``moment`` and comes next on a blocked stream."""
        queue = self.queues[slot]
        if queue and queue[0][0] == _SHARED and queue[0][2] < moment:
            return int(queue[0][1])
        return None

    def follow(self, task: int, slot: int, moment: float) -> None:
        """``task`` has ended, and its :meth:`follower` begins at the same moment."""
        follower = self.queues[slot].popleft()[1]
        self.ends[task] = self.starts[follower] = moment
        self.causes[follower] = task

    def wait(self, slot: int, mark: Mark) -> None:
        """What comes next on the stream starts after ``mark``."""
        if self.blocked[slot]:
            self.queues[slot].append((_WAIT, mark, 0.0, 0.0))
        else:
            self._wait(slot, mark)

    def put(self, slot: int, mark: Mark, called: float, action: int) -> None:
        """Marks the present end of the stream; ``called``: when, by ``action`` of the host."""
        mark.recorded = True
        if self.blocked[slot]:
            self.queues[slot].append((_MARK, mark, called, action))
        else:
            self._reach(slot, mark, called, action)

    def settle(self) -> None:
        """Runs the queues of all streams that are no longer blocked, as far as they go."""
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
            # Its wait was taken off the queue when it blocked, so it is carried out here.
            self._wait(waiting, mark)
            self.unblocked.append(waiting)
        if mark.threads:
            self.reached.append(mark)
