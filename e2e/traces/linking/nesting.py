"""Nesting of host spans: operators and runtime calls inside operators, per thread, by time alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from e2e.traces.formats.profile import HostSpan, KinetoTrace


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
