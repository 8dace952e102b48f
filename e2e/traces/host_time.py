"""Host time of a profile's threads: operators and calls nested by time alone, pieces of it by overhead kind, stretches
of helper threads.

Kinds are those of the papers (:data:`e2e.step.execution_graph.OverheadKind`): T1 between operators; T2, T3 and T5
within, around launches.

Helper threads are autograd's or a data loader's, which the main thread started and waited for. A burst is activity of a
helper without any event of the main thread between its spans. If the main thread has no event during nearly all of the
burst either, it was waiting: that time is the helper's, not work of the main thread.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from e2e.step.execution_graph import OverheadKind
from e2e.traces.kineto import HostSpan, KinetoTrace


@dataclass(frozen=True)
class Nesting:
    """Nesting of a profile."""

    # Operator or runtime call -> operator directly around it, `None` at the top level.
    parent: Mapping[int, int | None]
    # Operator -> outermost operator around it, or itself.
    top: Mapping[int, int]
    # Thread -> its operators and runtime calls in the order they began, the outer one first if two began together.
    threads: Mapping[int, tuple[HostSpan, ...]]


def nest(kineto: KinetoTrace) -> Nesting:
    """Return the nesting of the operators and runtime calls of ``kineto``; annotations are ignored."""
    by_thread: dict[int, list[HostSpan]] = {}
    for span in (*kineto.operators, *kineto.runtime):
        by_thread.setdefault(span.thread, []).append(span)
    parent: dict[int, int | None] = {}
    top: dict[int, int] = {}
    threads: dict[int, tuple[HostSpan, ...]] = {}
    for thread, spans in by_thread.items():
        spans.sort(key=lambda span: (span.start, span.kind == "runtime"))  # stable: keeps the order of operators
        threads[thread] = tuple(spans)
        _nest_thread(spans, parent, top)
    return Nesting(parent, top, threads)


def _nest_thread(spans: Iterable[HostSpan], parent: dict[int, int | None], top: dict[int, int]) -> None:
    stack: list[HostSpan] = []
    for span in spans:
        # With times in whole microseconds, a span of length 0 at the end of another one is its last child.
        while stack and (stack[-1].end <= span.start if span.end > stack[-1].end else stack[-1].end < span.start):
            stack.pop()
        parent[span.id] = stack[-1].id if stack else None
        if span.kind == "operator":
            top[span.id] = top[stack[-1].id] if stack else span.id
            stack.append(span)


def launches_by_correlation(kineto: KinetoTrace) -> dict[int, HostSpan]:
    """Map correlation ids to their runtime calls."""
    return {call.correlation: call for call in kineto.runtime if call.correlation is not None}


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


@dataclass(frozen=True, slots=True)
class HostInterval:
    """Piece of host time."""

    kind: OverheadKind
    # Id of a top-level span; for a gap (T1) the operator after it, `None` at the end.
    operator: int | None
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Duration of the piece."""
        return self.end - self.start


@dataclass(slots=True)
class TopOperator:
    """Outermost operator, with the begin of its first launch and the end of its last one."""

    id: int
    start: float
    end: float
    first_launch: float | None = None
    last_launch: float | None = None


def top_operators(spans: Iterable[HostSpan], launches: Container[int]) -> list[TopOperator]:
    """Return the outermost operators of one thread's ordered ``spans``.

    ``launches``: ids of launching runtime calls.
    """
    found: list[TopOperator] = []
    for span in spans:
        if span.kind == "operator":
            if not found or span.start >= found[-1].end:
                found.append(TopOperator(span.id, span.start, span.end))
            elif span.end > found[-1].end:  # overlaps due to rounding
                found[-1].end = span.end
        elif span.id in launches and found and span.start < found[-1].end:
            top = found[-1]
            top.first_launch = span.start if top.first_launch is None else top.first_launch
            top.last_launch = min(span.end, top.end)
    return found


class HostPieces:
    """Splitter of any stretch of one thread's time at the borders of its top-level operators."""

    def __init__(self, tops: list[TopOperator]) -> None:
        self._tops = tops
        self._starts = [top.start for top in tops]

    def between(self, start: float, end: float) -> list[HostInterval]:
        """Return the pieces of ``start .. end``, a stretch without launches inside; they sum to ``end - start``."""
        pieces: list[HostInterval] = []
        place = max(bisect_right(self._starts, start) - 1, 0)
        while start < end:
            while place < len(self._tops) and self._tops[place].end <= start:
                place += 1
            if place == len(self._tops):
                pieces.append(HostInterval("T1", None, start, end))
                break
            top = self._tops[place]
            inside = top.start <= start
            until = min(end, top.end if inside else top.start)
            pieces.append(HostInterval(_kind(top, start, until) if inside else "T1", top.id, start, until))
            start = until
        return pieces


def _kind(top: TopOperator, start: float, end: float) -> OverheadKind:
    if top.first_launch is None or top.last_launch is None:
        return "T5"
    if end <= top.first_launch:
        return "T2"
    return "T3" if start >= top.last_launch else "T5"
