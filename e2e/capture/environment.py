"""Makes PyTorch behave, for the time of a capture, as if there were a GPU.

Every change is to a name in a Python module and is undone on leaving. They are: outer functions of PyTorch let the
functions that they call be seen; meta parameters count as CUDA parameters for the choice of foreach and fused
optimizers; ``torch.cuda`` says that there is a device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any
from unittest.mock import patch

import torch

# A function that is itself seen hides those that it calls: for ``backward`` that would be a recomputed forward pass.
OUTER_MODULES = (torch.nn.functional, torch._tensor, torch.functional, torch.autograd)
SWITCHES = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@contextmanager
def pretend_gpu(synchronized: Callable[[], None]) -> Iterator[None]:
    """Inside, scripts find a GPU. ``synchronized`` is called when a script waits for it."""
    with ExitStack() as stack:
        for module in OUTER_MODULES:
            for switch in SWITCHES:
                if hasattr(module, switch):
                    stack.enter_context(patch.object(module, switch, _nothing_overrides))
        for target, name, value in (*_optimizer_patches(), *_cuda_patches(synchronized)):
            stack.enter_context(patch.object(target, name, value))
        yield


def _nothing_overrides(*args: Any) -> bool:
    return False


def _optimizer_patches() -> list[tuple[Any, str, Any]]:
    """Meta parameters may take the foreach and fused forms, as CUDA ones; foreach is PyTorch's own default there."""
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
    return patches


def _cuda_patches(synchronized: Callable[[], None]) -> list[tuple[Any, str, Any]]:
    return [
        # A recomputed forward pass restores the autocast state of this device type.
        (import_module("torch.utils.checkpoint"), "_infer_device_type", lambda *args: "cuda"),
        (torch.cuda, "is_available", lambda: True),
        (torch.cuda, "device_count", lambda: 1),
        (torch.cuda, "current_device", lambda: 0),
        (torch.cuda, "is_bf16_supported", lambda including_emulation=True: True),
        (torch.cuda, "synchronize", lambda device=None: synchronized()),
        (torch.cuda, "empty_cache", lambda: None),
        (torch.cuda, "set_device", lambda device: None),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
    ]
