"""Which host span lies in which: operators around operators, around runtime calls. Per thread, by time alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from e2e.traces.formats.profile import HostSpan, KinetoTrace


@dataclass(frozen=True)
class Nesting:
    """``parent``: operator or runtime call -> the operator right around it, ``None`` at the top level.

    ``top``: operator -> the outermost one around it, itself at the top level. ``threads``: thread -> its operators and
    runtime calls in the order they began; of two that began together the outer one comes first.
    """

    parent: Mapping[int, int | None]
    top: Mapping[int, int]
    threads: Mapping[int, tuple[HostSpan, ...]]


def nest(kineto: KinetoTrace) -> Nesting:
    """The nesting of the operators and runtime calls of ``kineto``; annotations are transparent."""
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
        # A span of no length at the end of another one is its last child, for times in whole microseconds.
        while stack and (stack[-1].end <= span.start if span.end > stack[-1].end else stack[-1].end < span.start):
            stack.pop()
        parent[span.id] = stack[-1].id if stack else None
        if span.kind == "operator":
            top[span.id] = top[stack[-1].id] if stack else span.id
            stack.append(span)


def launches_by_correlation(kineto: KinetoTrace) -> dict[int, HostSpan]:
    """Correlation id -> the runtime call that has it."""
    return {call.correlation: call for call in kineto.runtime if call.correlation is not None}
