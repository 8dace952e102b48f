"""Recorded iteration as an execution graph with measured durations, which the simulator must reproduce.

The window of each rank becomes a :class:`e2e.step.execution_graph.RankGraph`: threads of host work, launches, waits;
tasks; calls. Collectives are recognised among the kernels, with kind, size and group.

Waiting is removed and re-created by the simulator: a synchronising call keeps only its cost after everything awaited
has ended, a launch delayed by a full queue gets the usual launch cost, the main thread's wait for autograd becomes a
signal, a collective keeps its transfer time (the shortest of several ranks).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from costmodel.base.errors import InputError
from costmodel.operators.layers import DTYPE_BYTES
from e2e.step.collective_names import ANNOTATION, KERNELS, POINT_TO_POINT, kind_of_short, same_kind
from e2e.step.execution_graph import (
    Action,
    Await,
    Collective,
    Duration,
    ExecutionGraph,
    HostWork,
    Launch,
    RankGraph,
    RecordEvent,
    Signal,
    Synchronize,
    Task,
    TaskKind,
)
from e2e.traces.host_time import Burst, HostPieces, bursts, nest, top_operators
from e2e.traces.kineto import CollectiveInfo, DeviceSpan, HostSpan, KinetoTrace
from e2e.traces.launches import (
    TOLERANCE,
    DeviceOrder,
    LaunchCosts,
    LaunchedWork,
    Synchronizations,
    TimedActions,
    device_works,
)
from e2e.traces.linked_trace import CallNames, LinkedTrace, profiled_ranges
from e2e.traces.step_window import StepWindow, choose_step_of_ranks, iterations

_EVERYONE = "all ranks"


class CollectiveReader:
    """Reader of a rank's collectives, numbered per group in launch order."""

    def __init__(self, kineto: KinetoTrace) -> None:
        self._kineto = kineto
        self._annotations = [span for span in kineto.annotations if span.name.startswith(ANNOTATION)]
        self._next: dict[str, int] = {}

    def read(self, span: DeviceSpan, launch: HostSpan | None, around: Sequence[HostSpan]) -> Collective | None:
        """Return the collective of the device work ``span``, ``None`` for other work.

        ``around``: operators around its launch. NCCL's metadata are taken from the kernel or from those operators;
        profiles without them have an annotation with kind, shape and dtype.
        """
        info = span.collective or next((op.collective for op in around if op.collective is not None), None)
        if not (info is not None and span.kind == "kernel") and not is_collective(span):
            return None
        kind, size = _from_info(info) if info is not None else self._from_annotation(launch)
        group, ranks = self._group(info)
        if kind in POINT_TO_POINT:
            group, ranks = self._pair(kind, group, ranks, None if info is None else info.peer)
        sequence = self._next.get(group, 0)
        self._next[group] = sequence + 1
        return Collective(kind, group, ranks, sequence, size)

    def _group(self, info: CollectiveInfo | None) -> tuple[str, tuple[int, ...]]:
        group = info.group if info is not None and info.group else _EVERYONE
        if info is not None and info.ranks:
            return group, info.ranks
        return group, self._kineto.process_groups.get(group) or tuple(range(self._kineto.world_size))

    def _pair(self, kind: str, group: str, ranks: tuple[int, ...], peer: int | None) -> tuple[str, tuple[int, ...]]:
        """Group of the two ranks of a message; each direction is numbered separately, as NCCL matches them."""
        own = self._kineto.rank
        others = [rank for rank in ranks if rank != own]
        if peer is None and len(others) != 1:
            raise InputError(
                f"{self._kineto.source}: a {kind} in group {group!r} of {len(ranks)} ranks does not tell its peer; "
                "record with a newer PyTorch, whose profiles say 'Dst Rank' and 'Src Rank'"
            )
        other = others[0] if peer is None else peer
        source, target = (own, other) if kind == "send" else (other, own)
        return f"{group}: {source} to {target}", (source, target)

    def _from_annotation(self, launch: HostSpan | None) -> tuple[str, int]:
        if launch is not None:
            for span in self._annotations:
                if span.thread == launch.thread and span.start <= launch.start <= span.end:
                    elements = sum(_elements(shape) for shape in span.shapes)
                    width = DTYPE_BYTES.get(span.dtypes[0], 4) if span.dtypes else 4
                    # The annotation of a message names its ranks: "nccl:send 0->1".
                    name = span.name.removeprefix(ANNOTATION).partition(" ")[0]
                    return kind_of_short(name) or "all_reduce", elements * width
        raise InputError(
            f"{self._kineto.source}: a collective kernel without its kind (no NCCL metadata, no annotation); record "
            "with torch.profiler of 2.0 or newer"
        )


