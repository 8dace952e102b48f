"""Host cost of a launch call (T4), without its waiting."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from e2e.step.execution_graph import Action, Duration, HostWork, Synchronize
from e2e.traces.formats.profile import HostSpan
from e2e.traces.linking.device_order import TOLERANCE, DeviceOrder, LaunchedWork

# A stream queues about a thousand launches (1,024 on current drivers, copies and memsets included); from this number on
# a slow call is assumed to wait for room.
QUEUE_NEARLY_FULL = 768
_SLOW = 3.0  # times the typical cost of the call
# A stream that waited for another one continues within this time, in seconds (recorded: 3 to 9 us on V100).
_HANDED_ON = 20e-6
# Copies that block the host until they are done: to or from pageable memory, or without a stream.
_BLOCKING_NAMES = ("cudaMemcpy", "cudaMemset", "hipMemcpy")


@dataclass(frozen=True, slots=True)
class Waited:
    """Seconds of a launch call that were waiting."""

    # Waiting for room in the queue.
    full_queue: float = 0.0
    # Waiting for the copy itself.
    blocking: float = 0.0
    # Host work (copying into pinned memory) after that wait and before the copy began, while the stream was idle.
    idle: float = 0.0

    @property
    def seconds(self) -> float:
        """Total waiting time."""
        return self.full_queue + self.blocking


class LaunchCosts:
    """Launch costs of a profile, given its ``order`` and ``works``; ``call_of``: operator call of a runtime call."""

    def __init__(
        self, order: DeviceOrder, works: Sequence[LaunchedWork], call_of: Callable[[HostSpan], int | None]
    ) -> None:
        self._order = order
        self._call_of = call_of
        free: dict[str, list[float]] = {}
        for work in works:
            if work.launch is not None and not self._queue_full(work.launch):
                free.setdefault(work.launch.name, []).append(work.launch.seconds)
        self._typical = {name: median(seconds) for name, seconds in free.items()}

    def of(self, place: int, work: LaunchedWork) -> tuple[float, tuple[Action, ...], Waited]:
        """Return the seconds of the call, the host's actions after it, and the waiting time.

        A blocking copy is followed by a wait.
        """
        call = work.launch
        assert call is not None
        if _blocks(work):
            return self._blocking(work, call)
        typical = self._typical.get(call.name)
        if typical is not None and call.seconds > _SLOW * typical and self._queue_full(call):
            return typical, (), Waited(full_queue=call.seconds - typical)
        return self._split(work, call)

    def _queue_full(self, call: HostSpan) -> bool:
        return self._order.outstanding(call.start) >= QUEUE_NEARLY_FULL

    def _split(self, work: LaunchedWork, call: HostSpan) -> tuple[float, tuple[Action, ...], Waited]:
        """Split a call whose work begins before it returns: the rest of the call is host work after the launch."""
        reach = max(work.start - call.start, 0.0)
        if reach >= call.seconds:
            return call.seconds, (), Waited()
        return reach, (HostWork("T4", self._call_of(call), Duration.measured(call.seconds - reach)),), Waited()

    def _blocking(self, work: LaunchedWork, call: HostSpan) -> tuple[float, tuple[Action, ...], Waited]:
        """Convert a blocking copy to a launch and a wait for its stream.

        Time after the copy's end is the wait's own cost.

        The copy is delayed by earlier work on its stream, or by what that stream waits for: work of another stream that
        ended just when the copy could begin.
        """
        before = self._order.last_on(work.stream, work.launched)
        free = call.start if before is None else before.end
        if free <= call.start:
            other = self._order.ended_within(call.start, work.start)
            if other is not None and work.start - other.end <= _HANDED_ON:
                free = other.end
        reach = min(max(work.start - call.start, 0.0), call.seconds)
        held_up = free > call.start
        cost = min(reach, self._typical.get(call.name, reach)) if held_up else reach
        after = max(call.end - max(work.end, call.start), 0.0)
        actions = (Synchronize(work.stream, duration=Duration.measured(after)),)
        idle = max(work.start - free - _HANDED_ON, 0.0) if held_up else 0.0
        return cost, actions, Waited(blocking=call.seconds - cost - idle - after, idle=idle)


def _blocks(work: LaunchedWork) -> bool:
    """True for a blocking copy that was done when the call returned.

    Blocking: from or to pageable memory, or by a call without a stream.
    """
    call, span = work.launch, work.spans[0]
    assert call is not None
    synchronous = call.name in _BLOCKING_NAMES or (span.kind == "copy" and "Pageable" in span.name)
    return synchronous and work.end <= call.end + TOLERANCE
