"""Launch and run times of device work, used to infer the targets of synchronising calls and stream waits.

Old profiles record neither stream nor event of a ``cudaStreamWaitEvent`` or ``cudaStreamSynchronize``. These are then
inferred from the recorded times: a dependency is only assumed if the times obey it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from e2e.traces.formats.profile import DeviceSpan, HostSpan

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
