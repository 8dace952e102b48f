"""Root-mean-square norm as on CUDA: one kernel forward, one operator backward (PyTorch 2.9 and later).

Without a GPU ``aten::_fused_rms_norm`` has no derivative of its own and is decomposed into ten operators.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from e2e.capture.recorder import Recorder


def is_fused(data: Any, weight: Any) -> bool:
    """True under the conditions of ``rms_norm`` in layer_norm.cpp: real numbers, and a weight of the same type."""
    plain = type(data) is torch.Tensor and data.device.type == "meta" and not data.is_complex()
    return plain and (weight is None or (type(weight) in PLAIN and weight.dtype is data.dtype))


PLAIN = (torch.Tensor, torch.nn.Parameter)


class FusedRmsNorm(torch.autograd.Function):
    """Fused norm recorded as ``aten::_fused_rms_norm`` and ``aten::_fused_rms_norm_backward``."""

    @staticmethod
    def forward(
        ctx: Any, data: torch.Tensor, weight: torch.Tensor | None, shape: Sequence[int], eps: Any, recorder: Recorder
    ) -> torch.Tensor:
        rows = data.numel() // max(prod(shape), 1)
        with recorder.paused():
            result, factors = torch.empty_like(data), data.new_empty(rows, dtype=torch.float32)
        recorder.record_call("aten::_fused_rms_norm", (data, tuple(shape), weight, eps), (result, factors), {})
        ctx.save_for_backward(data, factors, *(() if weight is None else (weight,)))
        ctx.shape, ctx.recorder = tuple(shape), recorder
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        data, factors, *weights = ctx.saved_tensors
        weight = weights[0] if weights else None
        with ctx.recorder.paused():
            found = [torch.empty_like(tensor) for tensor in (data, *weights)]
        needed = tuple(ctx.needs_input_grad[:2])
        inputs = (gradient, data, ctx.shape, factors, weight, needed)
        ctx.recorder.record_call("aten::_fused_rms_norm_backward", inputs, tuple(found), {})
        return found[0], found[1] if weights else None, None, None, None


def rms_norm(
    recorder: Recorder,
    func: Any,
    input: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    """Compute ``torch.rms_norm`` as selected on CUDA."""
    if not is_fused(input, weight):
        return func(input, normalized_shape, weight, eps)
    return FusedRmsNorm.apply(input, weight, normalized_shape, eps, recorder)
