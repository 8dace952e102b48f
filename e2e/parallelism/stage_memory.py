"""Peak memory of a pipeline stage from what its parts keep.

    parameters + gradients + optimizer state + activations in flight + what one pass needs besides

Activations: of as many micro-batches as the schedule has in flight; full recomputation keeps the input of each layer
and, while one layer runs again, its activations (Korthikanti et al., arXiv 2205.05198).
"""

from __future__ import annotations

from e2e.memory import MemoryUsage
from e2e.parallelism.pieces import Name
from e2e.parallelism.pipeline import in_flight
from e2e.parallelism.stage import StagePlan


def stage_memory(plan: StagePlan, working_bytes: int, state_factor: float) -> MemoryUsage:
    """Bytes of one rank of ``plan``. ``state_factor``: optimizer state per byte of a parameter."""
    spec = plan.spec
    total = sum(plan.size(name) for name in plan.names)
    largest = max((plan.size(name) for name in plan.names), default=0)
    zero = spec.zero if spec.fsdp > 1 else 0
    share = 1 / spec.fsdp
    # Of gathered layers there are two at a time, the one that runs and the next; of full gradients one.
    parameters = total * share + 2 * largest if zero == 3 else total
    gradients = total * share + (largest if zero == 3 else 0) if zero >= 2 else total
    state = total * state_factor * (share if zero else 1)
    activations = _activations(plan)
    # DistributedDataParallel keeps its buckets besides the gradients.
    buckets = total if spec.replicas > 1 and zero < 2 and not plan.style.flatten else 0
    breakdown = {
        "parameters": int(parameters),
        "gradients": int(gradients + buckets),
        "optimizer_state": int(state),
        "inputs": 0,
        "activations": int(activations),
        "temporary": working_bytes,
    }
    return MemoryUsage(sum(breakdown.values()), breakdown, -1, "backward")  # type: ignore[arg-type]


def _activations(plan: StagePlan) -> int:
    """Of the part with most of them times the passes in flight, plus what is kept while one layer runs again."""
    kept = [sum(_kept(plan, name) for name in chunk) for chunk in plan.chunks]
    count = in_flight(plan.spec, plan.stage)
    whole_rounds, rest = divmod(count, len(kept))
    again = 0
    if plan.spec.recompute != "none":
        again = max((_saved(plan, name) for name in plan.names if isinstance(name, int)), default=0)
    return whole_rounds * sum(kept) + sum(sorted(kept, reverse=True)[:rest]) + again


def _kept(plan: StagePlan, name: Name) -> int:
    if isinstance(name, int) and plan.spec.recompute == "full":
        return plan.boundary_bytes
    if isinstance(name, int) and plan.spec.recompute == "selective":
        return _saved(plan, name) - plan.pieces.core[plan.captured(name)].saved_bytes
    return _saved(plan, name)


def _saved(plan: StagePlan, name: Name) -> int:
    return plan.pieces.forward[plan.captured(name)].saved_bytes
