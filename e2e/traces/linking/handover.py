"""Detection of stretches of a helper thread (autograd's, a data loader's) that the main thread started and waited for.

A burst is activity of a helper without any event of the main thread between its spans. If the main thread has no event
during nearly all of the burst either, it was waiting: that time is the helper's, not work of the main thread.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from e2e.traces.formats.profile import HostSpan

# Share of a burst during which the main thread must have no events to count as waiting: it continues while the helper
# is still leaving its last operator.
_WAITS = 0.8


@dataclass(frozen=True, slots=True)
class Burst:
    """Burst of a helper thread."""

    thread: int
    start: float
    end: float
    # Interval in which the main thread waited for it, `None` if it did not.
    awaited: tuple[float, float] | None


def bursts(main: Iterable[HostSpan], helper: Sequence[HostSpan]) -> list[Burst]:
    """Return the bursts of one thread's ``helper`` spans, in order; ``main``: all spans of the main thread."""
    marks = sorted({time for span in main for time in (span.start, span.end)})
    found: list[Burst] = []
    start = end = None
    for span in helper:
        if start is not None and end is not None and _marked(marks, end, span.start):
            found.append(_burst(marks, span.thread, start, end))
            start = end = None
        start = span.start if start is None else start
        end = span.end if end is None else max(end, span.end)
    if start is not None and end is not None:
        found.append(_burst(marks, helper[0].thread, start, end))
    return found


def _burst(marks: Sequence[float], thread: int, start: float, end: float) -> Burst:
    inner = marks[bisect_right(marks, start) : bisect_left(marks, end)]
    borders = [start, *inner, end]
    begin, until = max(zip(borders, borders[1:], strict=False), key=lambda pair: pair[1] - pair[0])
    silent = until - begin >= _WAITS * (end - start)
    return Burst(thread, start, end, (begin, until) if silent else None)


def _marked(marks: Sequence[float], start: float, end: float) -> bool:
    """True if a mark lies strictly between ``start`` and ``end``."""
    return bisect_left(marks, end) > bisect_right(marks, start)
