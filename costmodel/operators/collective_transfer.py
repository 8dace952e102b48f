"""Operator records of communication between GPUs, priced by :mod:`costmodel.collectives`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

CollectiveKind = Literal[
    "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce", "send_recv", "barrier"
]
COLLECTIVE_KINDS: tuple[CollectiveKind, ...] = get_args(CollectiveKind)


@dataclass(frozen=True)
class CollectiveTransfer:
    """One collective, or one point-to-point message, among ``ranks`` GPUs that have all arrived."""

    kind: CollectiveKind
    # Input of one rank. all_gather: its shard; reduce_scatter: the whole input; all_to_all: the whole send buffer, its
    # own part included; broadcast, reduce, send_recv: the message; barrier: ignored.
    size_bytes: float
    ranks: int
    # Number of nodes over which the ranks are spread evenly.
    nodes: int = 1
    # For an uneven all_to_all, the most that any rank sends to, or receives from, the others.
    busiest_bytes: float | None = None
    # Number of such transfers that use the same links at once; each gets an equal part of their bandwidth.
    sharing: int = 1
    # GPUs of a node from the first to the last of its ranks; 0: the ranks are neighbours.
    span: int = 0
    # For an all_to_all: kernels write rows directly into their peers' memory (DeepEP), without NCCL's protocols.
    puts: bool = False
    # For an all_reduce: the serving engine (``vllm``, ``sglang``, ``trtllm``) whose own kernels run where they are
    # faster than NCCL's; empty: NCCL's alone.
    engine: str = ""

    def __post_init__(self) -> None:
        if self.kind not in COLLECTIVE_KINDS:
            raise ValueError(f"unknown collective {self.kind!r}, known: {', '.join(COLLECTIVE_KINDS)}")
        if not 0 <= self.size_bytes < float("inf"):
            raise ValueError(f"size_bytes must be finite and not below zero, got {self.size_bytes}")
        if self.ranks < 1 or not 1 <= self.nodes <= self.ranks:
            raise ValueError(f"need 1 <= nodes <= ranks, got {self.nodes} nodes, {self.ranks} ranks")
        if self.sharing < 1:
            raise ValueError(f"sharing must be at least 1, got {self.sharing}")
        if self.puts and self.kind != "all_to_all":
            raise ValueError(f"puts is for all_to_all only, not for {self.kind}")
        if self.engine and self.kind != "all_reduce":
            raise ValueError(f"engine is for all_reduce only, not for {self.kind}")
        self._check_busiest()

    def _check_busiest(self) -> None:
        if self.busiest_bytes is None:
            return
        if self.kind != "all_to_all":
            raise ValueError(f"busiest_bytes is for all_to_all only, not for {self.kind}")
        if not 0 <= self.busiest_bytes < float("inf"):
            raise ValueError(f"busiest_bytes must be finite and not below zero, got {self.busiest_bytes}")

    @property
    def ranks_per_node(self) -> int:
        """Ranks on one node; on the fullest one if they do not divide evenly."""
        return -(-self.ranks // self.nodes)

    @property
    def wire_bytes(self) -> float:
        """Least number of bytes that the busiest rank must send over its links, for any algorithm.

        The volume behind the bus bandwidth of nccl-tests (doc/PERFORMANCE.md): all_reduce 2 (n-1)/n of the buffer,
        all_gather, reduce_scatter, all_to_all (n-1)/n of the whole buffer, broadcast, reduce, send_recv all of it.
        """
        if self.kind == "barrier" or self.ranks == 1:
            return 0.0
        if self.busiest_bytes is not None:
            return self.busiest_bytes
        return volume_factor(self.kind, self.ranks) * self.size_bytes


def volume_factor(kind: str, ranks: float) -> float:
    """Ratio ``wire_bytes / size_bytes`` among ``ranks`` (2 or more; may be fractional between two counts)."""
    if kind == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if kind == "all_gather":
        return ranks - 1
    if kind in ("reduce_scatter", "all_to_all"):
        return (ranks - 1) / ranks
    return 0.0 if kind == "barrier" else 1.0
