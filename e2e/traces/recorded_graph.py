"""A recorded iteration as an execution graph with measured durations: what the simulator must give back.

Waiting is taken out and re-created by the simulator: a synchronising call keeps only what it costs once everything it
waits for has ended, a launch that was held up by a full queue what launches cost else, the main thread's wait for
autograd's becomes a signal, a collective keeps its transfer time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from costmodel.base.errors import InputError
from e2e.step.collective_names import same_kind
from e2e.step.execution_graph import Collective, Duration, ExecutionGraph, RankGraph
from e2e.traces.formats.profile import KinetoTrace
from e2e.traces.linking.link import LinkedTrace
from e2e.traces.linking.step_window import StepWindow, choose_together, iterations
from e2e.traces.rank_recorder import RankRecorder, RecordedTimes, Removed
from e2e.traces.recorded_collectives import transfer_seconds


@dataclass(frozen=True)
class RecordedStep:
    """``graph`` of the iteration ``window`` and what the recording says of it, in seconds.

    ``period_seconds``: from its start to the next one's on the host. ``span_seconds``: from its start to the end of
    the last work launched in it, or of the host's part if that is later; comparable with a simulation from a standing
    start when ``backlog_seconds``, how long earlier work still ran into it, is small. ``device_events`` launched in
    the window are covered by ``len(graph.ranks[i].tasks)`` tasks (a graph launch is one task with many events).
    ``repeated``: it is one of several iterations of one rank: earlier work that runs into it is that of one alike.
    ``removed``: waiting time taken out of the host, by reason. ``ranks``: of several ranks, when each began and ended
    and when its device work ended.
    """

    graph: ExecutionGraph
    window: StepWindow
    period_seconds: float
    span_seconds: float
    backlog_seconds: float
    device_events: int
    removed: Removed
    ranks: Mapping[int, RecordedTimes] = field(default_factory=dict)
    repeated: bool = False

    @property
    def recorded_seconds(self) -> float:
        """What a replay must give back: the time to the next one of its kind, else to the end of its last work."""
        return self.period_seconds if self.repeated else self.span_seconds

    @property
    def starts(self) -> dict[int, float]:
        """How much later than the first each rank began, for the simulator."""
        return {rank: times.start for rank, times in self.ranks.items()}


def recorded_graph(
    kineto: KinetoTrace, linked: LinkedTrace | None = None, step: int | str | None = None
) -> RecordedStep:
    """One iteration of one rank (see :func:`e2e.traces.linking.step_window.choose` for ``step``).

    With ``linked``, tasks and calls carry the ids of the execution trace. The other ranks of a collective are folded
    into this one: its duration is the recorded one, waiting included. :class:`InputError` for a profile without
    device work in that iteration.
    """
    window = choose_together([kineto], step, None if linked is None else {kineto.rank: linked})[0]
    recorder = RankRecorder(kineto, window, linked)
    graph = recorder.graph()
    if not graph.tasks:
        raise InputError(f"{kineto.source}: no device work in {window.name}; record with ProfilerActivity.CUDA")
    # Groups of the job may be smaller than it, such as those of tensor-parallel neighbours.
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
    """One iteration of several ranks of one job, recorded at the same time with clocks in step.

    Every rank begins when it began (``starts`` of the simulator); a collective takes what it took on the rank that
    arrived last. With ``links`` (by rank) tasks and calls carry the ids of the execution traces. :class:`InputError`
    if two profiles are of one rank or their collectives do not match.
    """
    if len({profile.rank for profile in profiles}) < len(profiles) or not profiles:
        sources = ", ".join(profile.source for profile in profiles)
        raise InputError(f"two profiles of one rank, or none ({sources}); give one of every rank")
    known = links or {}
    profiles = sorted(profiles, key=lambda profile: profile.rank)
    windows = choose_together(profiles, step, known)
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
    """Transfer seconds of every (group, sequence); every rank of it that is here must have it, of the same kind."""
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
    return {key: transfer_seconds(list(values.values())) for key, values in seconds.items()}


def _with_transfers(graph: RankGraph, transfers: Mapping[tuple[str, int], float]) -> RankGraph:
    tasks = tuple(
        task
        if task.collective is None
        else replace(task, duration=Duration.measured(transfers[task.collective.group, task.collective.sequence]))
        for task in graph.tasks
    )
    return replace(graph, tasks=tasks)
