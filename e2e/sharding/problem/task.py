"""Sharding task: tables, GPUs, batch, memory and the dense part of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from costmodel.embedding.embedding_tables import EmbeddingTable
from costmodel.machines.cluster import Cluster
from e2e.sharding.problem.placement import Rules

# Share of a GPU's memory reserved for uncounted items: CUDA context, allocator, NCCL buffers (the default of TorchRec's
# `HeuristicalStorageReservation(percentage=0.15)`).
RESERVE = 0.15


@dataclass(frozen=True)
class DensePart:
    """Seconds on every rank of the work outside embeddings, in the order of a DLRM step; zero by default."""

    # MLP of the dense features.
    bottom_forward: float = 0.0
    # Interaction, top MLP, loss.
    top_forward: float = 0.0
    # Ends before the backward pass of the interaction.
    top_backward: float = 0.0
    interaction_backward: float = 0.0
    bottom_backward: float = 0.0
    optimizer: float = 0.0
    # All-reduces of the gradients of the top and the bottom MLP.
    top_all_reduce: float = 0.0
    bottom_all_reduce: float = 0.0
    # Memory of the dense part on a rank.
    memory_bytes: int = 0
    details: Mapping[str, object] = field(default_factory=dict, compare=False)

    @property
    def seconds(self) -> float:
        """Sum of the kernels, without all-reduces."""
        forward = self.bottom_forward + self.top_forward
        return forward + self.top_backward + self.interaction_backward + self.bottom_backward + self.optimizer


@dataclass(frozen=True)
class ShardingTask:
    """Tables to be sharded over a cluster."""

    tables: tuple[EmbeddingTable, ...]
    cluster: Cluster
    # Samples per GPU, as in TorchRec's `Topology`; a step trains `gpus` times as many.
    batch_size: int
    dense: DensePart = field(default_factory=DensePart)
    # Share of the memory that is kept free.
    reserve: float = RESERVE
    rules: Rules = field(default_factory=Rules)

    @property
    def ranks(self) -> int:
        """Number of GPUs."""
        return self.cluster.gpus

    @property
    def samples(self) -> int:
        """Samples of all ranks together."""
        return self.batch_size * self.ranks

    @property
    def memory_bytes(self) -> int:
        """Memory available for tables and their buffers on a rank."""
        capacity = self.cluster.machine.memory[-1].usable
        return max(int(capacity * (1 - self.reserve)) - self.dense.memory_bytes, 0)
