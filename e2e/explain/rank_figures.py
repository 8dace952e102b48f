"""Figures of one rank of a simulated step: its work, its waits and its memory."""

from __future__ import annotations

from collections.abc import Sequence

from e2e.explain.breakdowns import kernel_count, operator_count
from e2e.explain.critical_path import CriticalPath
from e2e.explain.prediction import RankFigures
from e2e.explain.rank_attribution import WAITS, rank_attribution
from e2e.explain.simulated_step import SimulatedStep
from e2e.step.execution_graph import RankGraph
from e2e.step.memory import MemoryUsage
from e2e.step.memory_room import Verdict, verdict

_FITS: dict[Verdict, bool | None] = {"fits": True, "does not fit": False, "may not fit": None, "not known": None}


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
