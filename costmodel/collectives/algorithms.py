"""Collective algorithms: number of sequential hops and bytes over the busiest link, per algorithm.

Ring, tree, direct, in-switch (NVLS) and parallel aggregated tree (PAT) algorithms of NCCL; volumes after
doc/PERFORMANCE.md of nccl-tests and Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan" (2009). The algorithms available per kind are in NCCL's src/graph/tuning.cc: trees only for
all-reduces; all-gathers and reduce-scatters with several GPUs per node only have rings, whose latency grows with the
ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from costmodel.operators.collective_transfer import CollectiveTransfer, volume_factor

IN_SWITCH = "in-switch"
AGGREGATED_TREES = "aggregated trees"
# PAT in NCCL's own model (2.23 and later): latency per tree level and per rank as shares of a network hop's latency (14
# us / 3.5, 2.8 us of 14), and the share of the bandwidth.
_LEVEL_HOPS, _RANK_HOPS, _AGGREGATED_SHARE = 1 / 3.5, 0.2, 0.75
_BARRIER_BYTES = 4.0  # NCCL has no barrier; torch runs an all-reduce of one element
# Hops added per further peer of an all-to-all: its messages are posted one after the other and travel together.
# aiconfigurator's all-to-all of 512 B takes 6.4 us among 2 and 7.3 to 10 us among 8 H100 and H200, a hop 0.8 us.
PEER_HOPS = 0.25


@dataclass(frozen=True)
class AlgorithmPlan:
    """One algorithm for one transfer.

    gpu_hops, network_hops: messages that follow one another inside a node, and between nodes.
    gpu_bytes: sent by the busiest GPU over its links inside the node.
    node_bytes: sent by the busiest node over its network cards, by all its ranks together.
    chunk_bytes: the rank's own part, moved inside the GPU before or after the others'.
    """

    algorithm: str
    gpu_hops: float
    network_hops: float
    gpu_bytes: float
    node_bytes: float
    chunk_bytes: float = 0.0


def plans(transfer: CollectiveTransfer, in_switch: bool, aggregated: bool = True) -> list[AlgorithmPlan]:
    """Algorithms available for ``transfer`` (two ranks or more). ``in_switch``: the switches can reduce;
    ``aggregated``: the library has PAT, which it uses only with one GPU per node.
    """
    kind, ranks, nodes = transfer.kind, transfer.ranks, transfer.nodes
    size = _BARRIER_BYTES if kind == "barrier" else transfer.size_bytes
    if kind == "send_recv":
        return [_message(size, nodes)]
    if kind == "all_to_all":
        return [_direct(transfer)]
    if kind in ("broadcast", "reduce"):
        return [_chain(ranks, nodes, size)]
    if kind in ("all_reduce", "barrier"):
        ring = _ring(ranks, nodes, volume_factor("all_reduce", ranks) * size, sweeps=2)
        # a single GPU of a node has no peer there
        inside = [_in_switch(ranks, nodes, size)] if in_switch and ranks > nodes else []
        return [ring, *_trees(ranks, nodes, size), *inside]
    volume = volume_factor(kind, ranks) * size
    trees = [_aggregated_trees(nodes, volume)] if aggregated and ranks == nodes else []
    return [_ring(ranks, nodes, volume, sweeps=1), *trees]


def _ring(ranks: int, nodes: int, volume: float, sweeps: int) -> AlgorithmPlan:
    """Ring: every GPU sends ``volume`` to the next one; the hop across nodes carries the same bytes out of the node."""
    across = nodes if nodes > 1 else 0
    steps = sweeps * (ranks - 1)
    network_steps = steps * across / ranks
    chunk = volume / (sweeps * (ranks - 1))
    return AlgorithmPlan("ring", steps - network_steps, network_steps, volume, volume if across else 0.0, chunk)


def _chain(ranks: int, nodes: int, size: float) -> AlgorithmPlan:
    return AlgorithmPlan("ring", ranks - nodes, nodes - 1, size, size if nodes > 1 else 0.0)


def _trees(ranks: int, nodes: int, size: float) -> list[AlgorithmPlan]:
    """Double binary tree across nodes with chains inside them, up and down; empty for one node (equal to the ring)."""
    if nodes == 1:
        return []
    return [AlgorithmPlan("tree", 2 * (ranks / nodes - 1), 2 * math.log2(nodes), 2 * size, 2 * size)]


def _aggregated_trees(nodes: int, volume: float) -> AlgorithmPlan:
    hops = _LEVEL_HOPS * math.log2(nodes) + _RANK_HOPS * nodes
    return AlgorithmPlan(AGGREGATED_TREES, 0.0, hops, 0.0, volume / _AGGREGATED_SHARE, volume / (nodes - 1))


def _in_switch(ranks: int, nodes: int, size: float) -> AlgorithmPlan:
    """NVLS: switches sum the contributions of all GPUs of a node and broadcast the sum, (n + 1) / n of the buffer per
    GPU.

    Across nodes only the nodes' sums travel: nccl-tests on two nodes of 8 B200 with 400 GB/s each reach 371 GB/s.
    """
    local = max(2.0, ranks / nodes)
    across = volume_factor("all_reduce", nodes) * size
    return AlgorithmPlan(IN_SWITCH, 2.0, 2 * math.log2(nodes), (local + 1) / local * size, across)


def _message(size: float, nodes: int) -> AlgorithmPlan:
    return AlgorithmPlan("direct", 0.0, 1.0, 0.0, size) if nodes > 1 else AlgorithmPlan("direct", 1.0, 0.0, size, 0.0)


def _direct(transfer: CollectiveTransfer) -> AlgorithmPlan:
    """All-to-all: every rank sends to every other one at once; messages to other nodes share the node's network
    cards.
    """
    ranks, nodes, sent = transfer.ranks, transfer.nodes, transfer.wire_bytes
    local = ranks / nodes
    outside = (ranks - local) / (ranks - 1)
    inner = 1 + PEER_HOPS * max(0.0, local - 2)
    outer = 1 + PEER_HOPS * (ranks - local - 1) if nodes > 1 else 0.0
    chunk = transfer.size_bytes / ranks
    return AlgorithmPlan("direct", inner, outer, sent * (1 - outside), sent * outside * local, chunk)
