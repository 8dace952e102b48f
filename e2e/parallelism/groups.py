"""Communication groups of ranks, numbered as in Megatron-LM, tensor-parallel neighbours first.

    rank = ((stage * replicas + replica) * cp + part) * tp + place,   replica = outer (dp) * fsdp + inner

Experts that are not split over ``tp`` (``etp=1``) are on neighbours too: ``ep`` of them hold all experts. All ranks of
a stage do the same: the graph has the first of each stage, which represents ``replicas * cp * tp`` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from e2e.parallelism.spec import ParallelSpec


@dataclass(frozen=True)
class ParameterFamily:
    """Parameters of a stage whose gradients are summed over the same ranks: all but experts, or experts divided among
    ranks.
    """

    experts: bool
    # Ranks that hold the same parameters.
    data: Sequence[int]
    # Ranks that shard them.
    sharded: Sequence[int]
    # First ranks of such sets.
    replicated: Sequence[int]

    @property
    def label(self) -> str:
        """Suffix in names of groups."""
        return " of experts" if self.experts else ""

    def share(self, size: int) -> int:
        """Return a rank's share of ``size`` bytes."""
        return -(-size // len(self.sharded))


@dataclass(frozen=True)
class StageGroups:
    """Communication groups of the first rank of ``stage``."""

    spec: ParallelSpec
    stage: int

    @cached_property
    def rank(self) -> int:
        """Rank that represents the stage."""
        return self.rank_of(self.stage)

    def rank_of(self, stage: int) -> int:
        """Return the rank that represents ``stage``."""
        return stage * self.spec.contributors * self.spec.tp

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Ranks of all stages of the same replica, including this one."""
        return tuple(self.rank_of(stage) for stage in range(self.spec.pp))

    @cached_property
    def tensor(self) -> tuple[int, ...]:
        """Ranks that split the layers."""
        return tuple(range(self.rank, self.rank + self.spec.tp))

    @cached_property
    def context(self) -> tuple[int, ...]:
        """Ranks that split the sequences."""
        return tuple(self.rank + part * self.spec.tp for part in range(self.spec.cp))

    @cached_property
    def context_heads(self) -> tuple[int, ...]:
        """Neighbours among the context-parallel ranks that exchange tokens for heads."""
        return self.context[: self.spec.head_ranks]

    @cached_property
    def context_rest(self) -> tuple[int, ...]:
        """Context-parallel ranks with the same heads."""
        return self.context[:: self.spec.head_ranks]

    @cached_property
    def expert(self) -> tuple[int, ...]:
        """Ranks that divide the experts."""
        return tuple(self.rank + place * self.spec.expert_tensor for place in range(self.spec.ep))

    def expert_inside(self, node_ranks: int | None) -> tuple[int, ...]:
        """Return the expert-parallel ranks in the first rank's node, which holds ``node_ranks``."""
        return self.expert[: node_ranks or len(self.expert)]

    def expert_across(self, node_ranks: int | None) -> tuple[int, ...]:
        """Return the expert-parallel ranks at the first rank's place in every node."""
        return self.expert[:: node_ranks or len(self.expert)]

    @cached_property
    def families(self) -> tuple[ParameterFamily, ...]:
        """Parameter families of a stage; the second, of experts, is left out if experts are not held by other ranks."""
        return tuple(self._family(experts) for experts in ((False, True) if self.spec.experts_apart else (False,)))

    def _family(self, experts: bool) -> ParameterFamily:
        spec = self.spec
        apart = spec.expert_set if experts else spec.tp
        shards = spec.expert_shards if experts else spec.shards
        alike = spec.contributors * spec.tp // apart
        return ParameterFamily(
            experts,
            range(self.rank, self.rank + alike * apart, apart),
            range(self.rank, self.rank + shards * apart, apart),
            [self.rank + outer * spec.shards * spec.tp for outer in range(spec.copies)],
        )

    def pair(self, other: int) -> tuple[int, int]:
        """Return the ranks of this stage and of stage ``other``, the lower rank first."""
        low, high = sorted((self.rank, self.rank_of(other)))
        return low, high
