"""Analytic model of a collective: a start, sequential hops, bytes over the busiest link; the GPU resources it holds.

**Algorithms**: ring, tree, direct, in-switch (NVLS) and parallel aggregated tree (PAT) algorithms of NCCL; volumes
after doc/PERFORMANCE.md of nccl-tests and Sanders, Speck, Traeff, "Two-tree algorithms for full bandwidth broadcast,
reduction and scan" (2009). The algorithms available per kind are in NCCL's src/graph/tuning.cc: trees only for
all-reduces; all-gathers and reduce-scatters with several GPUs per node only have rings, whose latency grows with the
ranks.

**Protocols**: each algorithm runs in one of NCCL's protocols, which trade bandwidth for latency: LL (a flag beside
every word), LL128 (a flag beside 120 bytes; NVLink only) and Simple (whole buffers, then a flag). The library takes
the fastest; the smooth minimum over all of them is continuous and increases with the size. Their constants are
fitted to measured systems by ``python -m lab.fit`` and stored with their provenance in calibration/collectives.json.

**Occupancy**: a collective runs one thread block per channel, and the block of 512 to 640 threads stays on its
multiprocessor to the end. The number of channels depends on the links, as NCCL's log shows ("24 coll channels, 16
nvls channels, 32 p2p channels"); small transfers use fewer.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from packaging.version import Version

from costmodel.base.errors import OutputError
from costmodel.base.output_files import write_whole
from costmodel.gpu.families.rates import dram_bandwidth
from costmodel.machines.cluster import Cluster, nccl_version
from costmodel.machines.record_file import read_record
from costmodel.operators.collective_transfer import CollectiveTransfer, volume_factor

FILE = Path(__file__).parent.parent / "calibration" / "collectives.json"


@dataclass(frozen=True)
class Protocol:
    """Constants of one NCCL protocol."""

    name: str
    # Seconds of the launch and the first flag.
    start: float
    # Hop latency as a share of the latency in the link's file: inside a node, and over the network.
    gpu_hop: float
    network_hop: float
    # Share of the link's bandwidth.
    share: float
    # Requires 128-byte stores.
    nvlink_only: bool = False


@dataclass(frozen=True)
class Constants:
    """Constants of the analytic model. ``chunk``: bytes moved through a GPU's memory per byte of its own part."""

    protocols: tuple[Protocol, ...]
    in_switch: Protocol
    chunk: float


@lru_cache(maxsize=1)
def constants() -> Constants:
    """Shipped constants; raises ``InputError`` that names a corrupt file."""
    return read_record(FILE, Constants, "install the package again")


def write_constants(values: Constants, provenance: dict[str, Any], path: Path = FILE) -> Path:
    """Write ``values`` to ``path``; raises ``OutputError`` on failure."""
    record = {
        "provenance": provenance,
        "protocols": [dataclasses.asdict(each) for each in values.protocols],
        "in_switch": dataclasses.asdict(values.in_switch),
        "chunk": values.chunk,
    }
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(record, indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another directory with -o") from None
    constants.cache_clear()
    return path


IN_SWITCH = "in-switch"
AGGREGATED_TREES = "aggregated trees"
# PAT in NCCL's own model (2.23 and later): latency per tree level and per rank as shares of a network hop's latency (14
# us / 3.5, 2.8 us of 14), and the share of the bandwidth.
_LEVEL_HOPS, _RANK_HOPS, _AGGREGATED_SHARE = 1 / 3.5, 0.2, 0.75
_PAT_SINCE = Version("2.23")
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
    return not cluster.nccl or nccl_version(cluster.nccl) >= _PAT_SINCE


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


# Channels of collectives and of messages to a peer inside a node over NVLink, from users' logs of NCCL 2.7 to 2.27:
# A100 and H100 (and RTX with bridges) 24 and 32, github.com/NVIDIA/nccl issues 1781 and 1259; V100 12 and 16, nvlink
# logs of DGX-2; B200 and GB200 32 and 32, logs of NVL72.
_NVLINK = {"volta": (12, 16), "blackwell": (32, 32)}
_LATER_NVLINK = (24, 32)
# Through the host two suffice ("a PCI system [...] should just launch 2 SMs", S. Jeaugey, nccl issue 689).
_HOST = (2, 2)
# Over the network: 16 with four or more cards a node (H100, nccl issues 1453 and 1538; H800, 892), two for each card
# below that; messages take NCCL_NCHANNELS_PER_NET_PEER, which is 2 (nccl issue 1424).
_NETWORK, _PER_CARD, _NETWORK_PEER = 16, 2, 2
# Bytes per channel: 512 threads by 64 bytes ("threadThresholds 8/8/64" of NCCL's log).
_CHANNEL_BYTES = 512 * 64
# Passes of a received byte through the GPU's memory: stored, read again, read from or written to the user's buffer
# ("needs to be multiplied by at least 2x [...] it can be 3x", S. Jeaugey, nccl issue 1428).
_MEMORY_PASSES = 3.0


@dataclass(frozen=True)
class Occupancy:
    """Shares of a GPU in use: multiprocessors ``held`` to the end, and bandwidth of its ``memory``."""

    held: float
    memory: float


def channels(transfer: CollectiveTransfer, cluster: Cluster) -> int:
    """Thread blocks on each GPU that takes part in ``transfer``; 0 for one rank."""
    if transfer.ranks == 1:
        return 0
    most = most_channels(transfer.kind, transfer.nodes, cluster)
    return max(1, min(most, math.ceil(transfer.wire_bytes / _CHANNEL_BYTES)))


def most_channels(kind: str, nodes: int, cluster: Cluster) -> int:
    """Channels of large transfers of ``kind`` among GPUs of ``nodes`` nodes."""
    # An all-to-all is made of messages.
    message = kind in ("send_recv", "all_to_all")
    if nodes > 1:
        return _NETWORK_PEER if kind == "send_recv" else min(_NETWORK, _PER_CARD * cluster.network_cards)
    if cluster.topology == "host" or cluster.intra_node.kind != "nvlink":
        return _HOST[message]
    return _NVLINK.get(cluster.machine.chip().architecture, _LATER_NVLINK)[message]


def occupancy(transfer: CollectiveTransfer, seconds: float, cluster: Cluster) -> Occupancy:
    """Occupancy of ``transfer``, which takes ``seconds`` when run alone."""
    held = channels(transfer, cluster) / cluster.machine.chip().sm_count
    rate = transfer.wire_bytes / seconds if seconds > 0 else 0.0
    return Occupancy(min(held, 1.0), min(_MEMORY_PASSES * rate / dram_bandwidth(cluster.machine), 1.0))
