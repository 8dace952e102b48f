"""Host time of a thread by the overhead kinds of the papers: T1 between operators.

T2, T3 and T5 within, around launches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable
from dataclasses import dataclass

from e2e.step.execution_graph import OverheadKind
from e2e.traces.formats.profile import HostSpan


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