def is_collective(span: DeviceSpan) -> bool:
    """True for NCCL's kernels, recognised by their names."""
    return span.kind == "kernel" and span.name.startswith(KERNELS)


def shortest_transfer(durations: Sequence[float]) -> float:
    """Transfer time of one collective: the shortest of its kernel times on all ranks.

    That is the time of the last rank to arrive.

    All others wait for that rank inside their kernels; the transfer itself takes equally long on all of them.
    """
    return min(durations)


def _from_info(info: CollectiveInfo) -> tuple[str, int]:
    return info.kind, info.input_elements * DTYPE_BYTES.get(info.dtype, 4)


def _elements(shape: object) -> int:
    """Product of a shape; the sum over a list of shapes."""
    if not isinstance(shape, list):
        return 0
    if any(isinstance(part, list) for part in shape):
        return sum(_elements(part) for part in shape)
    product = 1
    for extent in shape:
        product *= int(extent)
    return product


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


@dataclass(frozen=True)
class RecordedStep:
    """Graph of the iteration ``window`` with figures of the recording, in seconds."""

    graph: ExecutionGraph
    window: StepWindow
    # Time from its start to the start of the next one on the host.
    period_seconds: float
    # Time from its start to the end of the last work launched in it, or of the host's part if that is later; comparable
    # with a simulation from an idle start if the backlog is small.
    span_seconds: float
    # Time that earlier work still ran into the window.
    backlog_seconds: float
    # Device events launched in the window, covered by `len(graph.ranks[i].tasks)` tasks (a graph launch is one task).
    device_events: int
    # Waiting time removed from the host, by reason.
    removed: Removed
    # Begin and end of each of several ranks, and the ends of its device work.
    ranks: Mapping[int, RecordedTimes] = field(default_factory=dict)
    # It is one of several iterations of one rank: the backlog is that of an identical iteration.
    repeated: bool = False

    @property
    def recorded_seconds(self) -> float:
        """Time that a replay must reproduce.

        If repeated the time to the start of the next iteration, else to the end of the last work.
        """
        return self.period_seconds if self.repeated else self.span_seconds

    @property
    def starts(self) -> dict[int, float]:
        """Delay of each rank's begin after the first one's, in seconds, for the simulator."""
        return {rank: times.start for rank, times in self.ranks.items()}


def recorded_graph(
    kineto: KinetoTrace, linked: LinkedTrace | None = None, step: int | str | None = None
) -> RecordedStep:
    """Convert one iteration of one rank (``step``: see :func:`e2e.traces.step_window.choose_step`).

    With ``linked``, tasks and calls have the ids of the execution trace. The other ranks of a collective are folded
    into this one: its duration is the recorded one, waiting included. Raises :class:`InputError` for a profile without
    device work in that iteration.
    """
    window = choose_step_of_ranks([kineto], step, None if linked is None else {kineto.rank: linked})[0]
    recorder = RankRecorder(kineto, window, linked)
    graph = recorder.graph()
    if not graph.tasks:
        raise InputError(f"{kineto.source}: no device work in {window.name}; record with ProfilerActivity.CUDA")
    # Groups may be smaller than the job, such as those of tensor-parallel neighbours.
    size = max([kineto.world_size, *(len(task.collective.ranks) for task in graph.tasks if task.collective)])
    return RecordedStep(
        ExecutionGraph((graph,), {graph.rank: size} if size > 1 else {}, f"{kineto.source} ({window.name})"),
        window,
        window.seconds,
        recorder.last_end - window.start,
        max(recorder.backlog_end - window.start, 0.0),
        recorder.device_events,
        recorder.removed,
        repeated=len(iterations(kineto)) > 1 and not isinstance(step, str),
    )


