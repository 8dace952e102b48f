"""Recorded iteration as an execution graph with measured durations, which the simulator must reproduce.

Waiting is removed and re-created by the simulator: a synchronising call keeps only its cost after everything awaited
has ended, a launch delayed by a full queue gets the usual launch cost, the main thread's wait for autograd becomes a
signal, a collective keeps its transfer time.
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
    """Convert one iteration of one rank (``step``: see :func:`e2e.traces.linking.step_window.choose`).

    With ``linked``, tasks and calls have the ids of the execution trace. The other ranks of a collective are folded
    into this one: its duration is the recorded one, waiting included. Raises :class:`InputError` for a profile without
    device work in that iteration.
    """
    window = choose_together([kineto], step, None if linked is None else {kineto.rank: linked})[0]
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
    return {key: transfer_seconds(list(values.values())) for key, values in seconds.items()}


def _with_transfers(graph: RankGraph, transfers: Mapping[tuple[str, int], float]) -> RankGraph:
    tasks = tuple(
        task
        if task.collective is None
        else replace(task, duration=Duration.measured(transfers[task.collective.group, task.collective.sequence]))
        for task in graph.tasks
    )
    return replace(graph, tasks=tasks)
