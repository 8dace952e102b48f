"""Which stretches of a helper thread (autograd's, a data loader's) the main thread started and waited for.

A burst is a helper's activity without a sign of the main thread between its spans. Where the main thread shows no sign
during nearly all of the burst either, it was waiting: that time belongs to the helper, not to the main thread's work.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from e2e.traces.formats.profile import HostSpan

# Of a burst, the share that the main thread must be silent to count as waiting: it goes on while the helper still
# leaves its last operator.
_WAITS = 0.8


@dataclass(frozen=True, slots=True)
class Burst:
    """``awaited``: from when to when the main thread waited for it, ``None`` if it did not."""

    thread: int
    start: float
    end: float
    awaited: tuple[float, float] | None


def bursts(main: Iterable[HostSpan], helper: Sequence[HostSpan]) -> list[Burst]:
    """Bursts of the spans ``helper`` of one thread, in order; ``main``: all spans of the main thread."""
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
    """Whether a mark lies strictly between the two."""
    return bisect_left(marks, end) > bisect_right(marks, start)
