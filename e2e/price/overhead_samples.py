"""Samples of host overheads from one profile: T1 to T5 of every operator, without waiting time."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from e2e.step.operator_trace import gap_names
from e2e.traces.host_time import Burst, Nesting, bursts, nest
from e2e.traces.kineto import HostSpan, KinetoTrace
from e2e.traces.launches import DeviceOrder, LaunchCosts, device_works, waiting_seconds
from e2e.traces.step_window import iterations


@dataclass(frozen=True, slots=True)
class OverheadSample:
    """Seconds of one piece, and the number of profiler records in it: of operators, of runtime calls."""

    seconds: float
    operators: float
    calls: float


@dataclass(frozen=True)
class OverheadSamples:
    """Samples of a profile."""

    # (kind, name) -> samples; see :mod:`e2e.price.host_overheads`.
    values: Mapping[tuple[str, str], Sequence[OverheadSample]]
    source: str = ""
    gpu: str = ""
    # Numbers of records read.
    operators: int = 0
    calls: int = 0
    # Number of recorded iterations.
    steps: int = 1


@dataclass(slots=True)
class _Clock:
    """State at the beginning of a piece: time, waiting so far, records so far. An operator's start and end count half a
    record each.
    """

    time: float
    waited: float
    operators: float
    calls: float


@dataclass(slots=True)
class _Open:
    """Open operator, with the clock at its start or at the end of its last launch."""

    span: HostSpan
    since: _Clock
    launched: bool = False


@dataclass(frozen=True)
class AnnotationMarks:
    """Borders of marked ranges on a thread: ``times``, ascending, and for each the name of the range that begins, or an
    empty name where one ends.
    """

    times: Sequence[float]
    names: Sequence[str]

    @staticmethod
    def of(annotations: Iterable[HostSpan], spans: Sequence[HostSpan], thread: int) -> AnnotationMarks:
        """Collect the ranges on ``thread`` that contain an operator of ``spans``; execution traces record no others."""
        starts = [span.start for span in spans if span.kind == "operator"]
        marks: list[tuple[float, str]] = []
        for each in annotations:
            if each.thread == thread and bisect_left(starts, each.start) < bisect_left(starts, each.end):
                marks += [(each.start, each.name), (each.end, "")]
        marks.sort(key=lambda mark: mark[0])
        return AnnotationMarks([time for time, _ in marks], [name for _, name in marks])

    def between(self, start: float, end: float) -> tuple[str, ...]:
        """Return the names of the parts of the gap from ``start`` to ``end``; see
        :func:`e2e.step.operator_trace.gap_names`.
        """
        names = self.names[bisect_left(self.times, start) : bisect_right(self.times, end)]
        begun = [name for name in names if name]
        return gap_names(len(names) - len(begun), begun)


@dataclass
class _Walk:
    """Walk over the spans of one thread in order."""

    # Id of a launch call -> its seconds without waiting.
    launches: Mapping[int, float]
    # Id of a synchronising call -> seconds of waiting.
    waits: Mapping[int, float]
    # Borders of marked ranges around operators.
    marks: AnnotationMarks
    values: dict[tuple[str, str], list[OverheadSample]]
    waited: float = 0.0
    operators: float = 0.0
    calls: float = 0.0
    stack: list[_Open] = field(default_factory=list)
    gap: _Clock | None = None

    def run(self, spans: Iterable[HostSpan], nesting: Nesting, pauses: Sequence[tuple[float, float]]) -> None:
        """Collect the samples of ``spans``. ``pauses``: intervals in which the thread waited for another thread, in
        order.
        """
        place = 0
        for span in spans:
            self._close(nesting.parent[span.id])
            while place < len(pauses) and pauses[place][1] <= span.start:
                self.waited += pauses[place][1] - pauses[place][0]
                place += 1
            if span.kind == "operator":
                self._open(span)
            elif span.id in self.launches:
                self._launch(span)
            elif span.id in self.waits:
                self._synchronize(span)
            else:
                self.calls += 1
        self._close(None)

    def _now(self, time: float) -> _Clock:
        return _Clock(time, self.waited, self.operators, self.calls)

    def _add(self, kind: str, name: str, since: _Clock, until: float) -> None:
        seconds = until - since.time - (self.waited - since.waited)
        sample = OverheadSample(max(seconds, 0.0), self.operators - since.operators, self.calls - since.calls)
        self.values[kind, name].append(sample)

    def _gap(self, span: HostSpan, since: _Clock) -> None:
        """Add the gap before ``span``; a gap with borders of marked ranges is divided evenly among the borders."""
        names = self.marks.between(since.time, span.start) or (span.name,)
        seconds = max(span.start - since.time - (self.waited - since.waited), 0.0) / len(names)
        operators, calls = (self.operators - since.operators) / len(names), (self.calls - since.calls) / len(names)
        for name in names:
            self.values["T1", name].append(OverheadSample(seconds, operators, calls))

    def _open(self, span: HostSpan) -> None:
        self.operators += 0.5
        if not self.stack and self.gap is not None:
            self._gap(span, self.gap)
        self.stack.append(_Open(span, self._now(span.start)))

    def _launch(self, call: HostSpan) -> None:
        seconds = self.launches[call.id]
        for operator in self.stack:
            self._add("T5" if operator.launched else "T2", operator.span.name, operator.since, call.start)
        self.values["T4", call.name].append(OverheadSample(seconds, 0.0, 1.0))
        self.calls += 1
        for operator in self.stack:
            operator.launched = True
            operator.since = self._now(call.end)
        if not self.stack and self.gap is not None:
            # A launch outside any operator: its time is not part of the gap.
            self.waited += call.seconds

    def _synchronize(self, call: HostSpan) -> None:
        """Add a synchronising call: it is not part of any piece, and its cost without waiting is a separate T4
        sample.
        """
        self.values["T4", call.name].append(OverheadSample(max(call.seconds - self.waits[call.id], 0.0), 0.0, 1.0))
        self.waited += call.seconds

    def _close(self, parent: int | None) -> None:
        """End the open operators up to ``parent``, the parent of the next span."""
        while self.stack and self.stack[-1].span.id != parent:
            operator = self.stack.pop()
            self.operators += 0.5
            end = operator.span.end
            self._add("T3" if operator.launched else "whole", operator.span.name, operator.since, end)
            if not self.stack:
                self.gap = self._now(end)


def extract(kineto: KinetoTrace) -> OverheadSamples:
    """Extract all samples of ``kineto``: every operator on every thread.

    Waiting is excluded: synchronising calls, launches delayed by a full queue or by a copy that they wait for, one
    thread's wait for another, and a helper thread's gaps between bursts.
    """
    nesting = nest(kineto)
    works = device_works(kineto)
    order = DeviceOrder(works)
    costs = LaunchCosts(order, works, lambda call: None)
    launches = {
        work.launch.id: work.launch.seconds - costs.of(place, work)[2].seconds
        for place, work in enumerate(works)
        if work.launch is not None
    }
    waits = {call.id: waiting_seconds(call, order, kineto) for call in kineto.runtime if "Synchronize" in call.name}
    values: dict[tuple[str, str], list[OverheadSample]] = defaultdict(list)
    main = nesting.threads.get(kineto.main_thread, ())
    helpers = {
        thread: bursts(main, spans)
        for thread, spans in nesting.threads.items()
        if thread != kineto.main_thread and any(span.kind == "operator" for span in spans)
    }
    pauses = sorted(burst.awaited for found in helpers.values() for burst in found if burst.awaited)
    marks = AnnotationMarks.of(kineto.annotations, main, kineto.main_thread)
    _Walk(launches, waits, marks, values).run(main, nesting, pauses)
    for thread, found in helpers.items():
        for part in _by_burst(nesting.threads[thread], found):
            _Walk(launches, waits, AnnotationMarks((), ()), values).run(part, nesting, ())
    steps = len(iterations(kineto))
    return OverheadSamples(dict(values), kineto.source, kineto.gpu, len(kineto.operators), len(kineto.runtime), steps)


def _by_burst(spans: Sequence[HostSpan], found: Sequence[Burst]) -> list[list[HostSpan]]:
    parts: list[list[HostSpan]] = [[] for _ in found]
    place = 0
    for span in spans:
        while place + 1 < len(found) and span.start >= found[place + 1].start:
            place += 1
        parts[place].append(span)
    return parts
