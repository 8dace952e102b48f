"""Peak memory of a pipeline stage from what its parts keep.

    parameters + optimizer state + max(activations in flight + what one pass needs besides, gradients)
    parameters + optimizer state + gradients + what the optimizer needs for a while

whichever is more. With one micro-batch the gradients come as the activations go; with more, those of the first stay
while others run.
Activations: of as many micro-batches as the schedule has in flight; full recomputation keeps the input of each layer
and, while one layer runs again, its activations (Korthikanti et al., arXiv 2205.05198).
"""

from __future__ import annotations

from e2e.parallelism.groups import StageGroups
from e2e.parallelism.layers.pieces import Name
from e2e.parallelism.pipeline import in_flight
from e2e.parallelism.stage import StagePlan
from e2e.parallelism.stage_kernels import MASTER, MASTER_BYTES, StageKernels
from e2e.step.memory import MemoryUsage, Role


def stage_memory(plan: StagePlan, working_bytes: int, state_factor: float) -> MemoryUsage:
    """Bytes of one rank of ``plan``. ``state_factor``: optimizer state per byte of a parameter."""
    spec = plan.spec
    total = sum(plan.size(name) for name in plan.names)
    owned = sum(family.share(plan.size_of(family, plan.names)) for family in StageGroups(spec, plan.stage).families)
    largest = max((plan.size(name) for name in plan.names), default=0)
    zero = spec.sharing
    kernels = StageKernels(spec, plan.element_bytes)
    # Shards of FP32 masters, gradients that are summed in FP32 or kept as such, by those of the passes.
    master = MASTER_BYTES / plan.element_bytes
    shards = owned * master if spec.sharded_masters else owned
    shares = owned * master if kernels.share_dtype == MASTER else owned
    summed = master if kernels.reduced_dtype == MASTER else 1.0
    # Of gathered layers there are the one that runs and those gathered ahead; of full gradients one, and a copy of it
    # where it is summed in another type.
    parameters = shards + (1 + spec.prefetch) * largest if zero == 3 else total
    whole = largest * (1 + (summed if summed > 1 else 0)) if zero == 3 else 0
    # The distributed optimizer accumulates in the buffer that is scattered; DistributedDataParallel keeps its buckets
    # besides the gradients.
    gradients = shares + whole if zero >= 2 else total * summed if zero else total
    state = (owned if zero else total) * state_factor
    buckets = total * summed if spec.contributors > 1 and not zero else 0
    activations, working = _activations(plan), working_bytes
    if spec.micro_batches == 1:
        if activations + working >= gradients:
            gradients = 0
        else:
            activations = working = 0
    during = _usage("backward", parameters, gradients + buckets, state, activations, working)
    held = shards if zero == 3 else total
    kept = (shares if zero >= 2 else total * summed if zero else total) + buckets
    after = _usage("optimizer", held, kept, state, 0, plan.optimizer_bytes)
    return max(during, after, key=lambda usage: usage.peak_bytes)


def _usage(
    phase: str, parameters: float, gradients: float, state: float, activations: float, temporary: float
) -> MemoryUsage:
    breakdown: dict[Role, int] = {
        "parameters": int(parameters),
        "gradients": int(gradients),
        "optimizer_state": int(state),
        "inputs": 0,
        "activations": int(activations),
        "temporary": int(temporary),
    }
    return MemoryUsage(sum(breakdown.values()), breakdown, -1, phase)


def _activations(plan: StagePlan) -> int:
    """Of the passes in flight, plus what one layer makes anew when it runs again."""
    kept = [sum(_kept(plan, name) for name in chunk) for chunk in plan.chunks]
    count = in_flight(plan.spec, plan.stage)
    whole_rounds, rest = divmod(count, len(kept))
    again = max((_saved(plan, name) - _kept(plan, name) for name in plan.names), default=0)
    return whole_rounds * sum(kept) + sum(sorted(kept, reverse=True)[:rest]) + again


def _kept(plan: StagePlan, name: Name) -> int:
    if isinstance(name, int) and plan.spec.recompute == "full":
        return plan.boundary_bytes
    if isinstance(name, int) and plan.spec.recompute == "selective":
        return _saved(plan, name) - plan.pieces.core[plan.captured(name)].saved_bytes
    return _saved(plan, name)


def _saved(plan: StagePlan, name: Name) -> int:
    return plan.pieces.forward[plan.captured(name)].saved_bytes
