"""One rank of a job of any size in this process alone: PyTorch's fake process group, and patches of what it lacks.

Inside :func:`fake_world` a script finds its rank, world size and GPUs as under ``torchrun``. Collectives of tensors are
handled by :class:`e2e.capture.distributed.communication.Communication`, Python objects by a
:class:`e2e.capture.distributed.mailbox.Mailbox`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from e2e.capture.distributed.mailbox import Mailbox
from e2e.capture.distributed.parallel_libraries import ddp_patches
from e2e.capture.recorder import Recorder

c10d = import_module("torch.distributed.distributed_c10d")


@dataclass(frozen=True)
class RankPlace:
    """Rank of a job, with the world size and the number of ranks per node."""

    rank: int
    world_size: int
    gpus_per_node: int = 8

    def environment(self) -> dict[str, str]:
        """Return the environment variables set by ``torchrun``."""
        local = min(self.gpus_per_node, self.world_size)
        node, local_rank = divmod(self.rank, local)
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local),
            "GROUP_RANK": str(node),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
        }


@contextmanager
def fake_world(place: RankPlace, recorder: Recorder, mailbox: Mailbox) -> Iterator[None]:
    """Context in which this process is the rank ``place``; everything is restored on exit."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mailbox.begin(place.rank)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, place.environment()))
        stack.enter_context(patch.object(sys, "excepthook", sys.excepthook))  # changed by the next line
        dist.init_process_group("fake", rank=place.rank, world_size=place.world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        for target, name, value in _patches(place, recorder, mailbox):
            stack.enter_context(patch.object(target, name, value))
        # Libraries look up the functions of a device by its name.
        stack.enter_context(patch.object(torch, "meta", torch.cuda, create=True))
        yield


def _patches(place: RankPlace, recorder: Recorder, mailbox: Mailbox) -> Iterator[tuple[Any, str, Any]]:
    yield from _start_patches(recorder)
    yield from _cuda_patches(place)
    yield from _object_patches(place, mailbox)
    yield from ddp_patches(recorder)


def _start_patches(recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches of initialisation: the process group exists already and reports NCCL as its backend."""

    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        recorder.communication.backend = backend or "cuda:nccl,cpu:gloo"

    def barrier(group: Any = None, async_op: bool = False, **more: Any) -> Any:
        return recorder.communication.barrier(group or c10d._get_default_group(), async_op)

    def in_batch(operations: list[Any]) -> list[Any]:
        with recorder.communication.batch():
            works = [_start(operation) for operation in operations]
        return [work for work in works if work is not None]

    new_group = dist.new_group

    def group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **more: Any) -> Any:
        return new_group(ranks, timeout, None, *args, **more)

    yield dist, "get_backend", lambda group=None: "nccl"
    for module in (dist, c10d):
        yield module, "new_group", group
        yield module, "init_process_group", init
        yield module, "destroy_process_group", lambda group=None: None
        yield module, "barrier", barrier
        yield module, "monitored_barrier", lambda group=None, timeout=None, wait_all_ranks=False: barrier(group)
        yield module, "batch_isend_irecv", in_batch
        yield module, "is_nccl_available", lambda: True


def _start(operation: Any) -> Any:
    peer = {"group_dst" if operation.op is dist.isend else "group_src": operation.group_peer}
    return operation.op(operation.tensor, group=operation.group, tag=operation.tag, **peer)


def _cuda_patches(place: RankPlace) -> Iterator[tuple[Any, str, Any]]:
    local = int(place.environment()["LOCAL_RANK"])
    cuda = torch.device("cuda", local)
    yield torch.cuda, "is_initialized", lambda: True
    yield torch.cuda, "device_count", lambda: min(place.gpus_per_node, place.world_size)
    yield torch.cuda, "current_device", lambda: local
    yield torch.cuda, "get_rng_state", lambda device="cuda": torch.zeros(16, dtype=torch.uint8, device="cpu")
    yield torch.cuda, "set_rng_state", lambda state, device="cuda": None
    yield torch.cuda.nccl, "version", lambda: (0, 0, 0)  # shown in messages
    yield torch._C, "_get_accelerator", lambda: cuda
    yield torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("cuda")
    yield torch.accelerator, "is_available", lambda: True
    yield torch.accelerator, "device_count", lambda: min(place.gpus_per_node, place.world_size)
    yield torch.accelerator, "current_device_index", lambda: local
    yield torch.accelerator, "set_device_index", lambda device: None
    yield torch.random, "fork_rng", lambda *args, **kwargs: nullcontext()


def _object_patches(place: RankPlace, mailbox: Mailbox) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches of object communication: objects between two ranks are really sent; in a collective, the other
    ranks send the same as this one.
    """

    def peer(group: Any, world_rank: int | None, group_rank: int | None) -> int:
        if world_rank is not None:
            return world_rank
        return dist.get_global_rank(group or c10d._get_default_group(), group_rank)

    def send(objects: list[Any], dst: Any = None, group: Any = None, device: Any = None, **more: Any) -> None:
        mailbox.post(place.rank, peer(group, dst, more.get("group_dst")), list(objects))

    def receive(objects: list[Any], src: Any = None, group: Any = None, device: Any = None, **more: Any) -> int:
        source = peer(group, src, more.get("group_src"))
        objects[:] = mailbox.take(source, place.rank)
        return source

    def gather_all(target: list[Any], item: Any, group: Any = None) -> None:
        target[:] = [item] * len(target)

    def gather(item: Any, target: list[Any] | None = None, dst: Any = None, group: Any = None, **more: Any) -> None:
        if target is not None:
            target[:] = [item] * len(target)

    def broadcast(objects: list[Any], src: Any = None, group: Any = None, *args: Any, **more: Any) -> None:
        return None

    def scatter(target: list[Any], items: list[Any] | None = None, *args: Any, **more: Any) -> None:
        if items:
            target[0] = items[0]

    for module in (dist, c10d):
        yield module, "send_object_list", send
        yield module, "recv_object_list", receive
        yield module, "all_gather_object", gather_all
        yield module, "gather_object", gather
        yield module, "broadcast_object_list", broadcast
        yield module, "scatter_object_list", scatter
