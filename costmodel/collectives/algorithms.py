"""How a collective is run: the hops that follow one another and the bytes over the busiest link, per algorithm.

Ring, tree and direct algorithms as NCCL has them; volumes after its doc/PERFORMANCE.md (nccl-tests) and Sanders,
Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and scan" (2009).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from costmodel.collective_operators import CollectiveTransfer, volume_factor

_BARRIER_BYTES = 4.0  # NCCL has no barrier; torch runs an all-reduce of one element


@dataclass(frozen=True)
class Plan:
    """One algorithm for one transfer.

    gpu_hops, network_hops: messages that follow one another inside a node, and between nodes.
    gpu_bytes: sent by the busiest GPU over its links inside the node.
    node_bytes: sent by the busiest node over its network cards, by all its ranks together.
    """

    algorithm: str
    gpu_hops: float
    network_hops: float
    gpu_bytes: float
    node_bytes: float


def plans(transfer: CollectiveTransfer) -> list[Plan]:
    """The algorithms that may run ``transfer`` (two ranks or more)."""
    kind, ranks, nodes = transfer.kind, transfer.ranks, transfer.nodes
    size = _BARRIER_BYTES if kind == "barrier" else transfer.size_bytes
    if kind in ("all_to_all", "send_recv"):
        return [_direct(transfer, size)]
    if kind in ("broadcast", "reduce"):
        return [_chain(ranks, nodes, size), _tree(ranks, nodes, size, sweeps=1)]
    if kind in ("all_reduce", "barrier"):
        ring = _ring(2 * (ranks - 1), 2 * (nodes - 1), volume_factor("all_reduce", ranks) * size, nodes)
        return [ring, _tree(ranks, nodes, size, sweeps=2)]
    return [_ring(ranks - 1, nodes - 1, volume_factor(kind, ranks) * size, nodes)]


def _ring(steps: int, network_steps: int, volume: float, nodes: int) -> Plan:
    """Every GPU sends ``volume`` to the next one; the step across nodes carries the same bytes out of the node."""
    return Plan("ring", steps - network_steps, network_steps, volume, volume if nodes > 1 else 0.0)


def _chain(ranks: int, nodes: int, size: float) -> Plan:
    return Plan("ring", ranks - nodes, nodes - 1, size, size if nodes > 1 else 0.0)


def _tree(ranks: int, nodes: int, size: float, sweeps: int) -> Plan:
    """Chains inside nodes, two binary trees across them, ``sweeps`` times: up, down or both."""
    depth = sweeps * math.log2(nodes)
    inside = sweeps * (ranks / nodes - 1)
    return Plan("tree", inside, depth, sweeps * size, sweeps * size if nodes > 1 else 0.0)


def _direct(transfer: CollectiveTransfer, size: float) -> Plan:
    """Every rank sends to every other one at once; one message or, of an all_to_all, its share to each."""
    ranks, nodes = transfer.ranks, transfer.nodes
    local = ranks / nodes
    if transfer.kind == "send_recv":
        return Plan("direct", 0.0 if nodes > 1 else 1.0, 1.0 if nodes > 1 else 0.0, *_split(size, nodes))
    sent = transfer.wire_bytes
    outside = (ranks - local) / (ranks - 1)
    return Plan("direct", 1.0, 1.0 if nodes > 1 else 0.0, sent * (1 - outside), sent * outside * local)


def _split(size: float, nodes: int) -> tuple[float, float]:
    return (0.0, size) if nodes > 1 else (size, 0.0)
