"""Fused kernels of Megatron-LM and Apex as operators on the meta device. Imports ``torch``.

Each represents one launch of a CUDA or TorchScript-fused kernel; :mod:`e2e.lowering.families.megatron_operators` gives
the bytes it moves. Sources: megatron/fused_kernels (scaled_upper_triang_masked_softmax),
megatron/model/fused_bias_gelu.py, ``bias_dropout_add_fused_train`` of megatron/model/transformer.py,
csrc/multi_tensor_adam.cu of Apex.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_LIBRARY = torch.library.Library("megatron", "DEF")
_LIBRARY.define("masked_softmax(Tensor scores) -> Tensor")
_LIBRARY.define("masked_softmax_backward(Tensor gradient, Tensor output) -> Tensor")
_LIBRARY.define("bias_gelu(Tensor given, Tensor bias) -> Tensor")
_LIBRARY.define("bias_gelu_backward(Tensor gradient, Tensor given, Tensor bias) -> Tensor")
_LIBRARY.define("bias_dropout_add(Tensor given, Tensor bias, Tensor residual) -> (Tensor, Tensor)")
_LIBRARY.define("bias_dropout_add_backward(Tensor gradient, Tensor mask) -> Tensor")
_LIBRARY.define("fused_adam(Tensor[] gradients, Tensor[] parameters, Tensor[] first, Tensor[] second) -> ()")
_LIBRARY.impl("fused_adam", lambda gradients, parameters, first, second: None, "Meta")
for _name in ("masked_softmax", "masked_softmax_backward", "bias_gelu", "bias_gelu_backward"):
    _LIBRARY.impl(_name, lambda first, *others: torch.empty_like(first), "Meta")
_LIBRARY.impl("bias_dropout_add_backward", lambda gradient, mask: torch.empty_like(gradient), "Meta")
_LIBRARY.impl(
    "bias_dropout_add", lambda given, bias, residual: (torch.empty_like(given), torch.empty_like(given)), "Meta"
)
_ops = torch.ops.megatron


class MaskedSoftmax(torch.autograd.Function):
    """Scale, causal mask and softmax of scores (batch x heads, queries, keys) in one kernel."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        output = _ops.masked_softmax(scores)
        ctx.save_for_backward(output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _ops.masked_softmax_backward(gradients[0], *ctx.saved_tensors)


class BiasGelu(torch.autograd.Function):
    """GELU of the sum of activations and bias; the gradient of the bias is a sum over the rows."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given, bias)
        return _ops.bias_gelu(given, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        gradient = _ops.bias_gelu_backward(gradients[0], *ctx.saved_tensors)
        return gradient, gradient.sum((0, 1))


class BiasDropoutAdd(torch.autograd.Function):
    """``residual + dropout(given + bias)``; the mask is kept."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        output, mask = _ops.bias_dropout_add(given, bias, residual)
        ctx.save_for_backward(mask)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        gradient = _ops.bias_dropout_add_backward(gradients[0], *ctx.saved_tensors)
        return gradient, gradient.sum((0, 1)), gradients[0]


def fused_adam(parameters: list[torch.nn.Parameter]) -> Callable[[], None]:
    """Return a step of Apex's ``FusedAdam`` over 16-bit parameters with FP32 moments and no master weights."""
    moments = [[torch.empty_like(each, dtype=torch.float32) for each in parameters] for _ in range(2)]
    values = [each.detach() for each in parameters]
    gradients = [each.grad for each in parameters]
    return lambda: _ops.fused_adam(gradients, values, *moments)
