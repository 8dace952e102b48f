"""Peak memory of a pipeline stage from what its parts keep.

    parameters + optimizer state + max(activations in flight + what one pass needs besides, gradients)
    parameters + optimizer state + gradients + what the optimizer needs for a while

whichever is more; of inference the parameters and what one part makes. With one micro-batch the gradients come as the
activations go; with more, those of the first stay while others run. Activations: of as many micro-batches as the
schedule has in flight; full recomputation keeps the input of each layer and, while one layer runs again, its
activations (Korthikanti et al., arXiv 2205.05198).
"""

from __future__ import annotations

from dataclasses import dataclass

from e2e.capture.models.stacks import Stack
from e2e.parallelism.groups import StageGroups
from e2e.parallelism.layers.pieces import Name
from e2e.parallelism.pipeline import in_flight
from e2e.parallelism.spec import ParallelSpec
from e2e.parallelism.stage import StagePlan
from e2e.parallelism.stage_kernels import MASTER, MASTER_BYTES, StageKernels
from e2e.step.memory import MemoryUsage, Role

FP32_BYTES = 4


@dataclass(frozen=True)
class KeptWeights:
    """Bytes held per byte of a parameter as the layers compute with it: ``shard`` (of the share that a rank keeps where
    parameters are shared), ``gradient`` and ``state`` of the optimizer. ``own_masters``: the shards are the optimizer's
    FP32 weights, cast when they are gathered. ``buckets``: gradients are copied into buckets besides.
    """

    shard: float = 1.0
    gradient: float = 1.0
    state: float = 2.0
    own_masters: bool = False
    buckets: bool = True


def kept_weights(spec: ParallelSpec, element_bytes: int, stack: Stack | None = None) -> KeptWeights:
    """AdamW's two moments in the parameter's type or, with master weights, both and the weights in FP32. What
    ``stack`` accumulates, it holds in FP32, and so does FSDP the shards of master weights."""
    full = FP32_BYTES / element_bytes
    if spec.sharded_masters:
        return KeptWeights(full, full, 2 * full, own_masters=True)
    state = 3 * full if spec.master_weights else 2.0
    if stack is not None and stack.accumulates:
        return KeptWeights(1.0, full, state, buckets=False)
    return KeptWeights(state=state)


def stage_memory(plan: StagePlan, working_bytes: int, keeping: KeptWeights) -> MemoryUsage:
    """Bytes of one rank of ``plan``."""
    spec = plan.spec
    total = sum(plan.size(name) for name in plan.names)
    if spec.inference:
        return _forward_alone(plan, total)
    families = StageGroups(spec, plan.stage).families
    owned = sum(family.share(plan.size_of(family, plan.names, frozen=True)) for family in families)
    trained = sum(plan.trained(name) for name in plan.names)
    trained_share = sum(family.share(plan.size_of(family, plan.names)) for family in families)
    largest = max((plan.size(name) for name in plan.names), default=0)
    zero = spec.sharing
    kernels = StageKernels(spec, plan.element_bytes)
    wide = kernels.reduced_dtype == MASTER != kernels.dtype
    summed = MASTER_BYTES / plan.element_bytes if wide else 1.0
    # Of gathered layers there are the one that runs and those gathered ahead; of full gradients one, and a copy of it
    # where it is summed in another type.
    held = owned * keeping.shard if zero == 3 else total
    parameters = held + (1 + spec.prefetch) * largest if zero == 3 else total
    # What is summed in FP32 stays so. The distributed optimizer accumulates in the buffer that is scattered.
    each = max(keeping.gradient, summed if zero else 1.0)
    kept = (trained_share if zero >= 2 else trained) * each
    gradients = kept + (min(largest, trained) * (1 + (summed if wide else 0)) if zero == 3 else 0)
    state = (trained_share if zero else trained) * keeping.state
    # DistributedDataParallel keeps its buckets besides the gradients.
    buckets = trained * summed if spec.contributors > 1 and not zero and keeping.buckets else 0
    activations, working = _activations(plan), working_bytes
    if spec.micro_batches == 1:
        if activations + working >= gradients:
            gradients = 0
        else:
            activations = working = 0
    during = _usage("backward", parameters, gradients + buckets, state, activations, working)
    after = _usage("optimizer", held, kept + buckets, state, 0, plan.optimizer_bytes)
    return max(during, after, key=lambda usage: usage.peak_bytes)


def _forward_alone(plan: StagePlan, parameters: int) -> MemoryUsage:
    """Nothing is kept for a backward pass: at the fullest moment what goes from layer to layer and, as an upper bound
    of what runs, all that one part makes. A stage of a pipeline holds what it receives next besides.
    """
    largest = max((_saved(plan, name) for name in plan.names), default=0)
    boundaries = plan.boundary_bytes * (1 if plan.spec.pp == 1 else 2)
    return _usage("forward", parameters, 0, 0, 0, largest + boundaries)


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
    if not plan.runs_again(name):
        return _saved(plan, name)
    if plan.spec.recompute == "full":
        return plan.boundary_bytes
    if plan.spec.recompute == "operators":
        return plan.boundary_bytes + plan.pieces.chosen[plan.captured(name)].saved_bytes
    if plan.spec.recompute == "selective":
        return _saved(plan, name) - plan.pieces.core[plan.captured(name)].saved_bytes
    return _saved(plan, name)


def _saved(plan: StagePlan, name: Name) -> int:
    return plan.pieces.forward[plan.captured(name)].saved_bytes
