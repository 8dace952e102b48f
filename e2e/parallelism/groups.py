"""Which ranks communicate with which: numbers as Megatron-LM gives them, tensor-parallel neighbours first.

    rank = ((stage * replicas + replica) * cp + part) * tp + place,   replica = outer (dp) * fsdp + inner

Experts that the ranks of ``tp`` do not share (``etp=1``) lie on neighbours too: ``ep`` of them hold all.
All ranks of a stage do the same: the graph has the first of each, and it stands for ``replicas * cp * tp`` of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from e2e.parallelism.spec import ParallelSpec


@dataclass(frozen=True)
class ParameterFamily:
    """Parameters of a stage whose gradients the same ranks sum: all but experts, and experts where ranks divide them.

    ``data``: the ranks that hold the same; ``sharded``: those that share it; ``replicated``: first ranks of such sets.
    """

    experts: bool
    data: Sequence[int]
    sharded: Sequence[int]
    replicated: Sequence[int]

    @property
    def label(self) -> str:
        """For names of groups."""
        return " of experts" if self.experts else ""

    def share(self, size: int) -> int:
        """A rank's part of ``size`` bytes."""
        return -(-size // len(self.sharded))


@dataclass(frozen=True)
class StageGroups:
    """Groups of the first rank of ``stage``."""

    spec: ParallelSpec
    stage: int

    @cached_property
    def rank(self) -> int:
        """The rank that stands for the stage."""
        return self.rank_of(self.stage)

    def rank_of(self, stage: int) -> int:
        """The rank that stands for ``stage``."""
        return stage * self.spec.contributors * self.spec.tp

    @cached_property
    def stages(self) -> tuple[int, ...]:
        """Ranks that hold the other stages of the same replica, this one among them."""
        return tuple(self.rank_of(stage) for stage in range(self.spec.pp))

    @cached_property
    def tensor(self) -> tuple[int, ...]:
        """Ranks that share the layers."""
        return tuple(range(self.rank, self.rank + self.spec.tp))

    @cached_property
    def context(self) -> tuple[int, ...]:
        """Ranks that share the sequences."""
        return tuple(self.rank + part * self.spec.tp for part in range(self.spec.cp))

    @cached_property
    def context_heads(self) -> tuple[int, ...]:
        """Those of them, neighbours, that exchange tokens for heads."""
        return self.context[: self.spec.head_ranks]

    @cached_property
    def context_rest(self) -> tuple[int, ...]:
        """Those of them that have the same heads."""
        return self.context[:: self.spec.head_ranks]

    @cached_property
    def expert(self) -> tuple[int, ...]:
        """Ranks among which experts are divided."""
        return tuple(self.rank + place * self.spec.expert_tensor for place in range(self.spec.ep))

    def expert_inside(self, node_ranks: int | None) -> tuple[int, ...]:
        """Those of them in the first rank's node, which holds ``node_ranks``."""
        return self.expert[: node_ranks or len(self.expert)]

    def expert_across(self, node_ranks: int | None) -> tuple[int, ...]:
        """Those that have the first rank's place in their nodes."""
        return self.expert[:: node_ranks or len(self.expert)]

    @cached_property
    def families(self) -> tuple[ParameterFamily, ...]:
        """Of a stage with experts; without experts the second has no parameters."""
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
        """This stage and stage ``other``, the lower rank first."""
        low, high = sorted((self.rank, self.rank_of(other)))
        return low, high
