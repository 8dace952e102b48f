"""What is to be sharded: tables, GPUs, batch, memory and the dense part of the model around the tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from costmodel.embedding.embedding_tables import EmbeddingTable
from costmodel.machines.cluster import Cluster
from e2e.sharding.problem.placement import Rules

# Share of a GPU's memory kept for what is not counted: CUDA context, allocator, NCCL buffers (the default of TorchRec's
# `HeuristicalStorageReservation(percentage=0.15)`).
RESERVE = 0.15


@dataclass(frozen=True)
class DensePart:
    """Seconds on every rank of what is not embedding, in the order of a DLRM step; nothing by default.

    ``bottom``: MLP of the dense features; ``top_forward``: interaction, top MLP, loss; ``top_backward`` ends before the
    interaction's; ``all_reduce``: of the gradients of the MLP of that name; ``memory_bytes`` of it all on a rank.
    """

    bottom_forward: float = 0.0
    top_forward: float = 0.0
    top_backward: float = 0.0
    interaction_backward: float = 0.0
    bottom_backward: float = 0.0
    optimizer: float = 0.0
    top_all_reduce: float = 0.0
    bottom_all_reduce: float = 0.0
    memory_bytes: int = 0
    details: Mapping[str, object] = field(default_factory=dict, compare=False)

    @property
    def seconds(self) -> float:
        """Of the kernels, one after another."""
        forward = self.bottom_forward + self.top_forward
        return forward + self.top_backward + self.interaction_backward + self.bottom_backward + self.optimizer


@dataclass(frozen=True)
class ShardingTask:
    """``batch_size``: samples per GPU (as TorchRec's ``Topology`` counts); a step trains ``gpus`` times as many.

    ``reserve``: share of the memory that stays free.
    """

    tables: tuple[EmbeddingTable, ...]
    cluster: Cluster
    batch_size: int
    dense: DensePart = field(default_factory=DensePart)
    reserve: float = RESERVE
    rules: Rules = field(default_factory=Rules)

    @property
    def ranks(self) -> int:
        """GPUs."""
        return self.cluster.gpus

    @property
    def samples(self) -> int:
        """Of all ranks together."""
        return self.batch_size * self.ranks

    @property
    def memory_bytes(self) -> int:
        """What tables and their buffers may take on a rank."""
        capacity = self.cluster.machine.memory[-1].usable
        return max(int(capacity * (1 - self.reserve)) - self.dense.memory_bytes, 0)
