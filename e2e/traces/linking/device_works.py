"""Device work of a profile by launch: every device span belongs to exactly one :class:`LaunchedWork`."""

from __future__ import annotations

from bisect import bisect_right

from e2e.traces.formats.profile import DeviceSpan, KinetoTrace
from e2e.traces.linking.device_order import LaunchedWork
from e2e.traces.linking.nesting import launches_by_correlation

# When work was launched that ran already when the recording began: before everything in it.
BEFORE_RECORDING = -1.0


def device_works(kineto: KinetoTrace) -> list[LaunchedWork]:
    """All work in launch order.

    A profiler that starts late or drops records leaves device spans without a launch. Such work is taken as launched
    when it began, by the main thread, and never before what was launched earlier on its stream; but what ran before the
    first work with a launch, up to a call that waited for it, was launched before the recording began.
    """
    launches = launches_by_correlation(kineto)
    grouped: dict[int, list[DeviceSpan]] = {}
    orphans: list[DeviceSpan] = []
    for span in kineto.device:
        if span.correlation in launches:
            grouped.setdefault(span.correlation, []).append(span)
        else:
            orphans.append(span)
    works = []
    for correlation, spans in grouped.items():
        launch = launches[correlation]
        works.append(LaunchedWork(launch, launch.thread, launch.start, spans[0].stream, tuple(spans)))
    works.sort(key=lambda work: work.launched)
    return _with_orphans(works, orphans, kineto)


def _with_orphans(works: list[LaunchedWork], orphans: list[DeviceSpan], kineto: KinetoTrace) -> list[LaunchedWork]:
    """Puts each orphan where its stream ran it, at the latest moment before the next launch on that stream."""
    awaited_until = _first_wait(works, orphans, kineto)
    by_stream: dict[int, list[LaunchedWork]] = {}
    for work in works:
        by_stream.setdefault(work.stream, []).append(work)
    added = []
    for span in orphans:
        followers = by_stream.get(span.stream, [])
        place = bisect_right([work.start for work in followers], span.start)
        launched = span.start if place == len(followers) else min(span.start, followers[place].launched)
        if place == 0 and span.start < awaited_until:
            launched = BEFORE_RECORDING
        added.append(LaunchedWork(None, kineto.main_thread, launched, span.stream, (span,)))
    return sorted([*works, *added], key=lambda work: (work.launched, work.start))


def _first_wait(works: list[LaunchedWork], orphans: list[DeviceSpan], kineto: KinetoTrace) -> float:
    """The end of the first call that waited, before anything was launched, for orphans; 0 if there is none.

    A host that is held in such a call launches nothing, so that what begins meanwhile was launched earlier.
    """
    first = min((work.launched for work in works), default=kineto.end)
    for call in kineto.runtime:
        waits = "Synchronize" in call.name and call.thread == kineto.main_thread and call.start < first
        if waits and any(call.start < span.start < call.end for span in orphans):
            return call.end
    return 0.0
