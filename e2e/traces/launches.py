"""Device work of a profile: launches, their order and host cost (T4), and the calls by which host and streams wait.

Every device span belongs to exactly one :class:`LaunchedWork`. Old profiles record neither stream nor event of a
``cudaStreamWaitEvent`` or ``cudaStreamSynchronize``: the targets of synchronising calls and stream waits are then
inferred from recorded launch and run times; a dependency is only assumed if the times obey it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

from e2e.step.execution_graph import Action, Duration, HostWork, Launch, RecordEvent, StreamWait, Synchronize
from e2e.traces.host_time import launches_by_correlation
from e2e.traces.kineto import DeviceSpan, HostSpan, KinetoTrace
from e2e.traces.linked_trace import CallNames
from e2e.traces.step_window import StepWindow

# Host and device clocks are aligned to a few microseconds, and older profiles round to one.
TOLERANCE = 3e-6


@dataclass(frozen=True, slots=True)
class LaunchedWork:
    """One launch and its device work: one span, or those of a graph launch. ``thread``: the launching thread."""

    launch: HostSpan | None
    thread: int
    launched: float
    stream: int
    spans: tuple[DeviceSpan, ...]

    @property
    def start(self) -> float:
        """Begin of its first kernel or copy, in seconds."""
        return self.spans[0].start

    @property
    def end(self) -> float:
        """End of its last kernel or copy, in seconds."""
        return max(span.end for span in self.spans)


class DeviceOrder:
    """All work of a profile in launch order, with queries for the last work on a stream or of a thread."""

    def __init__(self, works: Sequence[LaunchedWork]) -> None:
        self.works = works
        self._launched = [work.launched for work in works]
        self._ends = sorted(work.end for work in works)
        self._of_stream: dict[int, list[int]] = {}
        for place, work in enumerate(works):
            self._of_stream.setdefault(work.stream, []).append(place)
        self._running_end: list[float] = []
        latest = 0.0
        for work in works:
            latest = max(latest, work.end)
            self._running_end.append(latest)

    @property
    def streams(self) -> tuple[int, ...]:
        """Numbers of the streams that have work."""
        return tuple(self._of_stream)

    def outstanding(self, time: float) -> int:
        """Number of works launched before ``time`` that have not ended by then."""
        return bisect_left(self._launched, time) - bisect_right(self._ends, time)

    def last_end(self, time: float) -> float:
        """Return the end of all work launched before ``time``, 0 if there is none."""
        place = bisect_left(self._launched, time)
        return self._running_end[place - 1] if place else 0.0

    def last_on(self, stream: int, time: float) -> LaunchedWork | None:
        """Return the last work launched on ``stream`` before ``time``."""
        places = self._of_stream.get(stream, [])
        found = bisect_left(places, bisect_left(self._launched, time)) - 1
        return self.works[places[found]] if found >= 0 else None

    def next(self, time: float) -> LaunchedWork | None:
        """Return the first work launched at or after ``time`` on any stream."""
        place = bisect_left(self._launched, time)
        return self.works[place] if place < len(self.works) else None

    def previous_of(self, thread: int, time: float) -> LaunchedWork | None:
        """Return the last work that ``thread`` launched before ``time``."""
        for place in range(bisect_left(self._launched, time) - 1, -1, -1):
            if self.works[place].thread == thread:
                return self.works[place]
        return None

    def awaited_by_stream(self, time: float) -> tuple[int, list[LaunchedWork]] | None:
        """Infer a stream wait called at ``time``: the waiting stream, and the work on other streams that it waits for.

        The waiting stream is that of the next launch. It waits for the last launched work of each other stream that had
        ended when the stream went on; ``None`` if there is none.
        """
        following = self.next(time)
        if following is None:
            return None
        others = (self.last_on(stream, time) for stream in self._of_stream if stream != following.stream)
        found = [work for work in others if work is not None and work.end <= following.start + TOLERANCE]
        return (following.stream, found) if found else None

    def awaited_by_host(self, call: HostSpan) -> int | None:
        """Infer the stream that a synchronising call awaited, or ``None``.

        It is the stream of the thread's last launch if that work had ended by then, else the one whose last work ended
        latest before the call returned.
        """
        own = self.previous_of(call.thread, call.start)
        candidates = []
        for stream in self._of_stream:
            work = self.last_on(stream, call.start)
            if work is not None and work.end <= call.end + TOLERANCE:
                if own is not None and stream == own.stream:
                    return stream
                candidates.append((work.end, stream))
        return max(candidates)[1] if candidates else None

    def ended_within(self, start: float, end: float) -> LaunchedWork | None:
        """Return the work launched before ``start`` that ended latest in ``start .. end`` (an event's wait, if any)."""
        place = bisect_left(self._launched, start)
        found = [work for work in self.works[:place] if start < work.end <= end + TOLERANCE]
        return max(found, key=lambda work: work.end) if found else None


# Launch time of work that was already running at the start of the recording: before everything in it.
BEFORE_RECORDING = -1.0


def device_works(kineto: KinetoTrace) -> list[LaunchedWork]:
    """Return all work in launch order.

    A profiler that starts late or drops records leaves device spans without a launch. Such work is assumed to be
    launched by the main thread when it began, and never before earlier launches on its stream; but work that ran before
    the first work with a launch, up to a call that waited for it, was launched before the recording began.
    """
    launches = launches_by_correlation(kineto)
    grouped: dict[int, list[DeviceSpan]] = {}
    orphans: list[DeviceSpan] = []
    for span in kineto.device:
        if span.correlation in launches:
            grouped.setdefault(span.correlation, []).append(span)
        else:
            orphans.append(span)
    works = []
    for correlation, spans in grouped.items():
        launch = launches[correlation]
        works.append(LaunchedWork(launch, launch.thread, launch.start, spans[0].stream, tuple(spans)))
    works.sort(key=lambda work: work.launched)
    return _with_orphans(works, orphans, kineto)


def _with_orphans(works: list[LaunchedWork], orphans: list[DeviceSpan], kineto: KinetoTrace) -> list[LaunchedWork]:
    """Insert each orphan at its place on its stream, at the latest moment before the next launch on that stream."""
    awaited_until = _first_wait(works, orphans, kineto)
    by_stream: dict[int, list[LaunchedWork]] = {}
    for work in works:
        by_stream.setdefault(work.stream, []).append(work)
    added = []
    for span in orphans:
        followers = by_stream.get(span.stream, [])
        place = bisect_right([work.start for work in followers], span.start)
        launched = span.start if place == len(followers) else min(span.start, followers[place].launched)
        if place == 0 and span.start < awaited_until:
            launched = BEFORE_RECORDING
        added.append(LaunchedWork(None, kineto.main_thread, launched, span.stream, (span,)))
    return sorted([*works, *added], key=lambda work: (work.launched, work.start))


def _first_wait(works: list[LaunchedWork], orphans: list[DeviceSpan], kineto: KinetoTrace) -> float:
    """Return the end of the first call that waited for orphans before anything was launched, 0 if there is none.

    A host that is held in such a call launches nothing, so work that begins meanwhile was launched earlier.
    """
    first = min((work.launched for work in works), default=kineto.end)
    for call in kineto.runtime:
        waits = "Synchronize" in call.name and call.thread == kineto.main_thread and call.start < first
        if waits and any(call.start < span.start < call.end for span in orphans):
            return call.end
    return 0.0


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


_DEVICE = frozenset({"cudaDeviceSynchronize", "cuCtxSynchronize", "hipDeviceSynchronize"})
_STREAM = frozenset({"cudaStreamSynchronize", "cuStreamSynchronize", "hipStreamSynchronize"})
_EVENT = frozenset({"cudaEventSynchronize", "cuEventSynchronize", "hipEventSynchronize"})
_WAIT = frozenset({"cudaStreamWaitEvent", "cuStreamWaitEvent", "hipStreamWaitEvent"})


@dataclass(frozen=True, slots=True)
class TimedActions:
    """Actions that represent ``start ..

    End`` of a host thread; ``order``: the lower one is first if times are equal.
    """

    start: float
    end: float
    order: int
    actions: tuple[Action, ...]

    def begun_at(self, now: float) -> tuple[Action, ...]:
        """Return the actions for a thread that reaches them at ``now``.

        A launch that overlaps by rounding is shortened.
        """
        first = self.actions[0]
        if now <= self.start or not isinstance(first, Launch) or first.duration is None:
            return self.actions
        rest = max(first.duration.seconds - (now - self.start), 0.0)
        return (replace(first, duration=Duration.measured(rest)), *self.actions[1:])


class Synchronizations:
    """Synchronisations of one window. ``inside``: its work in launch order, whose places are the task ids."""

    def __init__(
        self,
        kineto: KinetoTrace,
        order: DeviceOrder,
        window: StepWindow,
        inside: Sequence[LaunchedWork],
        calls: CallNames,
    ) -> None:
        self._kineto = kineto
        self._order = order
        self._window = window
        self._places = {id(work): place for place, work in enumerate(inside)}
        self._inside = inside
        self._before_end = max((work.end for work in order.works if work.launched < window.start), default=0.0)
        self._streams = {work.stream for work in inside}
        self._calls = calls
        self._known = {sync.correlation: sync for sync in kineto.synchronizations}
        # A profiler that records stream waits records all that matter.
        self._tells_waits = any(sync.kind == "stream_wait" for sync in kineto.synchronizations)
        self._by_correlation = launches_by_correlation(kineto)
        self._items: dict[int, list[TimedActions]] = {}
        self._records: dict[int, list[RecordEvent]] = {}
        self._events: dict[tuple[str, int], int] = {}
        self._waiting: set[tuple[int, int]] = set()
        self.waited = 0.0

    def items(self) -> tuple[dict[int, list[TimedActions]], dict[int, list[RecordEvent]]]:
        """Return the items by thread, and the events to record right after the launch of a task, by task."""
        for call in self._kineto.runtime:
            if not self._window.holds(call.start):
                continue
            if call.name in _WAIT:
                self._stream_wait(call)
            elif call.name in _STREAM:
                self._stream(call)
            elif call.name in _EVENT:
                self._event_wait(call)
            elif call.name in _DEVICE:
                self._synchronize(call, self._order.last_end(call.start))
        return self._items, self._records

    # --- the host waits --------------------------------------------------------------------------------

    def _synchronize(
        self, call: HostSpan, awaited_end: float, stream: int | None = None, event: int | None = None
    ) -> None:
        awaited = max(call.start, min(awaited_end, call.end))
        # Work launched before the window is not simulated: the time of waiting only for it is kept.
        own = max((work.end for work in self._inside if work.launched < call.start), default=call.start)
        before = self._before_end if stream is None and event is None else call.start
        cost = call.end - awaited + max(min(awaited, before) - max(call.start, own), 0.0)
        self.waited += call.seconds - cost
        action = Synchronize(stream, event, Duration.measured(cost), self._calls.innermost(call))
        self._put(call, TimedActions(call.start, call.end, 2, (action,)))

    def _stream(self, call: HostSpan) -> None:
        known = self._known.get(call.correlation or -1)
        stream = known.stream if known is not None else None
        if stream is None:
            stream = self._order.awaited_by_host(call)
        if stream is None:
            return
        last = self._order.last_on(stream, call.start)
        self._synchronize(call, last.end if last else call.start, stream)

    def _event_wait(self, call: HostSpan) -> None:
        known = self._known.get(call.correlation or -1)
        record = self._by_correlation.get(known.record) if known and known.record is not None else None
        if record is not None and known is not None and known.record_stream is not None:
            if self._window.holds(record.start):
                last = self._order.last_on(known.record_stream, record.start)
                event = self._record_at(record, known.record_stream)
                self._synchronize(call, last.end if last else call.start, event=event)
            return
        work = self._order.ended_within(call.start, call.end)
        if work is not None and id(work) in self._places:
            self._synchronize(call, work.end, event=self._record_after(work))

    # --- a stream waits --------------------------------------------------------------------------------

    def _stream_wait(self, call: HostSpan) -> None:
        known = self._known.get(call.correlation or -1)
        if known is not None and known.record is not None and known.record_stream is not None:
            record = self._by_correlation.get(known.record)
            useful = known.stream in self._streams and known.record_stream in self._streams
            if record is not None and self._window.holds(record.start) and useful:
                event = self._record_at(record, known.record_stream)
                self._put(call, TimedActions(call.start, call.start, 1, (StreamWait(event, known.stream or 0),)))
        elif not self._tells_waits:
            self._inferred_wait(call)

    def _inferred_wait(self, call: HostSpan) -> None:
        found = self._order.awaited_by_stream(call.start)
        if found is None or found[0] not in self._streams:
            return
        stream, awaited = found
        for work in awaited:
            place = self._places.get(id(work))
            if place is None or (stream, place) in self._waiting:
                continue
            self._waiting.add((stream, place))
            event = self._record_after(work)
            self._put(call, TimedActions(call.start, call.start, 1, (StreamWait(event, stream),)))

    # --- events ----------------------------------------------------------------------------------------

    def _record_after(self, work: LaunchedWork) -> int:
        place = self._places[id(work)]
        key = ("after", place)
        if key not in self._events:
            event = self._events[key] = len(self._events)
            self._records.setdefault(place, []).append(RecordEvent(event, work.stream))
        return self._events[key]

    def _record_at(self, record: HostSpan, stream: int) -> int:
        key = ("at", record.id)
        if key not in self._events:
            event = self._events[key] = len(self._events)
            self._put(record, TimedActions(record.start, record.start, 0, (RecordEvent(event, stream),)))
        return self._events[key]

    def _put(self, call: HostSpan, item: TimedActions) -> None:
        self._items.setdefault(call.thread, []).append(item)


def waiting_seconds(call: HostSpan, order: DeviceOrder, kineto: KinetoTrace) -> float:
    """Seconds that the synchronising ``call`` waited for the device; the rest is the cost of the call itself."""
    if call.name in _DEVICE:
        end = order.last_end(call.start)
    else:
        known = next((sync for sync in kineto.synchronizations if sync.correlation == call.correlation), None)
        stream = known.stream if known is not None and known.stream is not None else order.awaited_by_host(call)
        last = order.last_on(stream, call.start) if stream is not None else None
        end = last.end if last is not None else call.start
    return max(min(end, call.end) - call.start, 0.0)
