"""The time of a host thread by the kinds of the papers: T1 between operators, T2, T3 and T5 within, around launches."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Container, Iterable
from dataclasses import dataclass

from e2e.step.execution_graph import OverheadKind
from e2e.traces.formats.profile import HostSpan


@dataclass(frozen=True, slots=True)
class HostInterval:
    """Host time of ``operator`` (id of a top-level span); of a gap (T1), the operator after it, ``None`` at the end."""

    kind: OverheadKind
    operator: int | None
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it takes."""
        return self.end - self.start


@dataclass(slots=True)
class TopOperator:
    """An outermost operator: where it lies, where its first launch begins and its last one ends."""

    id: int
    start: float
    end: float
    first_launch: float | None = None
    last_launch: float | None = None


def top_operators(spans: Iterable[HostSpan], launches: Container[int]) -> list[TopOperator]:
    """Outermost operators of one thread's ``spans`` (in order); ``launches``: ids of the runtime calls that launch."""
    found: list[TopOperator] = []
    for span in spans:
        if span.kind == "operator":
            if not found or span.start >= found[-1].end:
                found.append(TopOperator(span.id, span.start, span.end))
            elif span.end > found[-1].end:  # operators that overlap by rounding
                found[-1].end = span.end
        elif span.id in launches and found and span.start < found[-1].end:
            top = found[-1]
            top.first_launch = span.start if top.first_launch is None else top.first_launch
            top.last_launch = min(span.end, top.end)
    return found


class HostPieces:
    """Cuts any stretch of one thread's time at the borders of its top-level operators."""

    def __init__(self, tops: list[TopOperator]) -> None:
        self._tops = tops
        self._starts = [top.start for top in tops]

    def between(self, start: float, end: float) -> list[HostInterval]:
        """The pieces of ``start .. end``, a stretch without launches inside; together they last ``end - start``."""
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
