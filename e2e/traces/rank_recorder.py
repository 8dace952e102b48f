"""Conversion of one rank's window of a profile to a :class:`RankGraph`: threads of host work, launches, waits.

Tasks; calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields

from e2e.step.execution_graph import (
    Action,
    Await,
    Duration,
    HostWork,
    Launch,
    RankGraph,
    RecordEvent,
    Signal,
    Synchronize,
    Task,
    TaskKind,
)
from e2e.traces.call_info import CallNames
from e2e.traces.formats.profile import HostSpan, KinetoTrace
from e2e.traces.host_pieces import HostPieces, top_operators
from e2e.traces.linking.device_order import TOLERANCE, DeviceOrder, LaunchedWork
from e2e.traces.linking.device_works import device_works
from e2e.traces.linking.handover import Burst, bursts
from e2e.traces.linking.launch_cost import LaunchCosts
from e2e.traces.linking.link import LinkedTrace
from e2e.traces.linking.nesting import nest
from e2e.traces.linking.step_window import StepWindow
from e2e.traces.profiled_ranges import profiled_ranges
from e2e.traces.recorded_collectives import CollectiveReader
from e2e.traces.synchronization import Synchronizations, TimedActions


@dataclass
class Removed:
    """Host waiting time that was removed, in seconds."""

    # Waiting in synchronising calls.
    synchronization: float = 0.0
    # Waiting in launches while the queue was full.
    full_queue: float = 0.0
    # Waiting of the main thread for another thread.
    other_thread: float = 0.0

    @staticmethod
    def total(parts: Iterable[Removed]) -> Removed:
        """Return the sums over ``parts``."""
        parts = list(parts)
        return Removed(*(sum(getattr(part, field.name) for part in parts) for field in fields(Removed)))


@dataclass(frozen=True)
class RecordedTimes:
    """Recorded times in seconds, counted from the moment at which the first rank began."""

    start: float
    end: float
    # End of each task of the rank's graph.
    tasks: tuple[float, ...]

    @property
    def seconds(self) -> float:
        """Duration of the rank's step."""
        return self.end - self.start


