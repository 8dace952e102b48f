"""``nn.DataParallel`` on several GPUs of one process, all of which are taken to do what the first one does.

PyTorch's own code scatters, makes the replicas and gathers; what moves between the GPUs is replaced here. Parameters
and buffers are broadcast in buckets, one replica runs with its part of the batch, its outputs are gathered and its
gradients reduced. The other replicas run in threads of the same interpreter, which calls their functions one after
another. Loss and optimizer run on the first GPU alone, for which the others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch._utils import _flatten_dense_tensors, _take_tensors, _unflatten_dense_tensors

from costmodel.base.errors import ModelError
from e2e.capture.python_calls import Uncounted
from e2e.capture.recorder import Recorder
from e2e.capture.script_errors import OtherGpusError

# Bytes of a bucket of parameters or gradients (`torch.nn.parallel.comm`).
_BUCKET_BYTES = 10 << 20
# Functions that are called to set a module, a parameter or a buffer of a replica, most of them by `__setattr__`: 8 us
# on a core on which a function of a program takes 0.1.
_FUNCTIONS_EACH = 80
_FORWARD = torch.nn.DataParallel.forward


def data_parallel_patches(recorder: Recorder, in_job: Callable[[], bool]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches. ``in_job``: tells whether the process is one of several of the program."""
    kind, gpus = torch.nn.DataParallel, dist.get_world_size()
    construct_alone, forward_alone = kind.__init__, kind.forward
    # The process group, which the program has not started, and this GPU.
    links = _Links(import_module("torch.distributed.distributed_c10d")._get_default_group(), recorder)
    replicating = import_module("torch.nn.parallel.replicate")
    # Length of this GPU's part -> that of the batch.
    lengths: dict[int, int] = {}

    def construct(
        self: Any, module: torch.nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0
    ) -> None:
        count = len(device_ids) if device_ids else torch.cuda.device_count()
        if count > 1 and in_job():
            raise ModelError(
                "nn.DataParallel on several GPUs in one process of several is not captured; give --gpus without a "
                "launcher, or use DistributedDataParallel"
            )
        if count not in (1, gpus):
            raise OtherGpusError(f"nn.DataParallel on {count} GPUs", count)
        construct_alone(self, module, [0], output_device, dim)
        if count > 1:
            self.dim, self.output_device = dim, torch.cuda.current_device()
            self.device_ids = sorted(range(gpus), key=lambda gpu: gpu != self.output_device)
            self.src_device_obj = torch.device("cuda", self.output_device)

    def forward(self: Any, *inputs: Any, **named: Any) -> Any:
        if len(self.device_ids) == 1:
            return forward_alone(self, *inputs, **named)
        recorder.paths = {**recorder.paths, id(self): "DataParallel"}  # a sample is one of a replica
        return _FORWARD(self, *inputs, **named)

    def scatter(devices: Any, sizes: Any, dim: int, tensor: torch.Tensor) -> Sequence[torch.Tensor]:
        parts = tensor.chunk(gpus, dim)
        lengths[parts[0].shape[dim]] = tensor.shape[dim]
        if not tensor.is_cuda:
            return parts[0].to("cuda", non_blocking=True), *parts[1:]
        links.scatter(parts)
        return parts

    def copy(tensors: list[torch.Tensor], devices: Any, detach: bool = False) -> list[list[torch.Tensor]]:
        copies = list(_Copies.apply(links, *tensors)) if tensors else []
        return [[copy.detach() for copy in copies] if detach else copies] * gpus

    def replicate(network: torch.nn.Module, devices: Any, detach: bool = False) -> list[torch.nn.Module]:
        with Uncounted():
            parts = [*network.modules(), *network.parameters(), *network.buffers()]
            replicas = replicating.replicate(network, devices, detach)
        recorder.functions += _FUNCTIONS_EACH * len(parts) * gpus
        return replicas  # type: ignore[no-any-return]

    def run(modules: Any, inputs: Any, kwargs_tup: Any = None, devices: Any = None) -> list[Any]:
        recorder.paths = {**recorder.paths, **{id(part): path for path, part in modules[0].named_modules()}}
        begin, before = recorder.recorded, recorder.functions
        output = modules[0](*inputs[0], **(kwargs_tup[0] if kwargs_tup else {}))
        for row in recorder.records(begin, recorder.recorded):
            row["functions"] += (len(modules) - 1) * (row["functions"] - before)
            before = 0
        return [output] * len(modules)

    def gather(device: Any, dim: int, *outputs: torch.Tensor) -> Any:
        output = outputs[0].view(1) if outputs[0].dim() == 0 else outputs[0]
        length = output.shape[dim]
        return _Gathered.apply(links, dim, lengths.get(length, length * len(outputs)), output)

    moving = import_module("torch.nn.parallel.scatter_gather")
    yield kind, "__init__", construct
    yield kind, "forward", forward
    yield moving, "Scatter", type("Scatter", (), {"apply": staticmethod(scatter)})
    yield moving, "Gather", type("Gather", (), {"apply": staticmethod(gather)})
    yield replicating, "_broadcast_coalesced_reshape", copy
    module = import_module("torch.nn.parallel.data_parallel")
    yield module, "replicate", replicate
    yield module, "parallel_apply", run


class _Links:
    """Links to the other GPUs."""

    def __init__(self, group: Any, recorder: Recorder) -> None:
        self.group, self.recorder = group, recorder
        self.own, self.gpus = dist.get_rank(group), dist.get_world_size(group)

    def scatter(self, parts: Sequence[torch.Tensor]) -> None:
        dist.scatter(parts[0], [torch.empty_like(parts[0])] * self.gpus, self.own, self.group)

    def gather(self, part: torch.Tensor) -> None:
        dist.gather(part, [part] * self.gpus, self.own, self.group)

    def broadcast(self, tensors: Sequence[torch.Tensor]) -> None:
        for bucket in _take_tensors(tensors, _BUCKET_BYTES):
            dist.broadcast(_flatten_dense_tensors(bucket), self.own, self.group)

    def reduce(self, tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
        for bucket in _take_tensors(tensors, _BUCKET_BYTES):
            flat = _flatten_dense_tensors(bucket)
            dist.reduce(flat, self.own, group=self.group)
            yield from _unflatten_dense_tensors(flat, bucket)


class _Copies(torch.autograd.Function):
    """Parameters of a replica."""

    @staticmethod
    def forward(ctx: Any, links: _Links, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.links = links
        links.broadcast(tensors)
        with links.recorder.paused():
            return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return None, *ctx.links.reduce(gradients)


class _Gathered(torch.autograd.Function):
    """Outputs of all replicas on the first GPU."""

    @staticmethod
    def forward(ctx: Any, links: _Links, dim: int, length: int, output: torch.Tensor) -> torch.Tensor:
        ctx.links, ctx.dim, ctx.part = links, dim, output.shape[dim]
        links.gather(output)
        return output.new_empty([*output.shape[:dim], length, *output.shape[dim + 1 :]])

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        part = gradient.narrow(ctx.dim, 0, ctx.part)
        ctx.links.scatter([part])
        return None, None, None, part
