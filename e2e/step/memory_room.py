"""Memory available for tensors on one GPU, and whether the peak of a step fits into it.

A process can use ``usable`` bytes of the card's memory (machine file: as reported by CUDA, without ECC's and the
driver's part). Memory that PyTorch's allocator never gets is subtracted: the CUDA context with the code of loaded
kernels, and the buffers of every NCCL communicator. The rest is the room. The predicted peak of a step is accurate to a
few percent: below 95 % of the room it fits, up to 105 % it may fit, above it does not.
"""

from __future__ import annotations

from typing import Literal

from costmodel.collectives.physics import most_channels
from costmodel.machines.cluster import Cluster
from costmodel.machines.machine_records import Machine
from e2e.step.execution_graph import ExecutionGraph

# Fractions of the room; see the module docstring.
SURE, HOPELESS = 0.95, 1.05
# CUDA context and loaded code: memory counted as "in use" by the process beyond PyTorch's reserve in PyTorch's
# out-of-memory messages: 0.2 GiB on L4 and L40S, 0.46 on RTX 3090, 0.64 on H200.
_LARGE_CONTEXT, _CONTEXT = 650 << 20, 400 << 20
# Connection of one channel to one peer: buffers of 10 MiB for receiving (protocols Simple, LL128, LL) and of 2 MiB for
# sending, as in NCCL's allocation log (github.com/NVIDIA/nccl issue 1685).
_CONNECTION = 12 << 20
# Peers that a channel receives from: one in a ring; all-reduces also use trees, with two.
_RING, _RING_AND_TREE = 1, 3
Verdict = Literal["fits", "may not fit", "does not fit", "not known"]


def verdict(needed_bytes: int | None, room: int) -> Verdict:
    """Return whether ``needed_bytes`` fits into ``room``; ``needed_bytes`` is None if it is not known."""
    if needed_bytes is None:
        return "not known"
    if needed_bytes <= SURE * room:
        return "fits"
    return "may not fit" if needed_bytes <= HOPELESS * room else "does not fit"


def largest_fitting(room: int) -> int:
    """Return the largest number of bytes with the verdict "fits" for ``room``."""
    return int(SURE * room)


def memory_room(machine: Machine, graph: ExecutionGraph | None = None, cluster: object = None) -> int:
    """Return the bytes for tensors on the GPU of ``graph`` with the most communicators; ``cluster``: cluster of the
    job, if known.
    """
    taken = 0
    if machine.gpu is not None:
        taken += _LARGE_CONTEXT if machine.gpu.architecture in ("hopper", "blackwell") else _CONTEXT
    if graph is not None and isinstance(cluster, Cluster):
        taken += communicator_bytes(graph, cluster)
    return max(int(machine.memory[-1].usable) - taken, 0)


def communicator_bytes(graph: ExecutionGraph, cluster: Cluster) -> int:
    """Return the bytes of NCCL's buffers on the rank of ``graph`` with the most of them."""
    most = 0
    for rank in graph.ranks:
        kinds: dict[tuple[int, ...], set[str]] = {}
        for task in rank.tasks:
            if task.collective is not None and len(task.collective.ranks) > 1:
                kinds.setdefault(task.collective.ranks, set()).add(task.collective.kind)
        most = max(most, sum(_of_group(ranks, found, cluster) for ranks, found in kinds.items()))
    return most


def _of_group(ranks: tuple[int, ...], kinds: set[str], cluster: Cluster) -> int:
    """Return the bytes of the communicator among ``ranks`` with the connections for all its ``kinds`` of
    collectives.
    """
    nodes = len({rank // cluster.gpus_per_node for rank in ranks})
    found = 0
    rings = kinds - {"send", "recv", "all_to_all"}
    if rings:
        peers = _RING_AND_TREE if "all_reduce" in rings and nodes > 1 else _RING
        found += min(peers, len(ranks) - 1) * most_channels("all_reduce", nodes, cluster)
    if "all_to_all" in kinds:  # peers of other nodes share one buffer
        beside = min(len(ranks), cluster.gpus_per_node) - 1
        found += beside * most_channels("all_to_all", 1, cluster)
    if kinds & {"send", "recv"}:
        found += most_channels("send_recv", nodes, cluster)
    return found * _CONNECTION
