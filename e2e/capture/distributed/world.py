"""One rank of a job of any size in this process alone: PyTorch's fake process group, and patches of what it lacks.

Inside :func:`fake_world` a script finds its rank, world size and GPUs as under ``torchrun``. Collectives of tensors are
handled by :class:`e2e.capture.distributed.communication.Communication`, Python objects by a
:class:`e2e.capture.distributed.communication.Mailbox`. DDP, FSDP2 and pipeline schedules run on meta tensors by patches
of their checks, resizing and votes.
"""

from __future__ import annotations

import functools
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.nn.modules._functions import SyncBatchNorm

from costmodel.base.errors import ModelError
from e2e.capture.distributed.communication import Mailbox
from e2e.capture.distributed.data_parallel import data_parallel_patches
from e2e.capture.environment import on_gpu
from e2e.capture.imports import Patches, patched_imports
from e2e.capture.possible_values import all_true
from e2e.capture.python_calls import uncounted
from e2e.capture.recorder import Recorder
from e2e.capture.script_errors import OtherGpusError


def ddp_patches(recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches of DDP: its all-reduce as a communication hook, since the built-in one needs a result of C++.

    It begins when a bucket is full, like the built-in one; a hook of the script replaces it.
    """
    ddp = torch.nn.parallel.DistributedDataParallel
    construct, register, run = ddp.__init__, ddp.register_comm_hook, ddp._run_ddp_forward

    def construct_unsynchronized(self: Any, *args: Any, **kwargs: Any) -> None:
        given = {**kwargs, "init_sync": False, "device_ids": None, "output_device": None}
        if recorder.bucket_mb is not None:
            given["bucket_cap_mb"] = recorder.bucket_mb
        construct(self, *args[:1], **given)
        self._moves_inputs = bool(kwargs.get("device_ids") or args[1:2])
        self.logger = _QuietLogger(self.logger)
        self._capture_hook = None
        recorder.communication.settling = 2

        def reduce(state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            if self._capture_hook is not None:
                hook, own_state = self._capture_hook
                return hook(own_state, bucket)
            _divide(recorder, bucket, self.process_group.size())
            dist.all_reduce(bucket.buffer(), group=self.process_group, async_op=True)
            done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            done.set_result(bucket.buffer())
            return done

        # Annotations as objects, since DDP compares them.
        reduce.__annotations__ = {"bucket": dist.GradBucket, "return": torch.futures.Future[torch.Tensor]}
        register(self, None, reduce)

    def register_later(self: Any, state: Any, hook: Any) -> None:
        self._capture_hook = (hook, state)

    def run_forward(self: Any, *inputs: Any, **named: Any) -> Any:
        if self._moves_inputs:
            inputs, named = on_gpu((inputs, named))
        return run(self, *inputs, **named)

    yield ddp, "__init__", construct_unsynchronized
    yield ddp, "_run_ddp_forward", run_forward
    yield ddp, "register_comm_hook", register_later


def _divide(recorder: Recorder, bucket: dist.GradBucket, ranks: int) -> None:
    """Divide each gradient as DDP does without a hook of the script: during the copy into the bucket, or in place if it
    is there.

    (``mark_variable_ready_dense`` in reducer.cpp; with any hook it only copies, so the recorded copies are amended.)
    """
    if not recorder.enabled:
        return
    copies = recorder.copies_into(bucket.buffer())
    for row in copies:
        row["name"], row["inputs"] = "aten::mul", (row["inputs"][1], 1 / ranks)
    for gradient in () if copies else bucket.gradients():
        recorder.record_call("aten::div_", (gradient, ranks), (gradient,), {})


class _QuietLogger:
    """DDP's logger without the times of iterations, which do not exist here and would cause a warning."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def set_runtime_stats_and_log(self) -> None:
        """Do nothing, since there are no statistics."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._logger, name)


@contextmanager
def not_yet_started() -> Iterator[None]:
    """Context in which a program finds no process group before it has started it."""
    world, member = c10d._get_default_group(), c10d.GroupMember
    start, end = dist.init_process_group, dist.destroy_process_group

    def init(*args: Any, **kwargs: Any) -> None:
        member.WORLD = world
        start(*args, **kwargs)

    def destroy(group: Any = None) -> None:
        if group is None or group is world:
            member.WORLD = None
        end(group)

    with ExitStack() as stack:
        for module in (dist, c10d, import_module("torch.distributed.device_mesh")):
            stack.enter_context(patch.object(module, "init_process_group", init))
            if hasattr(module, "destroy_process_group"):
                stack.enter_context(patch.object(module, "destroy_process_group", destroy))
        stack.callback(setattr, member, "WORLD", world)
        member.WORLD = None
        yield


@contextmanager
def patched_libraries(recorder: Recorder) -> Iterator[None]:
    """Context in which the libraries of distributed jobs that a script imports run on tensors without memory.

    FSDP2's check of real storage, memory that it resizes by hand and shards whose memory is replaced; FSDP1's
    comparison of memory by its address; the tensors of a distributed checkpoint; the vote of pipeline stages; the state
    of DTensor's random numbers.
    """
    with patched_imports(library_patches(recorder)):
        yield


def library_patches(recorder: Recorder) -> dict[str, Patches]:
    """Return the patches of each library, by its name."""
    return {
        "torch.distributed.fsdp": lambda fsdp: (*_fsdp1_patches(recorder), *_fsdp2_patches(recorder)),
        "torch.distributed.checkpoint": _checkpoint_patches,
        "torch.distributed.pipelining": _pipeline_patches,
        "torch.distributed.tensor": _tensor_patches,
    }


def _fsdp2_patches(recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    params = import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    group = import_module("torch.distributed.fsdp._fully_shard._fsdp_param_group")
    yield group.FSDPParamGroup, "_validate_no_meta_params", lambda self: None
    yield params, "_chunk_with_empty", _Chunks
    yield params.FSDPParam, "reset_sharded_param", _renewed(params.FSDPParam.reset_sharded_param)
    for module, name in ((params, "free_storage"), (params, "alloc_storage"), (group, "alloc_storage")):
        yield module, name, _resized(recorder, getattr(module, name))


def _fsdp1_patches(recorder: Recorder) -> Iterator[tuple[Any, str, Any]]:
    params = import_module("torch.distributed.fsdp._flat_param")
    first = import_module("torch.distributed.fsdp").FullyShardedDataParallel
    yield first, "__init__", _without_offload(first.__init__)
    # Parameters are moved for a checkpoint only.
    yield params.FlatParamHandle, "flat_param_to", lambda self, *args, **kwargs: None
    saving = import_module("torch.distributed.fsdp._optim_utils")
    yield saving, "_get_pg_default_device", lambda group=None: torch.device("cuda")
    yield params, "_same_storage", _shares_memory
    yield params, "_data_ptr_allocated", lambda tensor: tensor.untyped_storage().size() > 0
    for name in ("_free_storage", "_alloc_storage"):
        yield params, name, _resized(recorder, getattr(params, name))


def _checkpoint_patches(checkpoint: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches by which a sharded checkpoint is saved without its tensors, which have no values: they would
    take the memory of the host.
    """
    saver = checkpoint.state_dict_saver
    yield saver, "_save_state_dict", _saved_without_tensors(saver, saver._save_state_dict)
    for module in (saver, checkpoint):
        yield module, "async_save", _saved_without_tensors(saver, saver.async_save)


def _saved_without_tensors(saver: Any, save: Callable[..., Any]) -> Callable[..., Any]:
    def saved(state_dict: Any, *args: Any, **kwargs: Any) -> Any:
        return save(_without_tensors(saver._stateful_to_state_dict(state_dict)), *args, **kwargs)

    return functools.wraps(save)(saved)


def _without_tensors(held: Any) -> Any:
    if isinstance(held, dict):
        return {name: _without_tensors(each) for name, each in held.items() if not isinstance(each, torch.Tensor)}
    if isinstance(held, list):
        return [_without_tensors(each) for each in held if not isinstance(each, torch.Tensor)]
    return held


def _pipeline_patches(pipelining: Any) -> Iterator[tuple[Any, str, Any]]:
    yield pipelining.schedules._PipelineSchedule, "_warmup_p2p", _infer_shapes


def _tensor_patches(tensor: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches of ``torch.nn.init`` of sharded parameters, where ranks would synchronise a state on the
    GPU.
    """
    random = tensor._random
    made = random._RNGStateTracker.__init__
    yield random.OffsetBasedRNGTracker, "__init__", lambda self, *given, **named: made(self, torch.device("meta"))
    yield random, "_rng_tracker", None  # state made during a capture does not outlive it
    sharding = tensor._sharding_prop.ShardingPropagator
    # What it finds once and keeps, in thousands of functions, is no part of a steady step.
    find = "propagate_op_sharding_non_cached"
    yield sharding, find, uncounted(getattr(sharding, find))
    infer = "_propagate_tensor_meta_non_cached"
    yield sharding, infer, _filled_in_place(getattr(sharding, infer))


def _filled_in_place(infer: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return ``infer``, by which DTensor finds the shape of a result, for which random numbers written in place
    (``nn.init.uniform_``) need no result: PyTorch would draw them on the GPU.
    """

    def inferred(self: Any, op_schema: Any) -> Any:
        if op_schema.op._schema.is_mutable and torch.Tag.nondeterministic_seeded in op_schema.op.tags:
            return op_schema.args_spec[0].tensor_meta
        return infer(self, op_schema)

    return inferred


def _without_offload(construct: Callable[..., None]) -> Callable[..., None]:
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        given = kwargs.get("cpu_offload", args[3] if len(args) > 3 else None)
        if given is True or getattr(given, "offload_params", False):
            raise ModelError("offload by FSDP1 is not modelled; use fully_shard and CPUOffloadPolicy")
        construct(self, *args, **kwargs)

    return functools.wraps(construct)(checked)


def _shares_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.untyped_storage()._cdata == b.untyped_storage()._cdata


class _Chunks:
    """Lazy parts of ``torch.chunk`` over all ranks, empty ones at the end: FSDP2 reads two of thousands."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._size = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, place: int) -> torch.Tensor:
        start = place * self._size
        length = min(self._size, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, length) if length > 0 else self._tensor.new_empty(0)


def _renewed(reset: Callable[[Any], None]) -> Callable[[Any], None]:
    """Make shards whose memory was replaced (``to_empty``, ``to``) be gathered from the new memory.

    FSDP2 treats a tensor on the meta device as not allocated yet, and keeps the old memory.
    """

    def reset_sharded_param(self: Any) -> None:
        reset(self)
        shard = self.sharded_param._local_tensor
        if not shard.is_cuda or shard.untyped_storage()._cdata == self._sharded_param_data.untyped_storage()._cdata:
            return
        if shard.size() != self.padded_sharded_param_size:
            place = self.fsdp_placement.dim
            padded = shard.new_zeros(self.padded_sharded_param_size)
            shard = padded.narrow(place, 0, shard.size(place) if shard.numel() else 0)
            self.sharded_param._local_tensor = shard
            self._sharded_param_data = padded.view(-1)
        else:
            self._sharded_param_data = shard.view(-1)

    return reset_sharded_param


def resized(recorder: Recorder) -> Callable[[torch.Tensor, int], None]:
    """Return a function that sets the bytes of a tensor's memory, which ``recorder`` notes as freed or allocated."""
    return _resized(recorder, lambda tensor, size: tensor.untyped_storage().resize_(size))


def _resized(recorder: Recorder, function: Callable[..., None]) -> Callable[..., None]:
    def resize(tensor: torch.Tensor, *size: Any, **named: Any) -> None:
        before = tensor.untyped_storage().size()
        function(tensor, *size, **named)
        after = tensor.untyped_storage().size()
        if before and not after:
            recorder.convert.identities.emptied(tensor)
        elif after and not before:
            recorder.convert.identities.refilled(tensor)

    return resize


def _infer_shapes(self: Any, stages: list[Any], has_backward: bool, p2p_done: bool) -> None:
    """Infer shapes without the stages' vote, whose tensors have no values here; inference of shapes works for all of
    them.
    """
    mode = import_module("torch.distributed.pipelining.stage").InferenceMode.DYNAMIC
    for stage in stages:
        stage._inference_mode = mode


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
def fake_world(place: RankPlace, recorder: Recorder, mailbox: Mailbox, *, launched: bool = True) -> Iterator[None]:
    """Context in which this process is the rank ``place``; everything is restored on exit.

    ``launched``: it has the environment of ``torchrun``.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    mailbox.begin(place.rank)
    with ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ, place.environment() if launched else {}))
        stack.enter_context(patch.object(sys, "excepthook", sys.excepthook))  # changed by the next line
        # Called where the environment asks for it (TORCH_DIST_INIT_BARRIER); the store is of this process alone.
        stack.enter_context(patch.object(c10d, "_store_based_barrier", lambda *args, **kwargs: None))
        dist.init_process_group("fake", rank=place.rank, world_size=place.world_size, store=FakeStore())
        stack.callback(dist.destroy_process_group)
        for target, name, value in _patches(place, recorder, mailbox):
            stack.enter_context(patch.object(target, name, value))
        stack.enter_context(patched_imports({"streaming.base.shared.barrier": _shared_barriers(place, mailbox)}))
        # Libraries look up the functions of a device by its name.
        stack.enter_context(patch.object(torch, "meta", torch.cuda, create=True))
        yield


def _shared_barriers(place: RankPlace, mailbox: Mailbox) -> Patches:
    """Return the patches of MosaicML streaming's barriers, counters in shared memory that wait for the loaders of all
    ranks of a node: those of ranks that are not run never come.
    """
    met: Counter[int] = Counter()

    def patches(module: Any) -> Iterator[tuple[Any, str, Any]]:
        make = module.SharedBarrier.__init__
        made: dict[Any, int] = {}

        def begin(self: Any, *args: Any, **kwargs: Any) -> None:
            make(self, *args, **kwargs)
            made[self] = len(made)

        def meet(self: Any, num_procs: int) -> None:
            met[made[self]] += 1
            first = place.rank - place.rank % place.gpus_per_node
            node = range(first, min(first + place.gpus_per_node, place.world_size))
            mailbox.meet(place.rank, node, f"barrier {met[made[self]]} of loader {made[self]}")

        yield module.SharedBarrier, "__init__", begin
        yield module.SharedBarrier, "__call__", meet

    return patches


def _patches(place: RankPlace, recorder: Recorder, mailbox: Mailbox) -> Iterator[tuple[Any, str, Any]]:
    yield from _start_patches(place, recorder, mailbox)
    yield from _cuda_patches(place)
    yield from _object_patches(place, mailbox)
    yield from ddp_patches(recorder)
    yield SyncBatchNorm, "forward", staticmethod(_with_inputs_everywhere(SyncBatchNorm.forward))
    if place.world_size > 1:
        yield from data_parallel_patches(recorder, dist.is_initialized)


def _start_patches(place: RankPlace, recorder: Recorder, mailbox: Mailbox) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches of initialisation: the process group exists already and reports NCCL as its backend."""
    gpus = dist.get_world_size()
    names = ["nccl"]
    barriers: Counter[str] = Counter()

    def init(backend: str | None = None, *args: Any, **kwargs: Any) -> None:
        count = kwargs.get("world_size", -1)
        if count not in (-1, None, gpus):
            raise OtherGpusError(f"the program's process group has {count} ranks", count)
        barriers["start"] += 1
        mailbox.meet(place.rank, range(gpus), f"start {barriers['start']}")
        recorder.communication.backend = backend or "cuda:nccl,cpu:gloo"
        if backend and ":" in backend:
            names.append(str(backend).lower())  # a program reads from it whether tensors of the host are taken too

    def barrier(group: Any = None, async_op: bool = False, *args: Any, **more: Any) -> Any:
        group = group or c10d._get_default_group()
        if not async_op and dist.get_rank(group) >= 0:
            barriers[group.group_name] += 1
            name = f"barrier {barriers[group.group_name]} in {group.group_name}"
            mailbox.meet(place.rank, dist.get_process_group_ranks(group), name)
        return recorder.communication.barrier(group, async_op)

    def in_batch(p2p_op_list: list[Any]) -> list[Any]:
        with recorder.communication.batch():
            works = [_start(operation) for operation in p2p_op_list]
        return [work for work in works if work is not None]

    new_group = dist.new_group

    def group(ranks: Any = None, timeout: Any = None, backend: Any = None, *args: Any, **more: Any) -> Any:
        made = new_group(ranks, timeout, None, *args, **more)
        if backend == "gloo" and hasattr(made, "group_name"):
            recorder.communication.on_host.add(made.group_name)
        return made

    yield dist, "get_backend", lambda group=None: names[-1]
    yield c10d, "_set_pg_timeout", lambda timeout, group=None: None
    made = AsyncCollectiveTensor.__new__

    def make(kind: type, *args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # it is where its contents are
            return made(kind, *args, **kwargs)

    yield AsyncCollectiveTensor, "__new__", make
    for module in (dist, c10d):
        yield module, "new_group", group
        yield module, "init_process_group", init
        yield module, "destroy_process_group", lambda group=None: None
        yield module, "barrier", barrier
        yield module, "monitored_barrier", lambda group=None, timeout=None, wait_all_ranks=False: barrier(group)
        yield module, "batch_isend_irecv", in_batch
        yield module, "is_nccl_available", lambda: True


def _with_inputs_everywhere(normalize: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``normalize``, by which ``SyncBatchNorm`` leaves out ranks without inputs: there are none."""

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        with all_true():
            return normalize(self, *args, **kwargs)

    return forward


def _start(operation: Any) -> Any:
    peer = {"group_dst" if operation.op is dist.isend else "group_src": operation.group_peer}
    return operation.op(operation.tensor, group=operation.group, tag=operation.tag, **peer)


def _cuda_patches(place: RankPlace) -> Iterator[tuple[Any, str, Any]]:
    local = int(place.environment()["LOCAL_RANK"])
    yield torch.cuda, "is_initialized", lambda: True
    yield torch.cuda, "device_count", lambda: min(place.gpus_per_node, place.world_size)
    yield torch.cuda, "current_device", lambda: local
    yield torch.cuda.nccl, "version", lambda: (2, 27, 5)  # shown in messages, asked for support of bfloat16
    yield torch.random, "fork_rng", lambda *args, **kwargs: nullcontext()


def _object_patches(place: RankPlace, mailbox: Mailbox) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches of object communication: objects between two ranks, and those of a broadcast or scatter, are
    really sent; gathered from all, the other ranks send the same as this one, as do sources that are not run.
    """
    calls: Counter[str] = Counter()

    def peer(group: Any, world_rank: int | None, group_rank: int | None) -> int:
        if world_rank is not None:
            return world_rank
        return dist.get_global_rank(group or c10d._get_default_group(), group_rank)

    # Parameters have PyTorch's names, since programs give them by name.
    def send(
        object_list: list[Any],
        dst: Any = None,
        group: Any = None,
        device: Any = None,
        group_dst: Any = None,
        *more: Any,
        **named: Any,
    ) -> None:
        mailbox.post(place.rank, peer(group, dst, group_dst), list(object_list))

    def receive(
        object_list: list[Any],
        src: Any = None,
        group: Any = None,
        device: Any = None,
        group_src: Any = None,
        *more: Any,
        **named: Any,
    ) -> int:
        source = peer(group, src, group_src)
        object_list[:] = mailbox.take(source, place.rank)
        return source

    def gather_all(object_list: list[Any], obj: Any, group: Any = None) -> None:
        object_list[:] = [obj] * len(object_list)

    def gather(obj: Any, object_gather_list: list[Any] | None = None, *more: Any, **named: Any) -> None:
        if object_gather_list is not None:
            object_gather_list[:] = [obj] * len(object_gather_list)

    def shared(
        kind: str, src: int | None, group: Any, group_src: int | None, own: list[Any], missing: bool
    ) -> list[Any]:
        """Return the objects of the source, which gives its ``own``, as do others in its place that do not miss any."""
        group = group or c10d._get_default_group()
        if dist.get_rank(group) < 0:
            return own
        source = 0 if src is None and group_src is None else peer(group, src, group_src)
        call = f"{kind} by {source} in {group.group_name}"
        calls[call] += 1
        name = f"{call}, {calls[call]}"
        if source == place.rank:
            mailbox.give(name, own)
            return own
        found = mailbox.given(source, place.rank, name, missing)
        return own if found is None else found

    def broadcast(
        object_list: list[Any],
        src: int | None = None,
        group: Any = None,
        device: Any = None,
        group_src: int | None = None,
        *more: Any,
        **named: Any,
    ) -> None:
        missing = all(each is None for each in object_list)
        object_list[:] = shared("broadcast", src, group, group_src, list(object_list), missing)

    def scatter(
        scatter_object_output_list: list[Any],
        scatter_object_input_list: list[Any] | None = None,
        src: int | None = None,
        group: Any = None,
        group_src: int | None = None,
        *more: Any,
        **named: Any,
    ) -> None:
        missing = scatter_object_output_list[:1] == [None]
        found = shared("scatter", src, group, group_src, list(scatter_object_input_list or ()), missing)
        if found and (rank := dist.get_rank(group)) >= 0:
            scatter_object_output_list[0] = found[rank]

    for module in (dist, c10d):
        yield module, "send_object_list", send
        yield module, "recv_object_list", receive
        yield module, "all_gather_object", gather_all
        yield module, "gather_object", gather
        yield module, "broadcast_object_list", broadcast
        yield module, "scatter_object_list", scatter
