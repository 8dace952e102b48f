"""Samples of host overheads from one profile: T1 to T5 of every operator, without the time that was waiting."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from e2e.step.marked_ranges import gap_names
from e2e.traces.formats.profile import HostSpan, KinetoTrace
from e2e.traces.linking.device_order import DeviceOrder
from e2e.traces.linking.device_works import device_works
from e2e.traces.linking.handover import Burst, bursts
from e2e.traces.linking.launch_cost import LaunchCosts
from e2e.traces.linking.nesting import Nesting, nest
from e2e.traces.linking.step_window import iterations
from e2e.traces.synchronization import waiting_seconds


@dataclass(frozen=True, slots=True)
class OverheadSample:
    """Seconds of one piece and how many records the profiler made in it: of operators, of runtime calls."""

    seconds: float
    operators: float
    calls: float


@dataclass(frozen=True)
class OverheadSamples:
    """``values``: (kind, name) -> samples, see :mod:`e2e.price.overheads`; ``operators``, ``calls``: records read;
    ``steps``: iterations recorded.
    """

    values: Mapping[tuple[str, str], Sequence[OverheadSample]]
    source: str = ""
    gpu: str = ""
    operators: int = 0
    calls: int = 0
    steps: int = 1


@dataclass(slots=True)
class _Clock:
    """Where a piece began: time, waiting so far, records so far. An operator's start and end are half a record each."""

    time: float
    waited: float
    operators: float
    calls: float


@dataclass(slots=True)
class _Open:
    """An operator that has begun: its clock at the start, and at the end of its last launch."""

    span: HostSpan
    since: _Clock
    launched: bool = False


@dataclass(frozen=True)
class AnnotationMarks:
    """Where marked ranges of a thread begin and end: ``times``, ascending, and at each the name of what begins, or
    nothing where one ends.
    """

    times: Sequence[float]
    names: Sequence[str]

    @staticmethod
    def of(annotations: Iterable[HostSpan], spans: Sequence[HostSpan], thread: int) -> AnnotationMarks:
        """Those on ``thread`` that hold some operator of ``spans``: an execution trace tells of no others."""
        starts = [span.start for span in spans if span.kind == "operator"]
        marks: list[tuple[float, str]] = []
        for each in annotations:
            if each.thread == thread and bisect_left(starts, each.start) < bisect_left(starts, each.end):
                marks += [(each.start, each.name), (each.end, "")]
        marks.sort(key=lambda mark: mark[0])
        return AnnotationMarks([time for time, _ in marks], [name for _, name in marks])

    def between(self, start: float, end: float) -> tuple[str, ...]:
        """What the gap from ``start`` to ``end`` consists of; see :func:`e2e.step.marked_ranges.gap_names`."""
        names = self.names[bisect_left(self.times, start) : bisect_right(self.times, end)]
        begun = [name for name in names if name]
        return gap_names(len(names) - len(begun), begun)


@dataclass
class _Walk:
    """One thread's spans in order. ``launches``: seconds of each launch call without waiting, by its id; ``waits``:
    seconds that each synchronising call waited; ``marks``: of ranges around operators.
    """

    launches: Mapping[int, float]
    waits: Mapping[int, float]
    marks: AnnotationMarks
    values: dict[tuple[str, str], list[OverheadSample]]
    waited: float = 0.0
    operators: float = 0.0
    calls: float = 0.0
    stack: list[_Open] = field(default_factory=list)
    gap: _Clock | None = None

    def run(self, spans: Iterable[HostSpan], nesting: Nesting, pauses: Sequence[tuple[float, float]]) -> None:
        """``pauses``: stretches in which the thread waited for another one, in order."""
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
        """The gap before ``span``; one in which marked ranges begin or end is their time, an equal part of each."""
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
            # Launched outside any operator: its time is not part of the gap.
            self.waited += call.seconds

    def _synchronize(self, call: HostSpan) -> None:
        """A synchronising call is no part of a piece; what it costs beyond waiting counts as a call of its own."""
        self.values["T4", call.name].append(OverheadSample(max(call.seconds - self.waits[call.id], 0.0), 0.0, 1.0))
        self.waited += call.seconds

    def _close(self, parent: int | None) -> None:
        """Ends the operators inside ``parent``, which is the one around what begins now."""
        while self.stack and self.stack[-1].span.id != parent:
            operator = self.stack.pop()
            self.operators += 0.5
            end = operator.span.end
            self._add("T3" if operator.launched else "whole", operator.span.name, operator.since, end)
            if not self.stack:
                self.gap = self._now(end)


def extract(kineto: KinetoTrace) -> OverheadSamples:
    """All samples of ``kineto``: every operator on every thread.

    Waiting is no overhead: synchronising calls, launches held up by a full queue or by a copy that they wait for, one
    thread's wait for another are left out; a helper thread's gaps between bursts too.
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
