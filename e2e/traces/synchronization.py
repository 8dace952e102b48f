"""Synchronising calls, stream waits and events of a window, as items of the host threads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from e2e.step.execution_graph import Action, Duration, Launch, RecordEvent, StreamWait, Synchronize
from e2e.traces.formats.kineto import HostSpan, KinetoTrace
from e2e.traces.host_time import launches_by_correlation
from e2e.traces.launches import DeviceOrder, LaunchedWork
from e2e.traces.linked_trace import CallNames
from e2e.traces.step_window import StepWindow

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