class RankRecorder:
    """Builder of the graph of ``window``, to be used once, with figures of the recording."""

    def __init__(self, kineto: KinetoTrace, window: StepWindow, linked: LinkedTrace | None = None) -> None:
        self._kineto = kineto
        self.window = window
        self.removed = Removed()
        self._nesting = nest(kineto)
        works = device_works(kineto)
        self._order = DeviceOrder(works)
        self._inside = [work for work in works if window.holds(work.launched)]
        self._calls = CallNames(kineto, self._nesting, linked)
        self._costs = LaunchCosts(self._order, works, self._calls.innermost)
        self._seconds = _unoverlapped(works)
        before = [work.end for work in works if work.launched < window.start]
        self.backlog_end = max(before, default=0.0)
        self.last_end = max([window.end, *(work.end for work in self._inside)])
        self.device_events = sum(len(work.spans) for work in self._inside)

    @property
    def absolute_start(self) -> float:
        """Begin of the window in seconds since the epoch."""
        return self._kineto.base_seconds + self.window.start

    @property
    def absolute_end(self) -> float:
        return self._kineto.base_seconds + self.last_end

    @property
    def rank(self) -> int:
        return self._kineto.rank

    def times(self, origin: float) -> RecordedTimes:
        """Return the recorded times, counted from ``origin`` (seconds since the epoch)."""
        shift = self._kineto.base_seconds - origin
        tasks = tuple(work.end + shift for work in self._inside)
        return RecordedTimes(self.absolute_start - origin, self.absolute_end - origin, tasks)

    def graph(self) -> RankGraph:
        """Build the rank's graph; its threads begin with the window."""
        tasks = tuple(self._tasks())
        waits = Synchronizations(self._kineto, self._order, self.window, self._inside, self._calls)
        items, records = waits.items()
        self.removed.synchronization += waits.waited
        for place, work in enumerate(self._inside):
            items.setdefault(work.thread, []).append(self._launch(place, work, records.get(place, [])))
        threads = self._threads(items)
        used = {task.call for task in tasks} | {
            action.call for actions in threads.values() for action in actions if isinstance(action, HostWork)
        }
        calls = self._calls.infos(call for call in used if call is not None)
        spans = {call: span for call, span in self._calls.spans().items() if call in calls}
        backward = {call for call, info in calls.items() if info.phase == "backward"}
        return RankGraph(
            self._kineto.rank, threads, tasks, calls, ranges=profiled_ranges(self._kineto, spans, backward)
        )

    # --- device ----------------------------------------------------------------------------------------

    def _tasks(self) -> Iterable[Task]:
        reader = CollectiveReader(self._kineto)
        for place, work in enumerate(self._inside):
            span = work.spans[0]
            around = self._calls.around(work.launch) if work.launch else []
            collective = reader.read(span, work.launch, around)
            kind: TaskKind = "collective" if collective else span.kind
            name = span.name
            if len(work.spans) > 1:
                kind, name = "graph", f"{work.launch.name if work.launch else 'graph'} of {len(work.spans)} kernels"
            yield Task(
                place,
                name,
                kind,
                work.stream,
                duration=Duration.measured(self._seconds[id(work)]),
                collective=collective,
                call=self._calls.id_of(around[0]) if around else None,
            )

    def _launch(self, place: int, work: LaunchedWork, records: Sequence[RecordEvent]) -> TimedActions:
        if work.launch is None:
            return TimedActions(work.launched, work.launched, 2, (Launch(place, Duration.measured(0.0)), *records))
        cost, actions, waited = self._costs.of(place, work)
        self.removed.full_queue += waited.full_queue
        self.removed.synchronization += waited.blocking
        launch = Launch(place, Duration.measured(cost))
        first: tuple[Action, ...] = ()
        if waited.idle:
            around = self._calls.around(work.launch)
            staged = HostWork("T4", self._calls.id_of(around[0]) if around else None, Duration.measured(waited.idle))
            first = (Synchronize(work.stream, duration=Duration.measured(0.0)), staged)
        return TimedActions(work.launch.start, work.launch.end, 2, (*first, launch, *records, *actions))

    # --- host ------------------------------------------------------------------------------------------

    def _threads(self, items: dict[int, list[TimedActions]]) -> dict[str, tuple[Action, ...]]:
        main = self._kineto.main_thread
        spans = {
            thread: [span for span in all_spans if self.window.holds(span.start)]
            for thread, all_spans in self._nesting.threads.items()
        }
        helpers = [
            thread
            for thread in spans
            if thread != main and (thread in items or any(span.kind == "operator" for span in spans[thread]))
        ]
        found = {thread: bursts(spans.get(main, []), spans[thread]) for thread in helpers}
        threads = {"main": self._main(items.setdefault(main, []), found, spans.get(main, []))}
        flag = 0
        for thread in helpers:
            name = self._name(thread, spans[thread], threads)
            threads[name] = self._helper(items.get(thread, []), found[thread], spans[thread], flag)
            flag += 2 * len(found[thread])
        return threads

    def _main(
        self, items: list[TimedActions], helpers: dict[int, list[Burst]], spans: Sequence[HostSpan]
    ) -> tuple[Action, ...]:
        flag = 0
        for found in helpers.values():
            for burst in found:
                items.append(TimedActions(burst.start, burst.start, 1, (Signal(flag),)))
                if burst.awaited is not None:
                    begin, until = burst.awaited
                    items.append(TimedActions(begin, until, 3, (Await(flag + 1),)))
                    self.removed.other_thread += until - begin
                flag += 2
        return tuple(self._assemble(items, self._pieces(spans), self.window.start, self.window.end))

    def _helper(
        self, items: list[TimedActions], found: Sequence[Burst], spans: Sequence[HostSpan], flag: int
    ) -> tuple[Action, ...]:
        pieces = self._pieces(spans)
        actions: list[Action] = []
        for burst in found:
            mine = [item for item in items if burst.start <= item.start <= burst.end]
            if burst.awaited is not None:
                mine.append(TimedActions(burst.awaited[1], burst.awaited[1], 3, (Signal(flag + 1),)))
            actions.append(Await(flag))
            actions += self._assemble(mine, pieces, burst.start, burst.end)
            flag += 2
        return tuple(actions)

    def _pieces(self, spans: Sequence[HostSpan]) -> HostPieces:
        launching = {work.launch.id for work in self._inside if work.launch is not None}
        return HostPieces(top_operators(spans, launching))

    def _assemble(self, items: list[TimedActions], pieces: HostPieces, start: float, end: float) -> list[Action]:
        """Return the items in order of time with host work between them; together they last ``end - start``."""
        actions: list[Action] = []
        now = start
        for item in sorted(items, key=lambda item: (item.start, item.order)):
            actions += self._work(pieces, now, item.start)
            actions += item.begun_at(now)
            now = max(now, item.end)
        return actions + self._work(pieces, now, end)

    def _work(self, pieces: HostPieces, start: float, end: float) -> list[Action]:
        return [
            HostWork(
                piece.kind,
                None if piece.operator is None else self._calls.id_of_span(piece.operator),
                Duration.measured(piece.seconds),
            )
            for piece in pieces.between(start, end)
        ]

    def _name(self, thread: int, spans: Sequence[HostSpan], taken: dict[str, tuple[Action, ...]]) -> str:
        autograd = any(span.name.startswith("autograd::engine::") for span in spans)
        return "autograd" if autograd and "autograd" not in taken else f"thread {thread}"


def _unoverlapped(works: Sequence[LaunchedWork]) -> dict[int, float]:
    """Seconds of each work; one that overlaps the next on its stream (times are rounded) ends where that begins.

    The same holds if its successor was already queued and began at once: the GPU takes a microsecond or two between
    kernels, which no launch on the host explains.
    """
    seconds: dict[int, float] = {}
    by_stream: dict[int, list[LaunchedWork]] = {}
    for work in works:
        by_stream.setdefault(work.stream, []).append(work)
    for chain in by_stream.values():
        chain.sort(key=lambda work: work.start)
        for work, following in zip(chain, [*chain[1:], None], strict=True):
            end = work.end if following is None else min(work.end, following.start)
            if following is not None and _waits_behind(following, end):
                end = following.start
            seconds[id(work)] = max(end - work.start, 0.0)
    return seconds


def _waits_behind(following: LaunchedWork, end: float) -> bool:
    """True if ``following`` was queued in its stream before ``end`` and began right after it."""
    queued = following.launch is not None and following.launch.end + TOLERANCE < end
    return queued and end < following.start <= end + TOLERANCE
