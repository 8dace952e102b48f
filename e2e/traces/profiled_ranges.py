"""Named ranges of a profile: annotations made by the script, and the operators inside them, by time."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from e2e.step.named_ranges import NamedRange, NamedRanges, is_named_by_script, of_forward_calls
from e2e.traces.formats.profile import HostSpan, KinetoTrace


def profiled_ranges(kineto: KinetoTrace, calls: Mapping[int, HostSpan], backward: Collection[int]) -> NamedRanges:
    """Return the named ranges. ``calls``: number -> operator of the profile; ``backward``: calls of a backward pass.

    An operator of another thread that is in no range there belongs to the ranges of the main thread at that time, which
    waits for autograd. A backward call belongs to the ranges of the last forward call with its sequence number, which
    made its autograd node.
    """
    named = [span for span in kineto.annotations if is_named_by_script(span.name)]
    if not named:
        return NamedRanges()
    threads = {span.thread for span in named}
    entries = {thread: _nested([span for span in named if span.thread == thread]) for thread in threads}
    main = entries.get(kineto.main_thread, {})
    spans = {span.id: span for span in named}
    of_call: dict[int, int] = {}
    for thread in {span.thread for span in calls.values()}:
        inside = [(call, span) for call, span in calls.items() if span.thread == thread]
        own = _innermost(inside, [spans[entry] for entry in entries.get(thread, {})])
        rest = [] if thread == kineto.main_thread else [each for each in inside if each[0] not in own]
        of_call |= own | _innermost(rest, [spans[entry] for entry in main])
    ordered = sorted(calls.items(), key=lambda item: item[1].start)
    of_forward = of_forward_calls(((call, span.sequence, call in backward) for call, span in ordered), of_call)
    ranges = {entry: each for nested in entries.values() for entry, each in nested.items()}
    return NamedRanges(dict(sorted(ranges.items())), of_call, of_forward)


def _nested(spans: Iterable[HostSpan]) -> dict[int, NamedRange]:
    """Nest the annotations of one thread: each in the innermost one that is open when it begins."""
    found: dict[int, NamedRange] = {}
    opened: list[HostSpan] = []
    for span in sorted(spans, key=lambda each: (each.start, -each.end)):
        opened = [each for each in opened if each.end > span.start]
        found[span.id] = NamedRange(span.id, span.name, opened[-1].id if opened else None)
        opened.append(span)
    return found


@dataclass(frozen=True, order=True)
class _Moment:
    """Begin of an annotation (``order`` 0) or of a call (1): annotations come first."""

    time: float
    order: int
    place: int


def _innermost(calls: Collection[tuple[int, HostSpan]], annotations: Collection[HostSpan]) -> dict[int, int]:
    """Map calls to the innermost of ``annotations`` that is open when they begin."""
    listed, spans = list(calls), list(annotations)
    moments = [_Moment(span.start, 0, place) for place, span in enumerate(spans)]
    moments += [_Moment(span.start, 1, place) for place, (_, span) in enumerate(listed)]
    found: dict[int, int] = {}
    opened: list[HostSpan] = []
    for moment in sorted(moments):
        opened = [each for each in opened if each.end > moment.time]
        if moment.order == 0:
            opened.append(spans[moment.place])
        elif opened:
            # The shorter of two that began together is the inner one.
            found[listed[moment.place][0]] = max(opened, key=lambda each: (each.start, -each.end)).id
    return found
