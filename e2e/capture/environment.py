"""Patches that make PyTorch behave, during a capture, as if there were a GPU.

Every patch replaces a name in a Python module and is undone on exit: outer functions of PyTorch do not hide the
functions that they call; meta parameters count as CUDA parameters in the selection of foreach and fused optimizers;
``torch.cuda`` reports a device, with the properties given by the caller and no memory in use; ``torch.inference_mode``
leaves operators to autograd, which selects those that run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from importlib import import_module
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from costmodel.base.errors import ModelError
from e2e.step.options import SeenGpu

# An overridden function hides those that it calls: for ``backward`` that would be a recomputed forward pass.
OUTER_MODULES = (torch.nn.functional, torch._tensor, torch.functional, torch.autograd)
SWITCHES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@contextmanager
def pretend_gpu(synchronized: Callable[[], None], gpu: SeenGpu) -> Iterator[None]:
    """Context in which scripts find ``gpu``. ``synchronized`` is called when a script waits for it."""
    with ExitStack() as stack:
        if torch.is_inference_mode_enabled():  # the caller's mode
            stack.enter_context(torch.inference_mode(False))
        for module in OUTER_MODULES:
            for switch in SWITCHES:
                if hasattr(module, switch):
                    stack.enter_context(patch.object(module, switch, _nothing_overrides))
        for target, name, value in (*_optimizer_patches(), *_cuda_patches(synchronized, gpu), *_inference_patches()):
            stack.enter_context(patch.object(target, name, value))
        yield


def _nothing_overrides(*args: Any) -> bool:
    return False


class _WithoutGradients:
    """``torch.inference_mode`` in a capture: gradients are off and the script sees the mode as on.

    In PyTorch's own mode the operators below autograd are composite ones (``aten::linear``, ``aten::batch_norm``),
    since their kernels have not been selected yet; kernels are those of ``torch.no_grad``.
    """

    enabled: ContextVar[bool] = ContextVar("the script is in inference mode", default=False)

    def __init__(self, enabled: bool) -> None:
        self._inside = enabled

    def __enter__(self) -> None:
        self._before = self.enabled.get(), torch.is_grad_enabled()
        self._set(self._inside, not self._inside)

    def __exit__(self, *error: object) -> None:
        self._set(*self._before)

    def _set(self, inference: bool, gradients: bool) -> None:
        self.enabled.set(inference)
        torch._C._set_grad_enabled(gradients)


def _inference_patches() -> list[tuple[Any, str, Any]]:
    return [
        (torch._C, "_InferenceMode", _WithoutGradients),
        (torch, "is_inference_mode_enabled", _WithoutGradients.enabled.get),
        (torch.Tensor, "is_inference", lambda tensor: _WithoutGradients.enabled.get()),
    ]


def _optimizer_patches() -> list[tuple[Any, str, Any]]:
    """Return the patches that allow foreach and fused forms for meta parameters, as for CUDA ones, where foreach is
    PyTorch's default.
    """
    base = import_module("torch.optim.optimizer")  # torch.optim hides its submodules
    patches: list[tuple[Any, str, Any]] = [
        (base, "_get_foreach_kernels_supported_devices", lambda: ["meta", "cuda"]),
        (base, "_get_fused_kernels_supported_devices", lambda: ["meta", "cuda"]),
    ]
    shared = import_module("torch.utils._foreach_utils")
    patches.append((shared, "_get_foreach_kernels_supported_devices", lambda: ["meta", "cuda"]))
    for name in ("adam", "sgd", "adagrad"):
        module = import_module(f"torch.optim.{name}")
        patches.append((module, "_device_dtype_check_for_fused", lambda param, cuda_unsupported=False: None))
    for name in [each for each in sys.modules if each.startswith("torch.optim.")]:
        if hasattr(sys.modules[name], _CAPTURABLE):
            patches.append((sys.modules[name], _CAPTURABLE, lambda supports_xla=True: ["meta", "cuda"]))
    return patches


# Name of the supported-device query of optimizers whose steps can be in a CUDA graph (``capturable=True``).
_CAPTURABLE = "_get_capturable_supported_devices"


def _properties(gpu: SeenGpu) -> SimpleNamespace:
    """Return the properties as ``torch.cuda.get_device_properties`` does."""
    major, minor = gpu.capability
    return SimpleNamespace(
        name=gpu.name,
        major=major,
        minor=minor,
        total_memory=gpu.memory_bytes,
        multi_processor_count=gpu.multiprocessors,
        warp_size=32,
        max_threads_per_multi_processor=2048,
        shared_memory_per_block=48 << 10,
        shared_memory_per_multiprocessor=164 << 10,
        L2_cache_size=gpu.l2_bytes,
        is_integrated=False,
        is_multi_gpu_board=False,
    )


def _cuda_patches(synchronized: Callable[[], None], gpu: SeenGpu) -> list[tuple[Any, str, Any]]:
    return [
        *_checkpoint_patches(),
        # The meta device means autocast of the GPU.
        (torch, "get_autocast_dtype", _of_gpu(torch.get_autocast_dtype)),
        (torch, "is_autocast_enabled", _of_gpu(torch.is_autocast_enabled)),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
        (torch.cuda, "synchronize", lambda device=None: synchronized()),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (torch.cuda, "device", lambda device: nullcontext()),
        (torch.cuda, "get_device_properties", lambda device=None: _properties(gpu)),
        (torch.cuda, "get_device_name", lambda device=None: gpu.name),
        (torch.cuda, "get_device_capability", lambda device=None: gpu.capability),
        (torch.cuda, "mem_get_info", lambda device=None: (gpu.memory_bytes, gpu.memory_bytes)),
        (torch.cuda, "reset_peak_memory_stats", lambda device=None: None),
        *((torch.cuda, name, lambda device=None: 0) for name in _MEMORY_IN_USE),
        *(
            (torch.cuda, name, lambda *args, **kwargs: None)
            for name in ("manual_seed", "manual_seed_all", "seed", "seed_all")
        ),
        *((torch.cuda.nvtx, name, lambda *args, **kwargs: 0) for name in _MARKS),
        # Classes stay classes, since libraries use them in annotations (``CUDAGraph | None``) and in ``isinstance``.
        *((torch.cuda, name, _RefusedGraph) for name in ("CUDAGraph", "graph")),
        (torch.cuda, "make_graphed_callables", _refuse_graphs),
        (torch.nn.DataParallel, "__init__", _refuse_data_parallel),
        # Called only by recurrent layers, which would otherwise flatten their weights once.
        (torch.backends.cudnn, "is_acceptable", lambda tensor: False),
        # There is no memory to pin, and the source of data does not matter.
        (torch.Tensor, "pin_memory", lambda self, device=None: self),
        (torch.Tensor, "__format__", _formatted),
        (torch.utils.data.RandomSampler, "__iter__", lambda self: iter(range(self.num_samples))),
        # Device numbers, as in `model.to(rank)`, mean GPUs.
        (torch._C._nn, "_parse_to", _parse_to(torch._C._nn._parse_to)),
    ]


def _checkpoint_patches() -> list[tuple[Any, str, Any]]:
    """Return the patches of checkpoints.

    A recomputed forward pass restores the autocast state of this device type; its saved tensors are compared with those
    of the first pass by device, which is read inside operators and outside.
    """
    checkpoint = import_module("torch.utils.checkpoint")
    extract = checkpoint._default_meta_extractor

    def described(tensor: torch.Tensor) -> dict[str, Any]:
        with torch._C.DisableTorchFunction():
            return extract(tensor)  # type: ignore[no-any-return]

    checks = {**checkpoint._allowed_determinism_checks_to_fns, checkpoint._DEFAULT_DETERMINISM_MODE: described}
    return [
        (checkpoint, "_infer_device_type", lambda *args: "cuda"),
        (checkpoint, "_allowed_determinism_checks_to_fns", checks),
    ]


def _formatted(tensor: torch.Tensor, form: str) -> str:
    """Format a number on the GPU, as in ``f"{loss:.3f}"``, by reading it as ``loss.item()`` does."""
    single = tensor.dim() == 0 and type(tensor) in (torch.Tensor, torch.nn.Parameter)
    return format(tensor.item(), form) if single else object.__format__(tensor, form)


def _of_gpu(ask: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *device: ask(*("cuda" if each == "meta" else each for each in device))


_MEMORY_IN_USE = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
_MARKS = ("range_push", "range_pop", "range_start", "range_end", "mark")


def _refuse_graphs(*args: Any, **kwargs: Any) -> Any:
    raise ModelError("CUDA graphs of a script are not captured; let its step run as it is and give --cuda-graph")


class _RefusedGraph:
    """Replacement of ``torch.cuda.CUDAGraph`` and ``torch.cuda.graph``: may be named, not created."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        _refuse_graphs()


def _refuse_data_parallel(self: Any, *args: Any, **kwargs: Any) -> None:
    raise ModelError("nn.DataParallel is not captured; use DistributedDataParallel and give --gpus")


def is_device_number(value: Any) -> bool:
    """True if ``value`` is the number of a GPU."""
    return isinstance(value, int) and not isinstance(value, bool)


def _parse_to(parse: Callable[..., Any]) -> Callable[..., Any]:
    def with_number(*args: Any, **kwargs: Any) -> Any:
        if args and is_device_number(args[0]):
            args = (torch.device("cuda", args[0]), *args[1:])
        if is_device_number(kwargs.get("device")):
            kwargs = {**kwargs, "device": torch.device("cuda", kwargs["device"])}
        return parse(*args, **kwargs)

    return with_number
