"""Replay of a recorded job with its own kernel, transfer and host times: errors of the scheduler alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError
from e2e.explain.collective_figures import collective_figures
from e2e.simulate.simulator import simulate
from e2e.simulate.timeline import Timeline
from e2e.traces.recorded_graph import RecordedStep, recorded_ranks
from e2e.traces.recorded_run import RecordedRun, read_recorded_run
from lab.data.data_folder import BROUGHT

# The public job of several ranks: profiles, execution traces.
DLRM_PROFILES = Path("traces/dlrm_8xV100/dlrm_kineto.tar.gz")
DLRM_TRACES = Path("traces/dlrm_8xV100/dlrm_pytorch_et.tar.gz")


@dataclass(frozen=True)
class RankReplay:
    """Step of one rank in seconds. ``linked``: operators of its trace with a profiled one, and their total."""

    rank: int
    recorded_seconds: float
    simulated_seconds: float
    error: float
    linked: tuple[int, int] | None


@dataclass(frozen=True)
class CollectiveReplay:
    """One collective over all ranks."""

    kind: str
    group: str
    sequence: int
    ranks: int
    size_bytes: int
    # Parts into which the recorded kernel times are split.
    transfer_seconds: float
    longest_wait_seconds: float
    # Largest error of its end over the ranks, as a share of their steps.
    end_error: float


@dataclass(frozen=True)
class Replay:
    """Result of a replay. ``source``: the first profile. ``step_error``: of the whole job, first start to last end."""

    source: str
    ranks: Sequence[RankReplay]
    collectives: Sequence[CollectiveReplay]
    step_error: float

    @property
    def worst_rank(self) -> float:
        """Largest error of a rank's step."""
        return max((abs(each.error) for each in self.ranks), default=0.0)

    @property
    def worst_collective(self) -> float:
        """Largest error of a collective's end."""
        return max((each.end_error for each in self.collectives), default=0.0)

    def record(self) -> dict[str, Any]:
        """JSON document of the replay."""
        return {**asdict(self), "worst_rank": self.worst_rank, "worst_collective": self.worst_collective}


def replay_public(data: Path) -> Replay:
    """Replay the 8-rank DLRM run of the data folder. ``InputError`` if it does not exist."""
    for path in (data / DLRM_PROFILES, data / DLRM_TRACES):
        if not path.is_file():
            raise InputError(f"{path}: no recorded ranks there; {BROUGHT}")
    return replay(read_recorded_run([data / DLRM_PROFILES], [data / DLRM_TRACES]))


def replay(run: RecordedRun) -> Replay:
    """Simulate and compare every rank and every collective of ``run``."""
    step = recorded_ranks(run.profiles, links=run.links)
    return compare(step, simulate(step.graph, step.starts), run)


def compare(step: RecordedStep, timeline: Timeline, run: RecordedRun) -> Replay:
    """Compare the ``timeline`` of a replay with the recording."""
    ranks = []
    for graph in step.graph.ranks:
        times = step.ranks[graph.rank]
        simulated = timeline.rank_ends(graph.rank)[0] - times.start
        linked = run.links.get(graph.rank)
        counts = None if linked is None else (linked.linked_operators, linked.total_operators)
        error = simulated / times.seconds - 1.0
        ranks.append(RankReplay(graph.rank, times.seconds, simulated, error, counts))
    ends = _end_errors(step, timeline)
    collectives = [
        CollectiveReplay(
            each.kind,
            each.group,
            each.sequence,
            len(each.waiting_seconds),
            each.size_bytes,
            each.transfer_seconds,
            each.skew_seconds,
            ends[each.group, each.sequence],
        )
        for each in collective_figures(step.graph, timeline)
    ]
    return Replay(run.profiles[0].source, ranks, collectives, timeline.step_seconds / step.span_seconds - 1.0)


def _end_errors(step: RecordedStep, timeline: Timeline) -> Mapping[tuple[str, int], float]:
    """Largest distance of simulated and recorded end over the ranks, as a share of each rank's step."""
    found: dict[tuple[str, int], float] = {}
    for graph in step.graph.ranks:
        times = step.ranks[graph.rank]
        for task in graph.tasks:
            if task.collective is not None:
                key = (task.collective.group, task.collective.sequence)
                off = abs(timeline.task(graph.rank, task.id).end - times.tasks[task.id]) / times.seconds
                found[key] = max(off, found.get(key, 0.0))
    return found
