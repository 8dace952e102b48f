"""GPU resources used by NCCL kernels while they transfer data: multiprocessors and memory bandwidth.

A collective runs one thread block per channel, and the block of 512 to 640 threads stays on its multiprocessor to the
end. The number of channels depends on the links, as NCCL's log shows ("24 coll channels, 16 nvls channels, 32 p2p
channels"); small transfers use fewer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from costmodel.gpu.families.rates import dram_bandwidth
from costmodel.machines.cluster import Cluster
from costmodel.operators.collective_transfer import CollectiveTransfer

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
