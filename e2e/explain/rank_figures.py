"""One rank's share of a simulated step: what it did, what it waited for, what it holds."""

from __future__ import annotations

from collections.abc import Sequence

from e2e.explain.breakdowns import kernel_count, operator_count
from e2e.explain.critical_path import CriticalPath
from e2e.explain.prediction import RankFigures
from e2e.explain.rank_attribution import WAITS, rank_attribution
from e2e.explain.simulated_step import SimulatedStep
from e2e.step.execution_graph import RankGraph
from e2e.step.memory import MemoryUsage

# Room for what is not PyTorch's (CUDA context, NCCL) and for stacks whose memory nobody has published: published peaks
# are met within 5 % (python -m e2e validate --section training).
MEMORY_MARGIN = 0.15


def fits(needed_bytes: int, capacity: int) -> bool | None:
    """Whether so much, in use at a time, fits; ``None`` where the estimate is too near to tell."""
    if needed_bytes <= capacity:
        return True
    return False if needed_bytes > capacity * (1 + MEMORY_MARGIN) else None


def rank_figures(
    step: SimulatedStep, rank: RankGraph, path: CriticalPath, memory: MemoryUsage | None, capacity: int
) -> RankFigures:
    """``path``: the rank's own; ``memory``: what it holds, of ``capacity`` bytes; ``None`` if that is not known."""
    memory = None if memory is None else memory.within(capacity)
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
        fits=None if memory is None else fits(memory.allocated_bytes, capacity),
    )


def all_fit(ranks: Sequence[RankFigures]) -> bool | None:
    """``None`` if no rank is known not to fit and of some it is not known."""
    known = [rank.fits for rank in ranks if rank.fits is not None]
    if False in known:
        return False
    return True if len(known) == len(ranks) else None


def fullest(ranks: Sequence[RankFigures]) -> RankFigures | None:
    """The rank that holds most; ``None`` if nothing is known of any."""
    known = [rank for rank in ranks if rank.peak_memory_bytes is not None]
    return max(known, key=lambda rank: rank.peak_memory_bytes or 0, default=None)
