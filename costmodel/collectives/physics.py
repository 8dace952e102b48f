"""Analytic time of a collective: a start, hops that follow one another, bytes over the busiest link.

Each algorithm runs in one of NCCL's protocols, which trade bandwidth for latency: LL (a flag beside every word),
LL128 (a flag beside 120 bytes; NVLink alone) and Simple (whole buffers, then a flag). The library takes the fastest;
the smooth minimum over all of them is continuous and increases with the size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.cluster import Cluster
from costmodel.collective_operators import CollectiveTransfer
from costmodel.collectives.algorithms import Plan, plans

# Power of the smooth minimum: two equal times give 0.92 of either.
SHARPNESS = 8.0


@dataclass(frozen=True)
class Protocol:
    """``start``: seconds of the launch and first flag; ``gpu_hop``, ``network_hop``: a hop, as a share of the latency
    that the link's file gives; ``share``: of the link's bandwidth; ``nvlink_only``: NCCL needs 128-byte stores.
    """

    name: str
    start: float
    gpu_hop: float
    network_hop: float
    share: float
    nvlink_only: bool = False


# Start and hops: NCCL 2.18, src/graph/tuning.cc (baseLatencies, hwLatencies of ring), with Simple on NVLink (3.4 us),
# the network (14 us) as the unit: what link files give is a message of NCCL's Simple protocol.
# Shares: 4 of 8 bytes are data in LL, 120 of 128 in LL128 (src/include/device.h).
PROTOCOLS = (
    Protocol("LL", 6.6e-6, 0.18, 0.2, 0.5),
    Protocol("LL128", 8.0e-6, 0.56, 0.3, 0.92, nvlink_only=True),
    Protocol("Simple", 8.4e-6, 1.0, 1.0, 1.0),
)


@dataclass(frozen=True)
class Rates:
    """What one transfer may use: bytes/s of one GPU inside a node, and of all its ranks of a node together."""

    gpu: float
    node: float


@dataclass(frozen=True)
class Analysis:
    """``seconds`` and the terms of the fastest algorithm and protocol."""

    seconds: float
    algorithm: str
    protocol: str
    latency_seconds: float
    gpu_seconds: float
    network_seconds: float


def analyse(transfer: CollectiveTransfer, cluster: Cluster) -> Analysis:
    """The analytic time of ``transfer``; among one rank nothing is sent."""
    if transfer.ranks == 1:
        return Analysis(PROTOCOLS[0].start, "none", "none", PROTOCOLS[0].start, 0.0, 0.0)
    rates = rates_of(transfer, cluster)
    nvlink = cluster.intra_node.kind == "nvlink"
    choices = [
        _analyse(plan, protocol, rates, cluster)
        for plan in plans(transfer)
        for protocol in PROTOCOLS
        if nvlink or not protocol.nvlink_only
    ]
    fastest = min(choices, key=lambda each: each.seconds)
    total = smooth_minimum([each.seconds for each in choices])
    return Analysis(total, *(getattr(fastest, name) for name in list(vars(fastest))[1:]))


def smooth_minimum(values: Sequence[float]) -> float:
    """At most the least of ``values`` (all above zero), increasing in each of them."""
    least = min(values)
    return float(least * math.fsum((least / each) ** SHARPNESS for each in values) ** (-1 / SHARPNESS))


def rates_of(transfer: CollectiveTransfer, cluster: Cluster) -> Rates:
    """Bandwidths left to ``transfer``. Inside one node ``sharing`` transfers use the same links. Of transfers across
    nodes, those of different GPUs (as many as fit the node) meet on the network cards only.
    """
    if transfer.nodes == 1:
        return Rates(_gpu_bandwidth(cluster, transfer.ranks) / transfer.sharing, math.inf)
    local = transfer.ranks / transfer.nodes
    on_gpu = max(1.0, transfer.sharing * local / cluster.node_gpus)
    card, cards = cluster.network_link().bandwidth, cluster.network_cards
    # A GPU reaches the cards nearest to it; a node's cards are shared by all that leave it.
    reached = min(local * max(1.0, cards / cluster.node_gpus), cards)
    network = min(reached, cards / transfer.sharing) * card
    inside = _gpu_bandwidth(cluster, max(2, transfer.ranks_per_node)) / on_gpu
    return Rates(inside, network)


def _gpu_bandwidth(cluster: Cluster, ranks: int) -> float:
    """Of one GPU towards ``ranks`` - 1 others of its node."""
    full = cluster.intra_node.bandwidth
    if cluster.topology == "mesh":
        # Hybrid cube mesh of DGX-1: a pair has two of a GPU's six links at best, four GPUs four, all eight six.
        return full * min(1.0, math.log2(ranks) / 3)
    if cluster.topology == "pairs" and ranks > 2:
        pcie = cluster.machine.link("pcie")
        return full if pcie is None else min(full, pcie.bandwidth)
    return full


def _analyse(plan: Plan, protocol: Protocol, rates: Rates, cluster: Cluster) -> Analysis:
    hop = cluster.intra_node.latency_seconds * protocol.gpu_hop
    latency = protocol.start + plan.gpu_hops * hop
    if plan.network_hops:
        latency += plan.network_hops * cluster.network_link().latency_seconds * protocol.network_hop
    gpu = plan.gpu_bytes / (rates.gpu * protocol.share)
    network = plan.node_bytes / (rates.node * protocol.share) if plan.node_bytes else 0.0
    # Both kinds of links work at the same time.
    return Analysis(latency + max(gpu, network), plan.algorithm, protocol.name, latency, gpu, network)
