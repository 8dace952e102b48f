"""Which ranks communicate with which: numbers as Megatron-LM gives them, tensor-parallel neighbours first.

    rank = ((stage * replicas + replica) * cp + part) * tp + place,   replica = outer (dp) * fsdp + inner

All ranks of a stage do the same: the graph has the first of each, and it stands for ``replicas * cp * tp`` of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from e2e.parallelism.spec import ParallelSpec


@dataclass(frozen=True)
class Groups:
    """Groups of the first rank of ``stage``."""

    spec: ParallelSpec
    stage: int

    @cached_property
    def rank(self) -> int:
        return self.rank_of(self.stage)

    def rank_of(self, stage: int) -> int:
        """The rank that stands for ``stage``."""
        return stage * self.spec.contributors * self.spec.tp

    @cached_property
    def tensor(self) -> tuple[int, ...]:
        """Ranks that share the layers."""
        return tuple(range(self.rank, self.rank + self.spec.tp))

    @cached_property
    def context(self) -> tuple[int, ...]:
        """Ranks that share the sequences."""
        return tuple(self.rank + part * self.spec.tp for part in range(self.spec.cp))

    @cached_property
    def sharded(self) -> tuple[int, ...]:
        """Ranks that share parameters or optimizer state."""
        return tuple(self.rank + inner * self.spec.tp for inner in range(self.spec.shards))

    @cached_property
    def replicated(self) -> tuple[int, ...]:
        """Ranks with the same parameters and other data."""
        step = self.spec.shards * self.spec.tp
        return tuple(self.rank + outer * step for outer in range(self.spec.copies))

    @cached_property
    def data(self) -> tuple[int, ...]:
        """All ranks with the same part of the model and other data."""
        return tuple(self.rank + place * self.spec.tp for place in range(self.spec.contributors))

    def pair(self, other: int) -> tuple[int, int]:
        """This stage and stage ``other``, the lower rank first."""
        low, high = sorted((self.rank, self.rank_of(other)))
        return low, high
