"""The extension of mmcv, which is built for CUDA: its losses, its pooling of regions and its deformable attention are
kernels that pass over their tensors once, its ``nms`` is torchvision's; its other functions are refused by name when
they are called with tensors on the GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import torch

from costmodel.base.errors import ModelError
from e2e.capture.cuda_packages.kernels import OPERATORS

# Functions that write the last of their tensors from the others.
_ONE_PASS = tuple(
    f"{kind}_{side}"
    for kind in ("sigmoid_focal_loss", "softmax_focal_loss", "roi_align", "roi_pool", "ms_deform_attn")
    for side in ("forward", "backward")
)


def _attended(value: torch.Tensor, *others: Any, **options: Any) -> torch.Tensor:
    """Return the output of deformable attention to ``value`` of (batch, places, heads, width)."""
    tensors = [each for each in (*others, *options.values()) if isinstance(each, torch.Tensor)]
    output = value.new_empty((value.shape[0], tensors[-1].shape[1], value.shape[2] * value.shape[3]))
    return OPERATORS.one_pass("mmcv::ms_deform_attn_forward", [value, *tensors], [output])[0]


def _suppressed(boxes: torch.Tensor, scores: torch.Tensor, iou_threshold: float, offset: int = 0) -> torch.Tensor:
    return torch.ops.torchvision.nms(boxes, scores, iou_threshold)


# Functions that return their result.
_RETURNING: dict[str, Callable[..., Any]] = {"ms_deform_attn_forward": _attended, "nms": _suppressed}


class Extension:
    """Functions of the extension; ``built``: the one that is installed, which runs on the host, or None."""

    def __init__(self, built: Any) -> None:
        self.built = built

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            *read, written = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
            if self.built is not None and written.device.type == "cpu":
                return getattr(self.built, name)(*args, **kwargs)
            if name in _RETURNING:
                return _RETURNING[name](*args, **kwargs)
            if name not in _ONE_PASS:
                raise ModelError(f"mmcv.ops: {name} is not stood in for: its kernels are not known here; leave it out")
            OPERATORS.one_pass(f"mmcv::{name}", read, [written])
            return None

        return run


def patches(module: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patch by which mmcv finds its extension."""

    def load_ext(name: str, functions: Any) -> Extension:
        try:
            return Extension(import_module("mmcv._ext"))  # the only one that mmcv asks for
        except ImportError:
            return Extension(None)

    yield module, "load_ext", load_ext
