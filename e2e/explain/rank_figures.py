"""Figures of one rank of a simulated step: its work, its waits and its memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from e2e.explain.breakdowns import kernel_count, operator_count
from e2e.explain.critical_path import CriticalPath
from e2e.explain.rank_attribution import WAITS, rank_attribution
from e2e.explain.simulated_step import SimulatedStep
from e2e.step.execution_graph import RankGraph
from e2e.step.memory import MemoryUsage
from e2e.step.memory_room import Verdict, verdict

_FITS: dict[Verdict, bool | None] = {"fits": True, "does not fit": False, "may not fit": None, "not known": None}


@dataclass(frozen=True)
class RankFigures:
    """Figures of one rank of the graph within one step."""

    rank: int
    # Number of identical ranks that it represents.
    multiplicity: int
    # Time from its end of the previous step to its end of this one.
    step_seconds: float
    # Time in which some kernel runs.
    compute_seconds: float
    # Time in which some collective is on a stream, waiting included.
    communication_seconds: float
    # Time in which a transfer is under way and no kernel runs.
    exposed_transfer_seconds: float
    # Time without kernels and transfers, held up by other ranks in a collective.
    exposed_wait_seconds: float
    # Time without kernels and transfers, held up by its neighbours in a pipeline.
    bubble_seconds: float
    # Time without kernels and transfers, held up by its own host, which has nothing ready.
    idle_seconds: float
    # The rank's own critical path by kind, waits included (e2e/explain/rank_attribution.py); sums to the step's window.
    attribution: Mapping[str, float]
    # Part of the critical path across ranks on this rank; 0 if the step never waits for it.
    path_seconds: float = 0.0
    # Launches and operator calls of one step.
    kernels: int = 0
    operators: int = 0
    # Peak with the `reserve` of the caching allocator, where that is simulated; `memory_breakdown` sums to it.
    peak_memory_bytes: int | None = None
    memory_breakdown: Mapping[str, int] | None = None
    fits: bool | None = None

    @property
    def allocated_bytes(self) -> int | None:
        """Bytes in use at the peak, without the allocator's reserve."""
        if self.peak_memory_bytes is None:
            return None
        return self.peak_memory_bytes - (self.memory_breakdown or {}).get("reserve", 0)


def rank_figures(
    step: SimulatedStep, rank: RankGraph, path: CriticalPath, memory: MemoryUsage | None, room: int
) -> RankFigures:
    """Return the figures of ``rank``.

    ``path``: path of this rank alone; ``memory``: its usage, ``None`` if unknown; ``room``: bytes available for it.
    """
    memory = None if memory is None else memory.within(room)
    low, high = step.window
    start = step.starts.get(rank.rank, 0.0)
    activity = step.timeline.activity(rank.rank, (max(low, min(start, high)), high))
    ends = (start, *step.timeline.rank_ends(rank.rank))
    attribution = rank_attribution(path, rank, step.timeline)
    wait, bubble = (attribution.get(kind, 0.0) for kind in WAITS)
    used = activity.compute + activity.exposed_transfer + wait + bubble
    return RankFigures(
        rank=rank.rank,
        multiplicity=step.graph.multiplicity.get(rank.rank, 1),
        step_seconds=ends[step.iteration + 1] - ends[step.iteration],
        compute_seconds=activity.compute,
        communication_seconds=activity.communication,
        exposed_transfer_seconds=activity.exposed_transfer,
        exposed_wait_seconds=wait,
        bubble_seconds=bubble,
        idle_seconds=max(activity.window - used, 0.0),
        attribution=attribution,
        path_seconds=step.path.by_rank.get(rank.rank, 0.0),
        kernels=kernel_count(rank),
        operators=operator_count(rank),
        peak_memory_bytes=None if memory is None else memory.peak_bytes,
        memory_breakdown=None if memory is None else {str(role): size for role, size in memory.breakdown.items()},
        fits=_FITS[verdict(None if memory is None else memory.allocated_bytes, room)],
    )


def memory_verdict(ranks: Sequence[RankFigures], room: int) -> Verdict:
    """Return the worst memory verdict of ``ranks``."""
    found = {verdict(rank.allocated_bytes, room) for rank in ranks}
    worst: tuple[Verdict, ...] = ("does not fit", "may not fit", "not known")
    return next((each for each in worst if each in found), "fits")


def fits(found: Verdict) -> bool | None:
    """Convert a verdict to ``fits``; ``None``: too close to the capacity, or unknown for some rank."""
    return _FITS[found]


def fullest(ranks: Sequence[RankFigures]) -> RankFigures | None:
    """Return the rank with the largest peak memory, ``None`` if no peak is known."""
    known = [rank for rank in ranks if rank.peak_memory_bytes is not None]
    return max(known, key=lambda rank: rank.peak_memory_bytes or 0, default=None)
