"""Device work of a profile by launch: every device span belongs to exactly one :class:`LaunchedWork`."""

from __future__ import annotations

from bisect import bisect_right

from e2e.traces.formats.profile import DeviceSpan, KinetoTrace
from e2e.traces.linking.device_order import LaunchedWork
from e2e.traces.linking.nesting import launches_by_correlation

# Launch time of work that was already running at the start of the recording: before everything in it.
BEFORE_RECORDING = -1.0


def device_works(kineto: KinetoTrace) -> list[LaunchedWork]:
    """Return all work in launch order.

    A profiler that starts late or drops records leaves device spans without a launch. Such work is assumed to be
    launched by the main thread when it began, and never before earlier launches on its stream; but work that ran before
    the first work with a launch, up to a call that waited for it, was launched before the recording began.
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
    """Insert each orphan at its place on its stream, at the latest moment before the next launch on that stream."""
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
    """Return the end of the first call that waited for orphans before anything was launched, 0 if there is none.

    A host that is held in such a call launches nothing, so work that begins meanwhile was launched earlier.
    """
    first = min((work.launched for work in works), default=kineto.end)
    for call in kineto.runtime:
        waits = "Synchronize" in call.name and call.thread == kineto.main_thread and call.start < first
        if waits and any(call.start < span.start < call.end for span in orphans):
            return call.end
    return 0.0
