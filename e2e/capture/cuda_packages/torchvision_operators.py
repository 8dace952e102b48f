"""Pooling of regions by torchvision, whose library is built for CUDA and does not load here: its operators by name and
shape. Without them ``roi_align`` would run as torchvision's sum over a tensor of all points, which no GPU makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

# Operator -> whether the channels are those of one bin, and the number of other outputs that its gradient reads.
_POOLING = {"roi_align": (False, 0), "roi_pool": (False, 1), "ps_roi_align": (True, 1), "ps_roi_pool": (True, 1)}
_SAMPLED = {"roi_align": ", int sampling_ratio, bool aligned", "ps_roi_align": ", int sampling_ratio"}


def define_operators(library: torch.library.Library) -> None:
    """Define torchvision's operators in ``library``, of its namespace, with their shapes and gradients."""
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    for name, (by_bin, others) in _POOLING.items():
        results = "Tensor" if not others else "(Tensor, Tensor)"
        bins = "float spatial_scale, int pooled_height, int pooled_width"
        library.define(f"{name}(Tensor input, Tensor rois, {bins}{_SAMPLED.get(name, '')}) -> {results}")
        library.define(f"_{name}_backward(Tensor grad, Tensor rois, Tensor[] others, int[] shape) -> Tensor")
        library.impl(name, _pooled(by_bin, others), "Meta")
        library.impl(f"_{name}_backward", lambda grad, rois, others, shape: grad.new_empty(shape), "Meta")
        torch.library.register_autograd(f"torchvision::{name}", _gradient(name), setup_context=_keep, lib=library)


def _pooled(by_bin: bool, others: int) -> Callable[..., Any]:
    def pool(data: torch.Tensor, rois: torch.Tensor, scale: float, height: int, width: int, *sampled: Any) -> Any:
        channels = data.shape[1] // (height * width) if by_bin else data.shape[1]
        output = data.new_empty((rois.shape[0], channels, height, width))
        return (output, torch.empty_like(output, dtype=torch.int32)) if others else output

    return pool


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.shape = inputs[0].shape
    ctx.save_for_backward(inputs[1], *(output[1:] if isinstance(output, tuple) else ()))
    ctx.others = len(inputs) - 1


def _gradient(name: str) -> Callable[..., Any]:
    def gradient(ctx: Any, gradient: torch.Tensor, *unused: Any) -> Any:
        rois, *others = ctx.saved_tensors
        backward = getattr(torch.ops.torchvision, f"_{name}_backward")
        return backward(gradient, rois, others, ctx.shape), *[None] * ctx.others

    return gradient


def patches(module: Any) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patch by which the module ``torchvision.ops.roi_align`` calls the operator for tensors on the GPU."""
    without_library = getattr(module, "_roi_align", None)
    if without_library is None:
        return

    def roi_align(data: torch.Tensor, *args: Any) -> Any:
        pooled = torch.ops.torchvision.roi_align if data.is_cuda else without_library
        return pooled(data, *args)

    yield module, "_roi_align", roi_align
