"""Calls of torch.distributed for :class:`CollectiveTransfer`, on the tensors of one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from costmodel.operators.collective_transfer import CollectiveTransfer
from costmodel.operators.layers import element_bytes

TORCH = True
# Share of an uneven all-to-all that every rank sends to the first one; the others receive equal parts of the rest.
HOT_SHARE = 0.5


@dataclass(frozen=True)
class RankGroup:
    """Group of ranks. ``ranks``: global numbers of the members, on ``nodes`` nodes. ``handle``: torch's process
    group.
    """

    ranks: tuple[int, ...]
    nodes: int
    handle: Any = None


def sendable(transfer: CollectiveTransfer, dtype: str) -> CollectiveTransfer | None:
    """``transfer`` with its size rounded down so that the ranks can divide it into elements of ``dtype``; ``None`` if
    empty.
    """
    parts = transfer.ranks if transfer.kind in ("reduce_scatter", "all_to_all") else 1
    unit = parts * element_bytes(dtype)
    size = transfer.size_bytes // unit * unit
    if size <= 0 and transfer.kind != "barrier":
        return None
    if transfer.busiest_bytes is None:
        return CollectiveTransfer(transfer.kind, size, transfer.ranks, transfer.nodes)
    return uneven(size, transfer.ranks, transfer.nodes, dtype)


def splits(elements: int, ranks: int) -> list[int]:
    """Elements that each rank sends to rank 0, 1 ...: a larger share to the first, equal parts of the rest, no
    remainder.
    """
    rest = (elements - int(elements * HOT_SHARE)) // (ranks - 1)
    return [elements - rest * (ranks - 1), *[rest] * (ranks - 1)]


def uneven(size_bytes: float, ranks: int, nodes: int, dtype: str) -> CollectiveTransfer:
    """All-to-all in which every rank sends :data:`HOT_SHARE` of its buffer to the first one, the busiest."""
    first = splits(int(size_bytes) // element_bytes(dtype), ranks)[0] * element_bytes(dtype)
    return CollectiveTransfer("all_to_all", size_bytes, ranks, nodes, busiest_bytes=float((ranks - 1) * first))


def make_call(transfer: CollectiveTransfer, group: RankGroup, rank: int, dtype: str, device: Any) -> Callable[[], Any]:
    """Function by which rank ``rank`` takes part. Uses zeros: sums of random values would overflow after some
    repetitions.
    """
    import torch
    import torch.distributed as dist

    torch_dtype, width = getattr(torch, dtype), element_bytes(dtype)
    place, count, handle = group.ranks.index(rank), len(group.ranks), group.handle
    elements = max(1, int(transfer.size_bytes) // width)

    def tensor(length: int) -> Any:
        return torch.zeros(length, dtype=torch_dtype, device=device)

    own = tensor(elements)
    if transfer.kind in ("all_reduce", "barrier"):  # torch's barrier is an all-reduce of one element
        return lambda: dist.all_reduce(own, group=handle)
    if transfer.kind == "all_gather":
        gathered = tensor(elements * count)
        return lambda: dist.all_gather_into_tensor(gathered, own, group=handle)
    if transfer.kind == "reduce_scatter":
        part = tensor(elements // count)
        return lambda: dist.reduce_scatter_tensor(part, own, group=handle)
    if transfer.kind == "all_to_all":
        sent = [elements // count] * count if transfer.busiest_bytes is None else splits(elements, count)
        received = [sent[place]] * count
        output = tensor(sum(received))
        return lambda: dist.all_to_all_single(output, own, received, sent, group=handle)
    if transfer.kind == "broadcast":
        return lambda: dist.broadcast(own, src=group.ranks[0], group=handle)
    if transfer.kind == "reduce":
        return lambda: dist.reduce(own, dst=group.ranks[0], group=handle)
    if place == 0:
        return lambda: dist.send(own, dst=group.ranks[-1], group=handle)
    return lambda: dist.recv(own, src=group.ranks[0], group=handle)