def recorded_ranks(
    profiles: Sequence[KinetoTrace],
    step: int | str | None = None,
    links: Mapping[int, LinkedTrace] | None = None,
) -> RecordedStep:
    """Convert one iteration of several ranks of one job, recorded at the same time with synchronised clocks.

    Every rank begins at its recorded time (``starts`` of the simulator); a collective takes its time on the rank that
    arrived last. With ``links`` (by rank) tasks and calls have the ids of the execution traces. Raises
    :class:`InputError` if two profiles are of one rank or their collectives do not match.
    """
    if len({profile.rank for profile in profiles}) < len(profiles) or not profiles:
        sources = ", ".join(profile.source for profile in profiles)
        raise InputError(f"two profiles of one rank, or none ({sources}); give one of every rank")
    known = links or {}
    profiles = sorted(profiles, key=lambda profile: profile.rank)
    windows = choose_step_of_ranks(profiles, step, known)
    recorders = [
        RankRecorder(profile, window, known.get(profile.rank))
        for profile, window in zip(profiles, windows, strict=True)
    ]
    origin = min(recorder.absolute_start for recorder in recorders)
    graphs = [recorder.graph() for recorder in recorders]
    transfers = _transfers(graphs, profiles[0].source)
    graphs = [_with_transfers(graph, transfers) for graph in graphs]
    ends = [recorder.absolute_end for recorder in recorders]
    return RecordedStep(
        ExecutionGraph(tuple(graphs), {}, f"{profiles[0].source} and {len(profiles) - 1} other ranks"),
        recorders[0].window,
        max(recorder.window.seconds for recorder in recorders),
        max(ends) - origin,
        max(max(recorder.backlog_end - recorder.window.start, 0.0) for recorder in recorders),
        sum(recorder.device_events for recorder in recorders),
        Removed.total([recorder.removed for recorder in recorders]),
        {recorder.rank: recorder.times(origin) for recorder in recorders},
    )


def _transfers(graphs: Sequence[RankGraph], source: str) -> dict[tuple[str, int], float]:
    """Transfer seconds of every (group, sequence), which all its present ranks must have, with the same kind."""
    seconds: dict[tuple[str, int], dict[int, float]] = {}
    first: dict[tuple[str, int], tuple[int, Collective]] = {}
    for graph in graphs:
        for task in graph.tasks:
            if task.collective is None or task.duration is None:
                continue
            key = (task.collective.group, task.collective.sequence)
            seconds.setdefault(key, {})[graph.rank] = task.duration.seconds
            rank, other = first.setdefault(key, (graph.rank, task.collective))
            if not same_kind(task.collective.kind, other.kind) and rank != graph.rank:
                raise InputError(
                    f"{source}: collective {key[1]} of group {key[0]!r} is {other.kind} on rank {rank} and "
                    f"{task.collective.kind} on rank {graph.rank}; give profiles of the same iteration"
                )
    here = {graph.rank for graph in graphs}
    for key, (rank, collective) in first.items():
        missing = sorted((here & set(collective.ranks)) - seconds[key].keys())
        if missing:
            names = ", ".join(str(each) for each in missing[:8])
            raise InputError(
                f"{source}: {collective.kind} {key[1]} of group {key[0]!r} was recorded on rank {rank}, but not on "
                f"rank {names}; give profiles of the same iteration"
            )
    return {key: shortest_transfer(list(values.values())) for key, values in seconds.items()}


def _with_transfers(graph: RankGraph, transfers: Mapping[tuple[str, int], float]) -> RankGraph:
    tasks = tuple(
        task
        if task.collective is None
        else replace(task, duration=Duration.measured(transfers[task.collective.group, task.collective.sequence]))
        for task in graph.tasks
    )
    return replace(graph, tasks=tasks)
