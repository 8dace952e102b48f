"""Analytic time of a collective: a start, sequential hops, bytes over the busiest link.

Each algorithm runs in one of NCCL's protocols, which trade bandwidth for latency: LL (a flag beside every word), LL128
(a flag beside 120 bytes; NVLink only) and Simple (whole buffers, then a flag). The library takes the fastest; the
smooth minimum over all of them is continuous and increases with the size.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from costmodel.collectives.algorithms import AGGREGATED_TREES, IN_SWITCH, AlgorithmPlan, plans
from costmodel.collectives.constants import Constants, Protocol, constants
from costmodel.machines.cluster import Cluster
from costmodel.operators.collective_transfer import CollectiveTransfer

# Starts and hops inside a node are sequential instructions of a kernel: slower on a slower clock. The constants
# hold for a GPU of this clock (H100's); in sweeps with one NCCL version (2.27.3) the smallest message less a hop takes
# 11 us x GHz on A100, 10 on L40S, between 2.23 and 2.29 10 on H100.
_CLOCK_HZ = 1.98e9
# Share of a card's sustained rate (48 of 50 GB/s) that DeepEP's kernels reach: its README reported 43, 44, 46 GB/s to
# 16, 32 and 64 ranks and 43, 47, 45 back (H800, ConnectX-7).
_PUT_SHARE = 0.93
# Exponent of the smooth minimum: two equal times give 0.92 of either (a judgement).
SHARPNESS = 8.0


@dataclass(frozen=True)
class Rates:
    """Bandwidths available to one transfer, in bytes/s."""

    # One GPU inside a node.
    gpu: float
    # All ranks of a node together, over the network.
    node: float
    # A GPU's memory, through which its own part moves.
    memory: float


@dataclass(frozen=True)
class TransferAnalysis:
    """Analytic time of a transfer, and the terms of the fastest algorithm and protocol.

    ideal_seconds: the bytes alone at the full rate of the links, by the algorithm with the least time.

    start_seconds: time of the smallest message.
    """

    seconds: float
    ideal_seconds: float
    start_seconds: float
    algorithm: str
    protocol: str
    latency_seconds: float
    gpu_seconds: float
    network_seconds: float


@dataclass(frozen=True)
class _Choice:
    algorithm: str
    protocol: str
    latency: float
    gpu: float
    network: float

    @property
    def seconds(self) -> float:
        # Both kinds of links transfer at the same time.
        return self.latency + max(self.gpu, self.network)


def analyse(transfer: CollectiveTransfer, cluster: Cluster, known: Constants | None = None) -> TransferAnalysis:
    """Analytic time of ``transfer``; a single rank sends nothing. ``known``: constants (default: the shipped ones)."""
    known = known or constants()
    if transfer.ranks == 1:
        start = slowness(cluster) * min(each.start for each in known.protocols)
        return TransferAnalysis(start, 0.0, start, "none", "none", start, 0.0, 0.0)
    rates = rates_of(transfer, _within_reach(transfer, cluster))
    choices: list[_Choice] = []
    ideals: list[float] = []
    for plan in plans(transfer, can_reduce(cluster), has_aggregated_trees(cluster)):
        ideals.append(_ideal(plan, rates, known))
        protocols = known.protocols[-1:] if transfer.puts else _protocols(plan, cluster, known)
        choices += [_choice(plan, protocol, rates, cluster, known.chunk) for protocol in protocols]
    fastest = min(choices, key=lambda each: each.seconds)
    return TransferAnalysis(
        smooth_minimum([each.seconds for each in choices]),
        smooth_minimum(ideals),
        smooth_minimum([each.latency for each in choices]),
        fastest.algorithm,
        fastest.protocol,
        fastest.latency,
        fastest.gpu,
        fastest.network,
    )


def smooth_minimum(values: Sequence[float]) -> float:
    """Smooth minimum: at most the least of ``values`` (not below zero), increasing in each of them."""
    least = min(values)
    if least <= 0:
        return 0.0
    return float(least * math.fsum((least / each) ** SHARPNESS for each in values) ** (-1 / SHARPNESS))


def _within_reach(transfer: CollectiveTransfer, cluster: Cluster) -> Cluster:
    """``cluster`` as seen by ranks that are not neighbours: bridges between pairs and switches of a few cards do not
    connect them, so they reach at most the rate of all GPUs between the first and the last of them.
    """
    if transfer.span <= transfer.ranks_per_node:
        return cluster
    most = cluster.usable_share(transfer.span)
    return dataclasses.replace(cluster, usable=tuple((count, min(share, most)) for count, share in cluster.usable))


def can_reduce(cluster: Cluster) -> bool:
    """True if the switches of a node can reduce (NVLink SHARP)."""
    return cluster.in_switch and cluster.topology == "switch" and architecture_adds(cluster.machine.chip().architecture)


def has_aggregated_trees(cluster: Cluster) -> bool:
    """True if NCCL has PAT: version 2.23 or later, or unknown."""
    numbers = [int(part) for part in cluster.nccl.split(".")[:2] if part.isdigit()]
    return not numbers or numbers >= [2, 23]


def architecture_adds(architecture: str) -> bool:
    """True if NVSwitches of GPUs of ``architecture`` can reduce: Hopper and later."""
    return architecture in ("hopper", "blackwell")


def slowness(cluster: Cluster) -> float:
    """Ratio of start and hop times inside a node to those of the GPU for which the constants hold."""
    return _CLOCK_HZ / cluster.machine.chip().clock_hz


def rates_of(transfer: CollectiveTransfer, cluster: Cluster) -> Rates:
    """Bandwidths available to ``transfer``. Inside a node ``sharing`` transfers use the same links. Transfers across
    nodes from different GPUs (as many as fit the node) share only the network cards.
    """
    full, memory = cluster.intra_node.bandwidth, cluster.machine.memory[-1].bandwidth.at(1)
    if transfer.nodes == 1:
        gpu = full * cluster.usable_share(transfer.ranks) / transfer.sharing
        return Rates(gpu, math.inf, memory / transfer.sharing)
    local = transfer.ranks / transfer.nodes
    on_gpu = max(1.0, transfer.sharing * local / cluster.node_gpus)
    card, cards = cluster.network_link().bandwidth, cluster.network_cards
    # A GPU uses the cards nearest to it; a node's cards are shared by all traffic that leaves it.
    reached = min(local * max(1.0, cards / cluster.node_gpus), cards)
    network = min(reached, cards / transfer.sharing) * card * (_PUT_SHARE if transfer.puts else 1.0)
    return Rates(full * cluster.usable_share(transfer.ranks_per_node) / on_gpu, network, memory / on_gpu)


def _protocols(plan: AlgorithmPlan, cluster: Cluster, known: Constants) -> list[Protocol]:
    if plan.algorithm == IN_SWITCH:
        return [known.in_switch]
    if plan.algorithm == AGGREGATED_TREES:
        return [known.protocols[-1]]  # Simple
    nvlink = cluster.intra_node.kind == "nvlink"
    return [each for each in known.protocols if nvlink or not each.nvlink_only]


def _ideal(plan: AlgorithmPlan, rates: Rates, known: Constants) -> float:
    gpu, network = _transfer_seconds(plan, rates, known.chunk)
    return max(gpu / known.in_switch.share if plan.algorithm == IN_SWITCH else gpu, network)


def _choice(plan: AlgorithmPlan, protocol: Protocol, rates: Rates, cluster: Cluster, chunk: float) -> _Choice:
    hops = plan.gpu_hops * cluster.intra_node.latency_seconds * protocol.gpu_hop
    latency = slowness(cluster) * (protocol.start + hops)
    if plan.network_hops:
        latency += plan.network_hops * cluster.network_link().latency_seconds * protocol.network_hop
    gpu, network = _transfer_seconds(plan, rates, chunk)
    # The loss of in-switch reductions occurs on NVLink, not on the network.
    network_share = 1.0 if plan.algorithm == IN_SWITCH else protocol.share
    return _Choice(plan.algorithm, protocol.name, latency, gpu / protocol.share, network / network_share)


def _transfer_seconds(plan: AlgorithmPlan, rates: Rates, chunk: float) -> tuple[float, float]:
    gpu = plan.gpu_bytes / rates.gpu + chunk * plan.chunk_bytes / rates.memory
    return gpu, plan.node_bytes / rates.node if plan.node_bytes else 0.0
