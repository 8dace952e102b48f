"""Fused kernels of training stacks that replace several operators, on the meta device.

A capture records one call per launch. Bytes moved: :mod:`e2e.lowering.families.stack_operators`. Sources:
transformer_engine (swiglu, fused_rope, cross_entropy in Triton), Megatron-Core's fusions, flash-attn's cross entropy,
linkedin/Liger-Kernel (swiglu, rope, fused_linear_cross_entropy). Imports ``torch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

_LIBRARY = torch.library.Library("stack", "DEF")
_ALIKE = (
    "squared_relu(Tensor given) -> Tensor",
    "squared_relu_backward(Tensor gradient, Tensor given) -> Tensor",
    "rotary(Tensor given, Tensor cosines, Tensor sines) -> Tensor",
    "rotary_backward(Tensor gradient, Tensor cosines, Tensor sines) -> Tensor",
    "gated(Tensor gate, Tensor given) -> Tensor",
)
for _schema in _ALIKE:
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], lambda first, *others: torch.empty_like(first), "Meta")
_LIBRARY.define("gated_backward(Tensor gradient, Tensor gate, Tensor given) -> (Tensor, Tensor)")
_LIBRARY.impl("gated_backward", lambda gradient, gate, given: (torch.empty_like(gate), torch.empty_like(given)), "Meta")
_LIBRARY.define("packed_gated(Tensor both) -> Tensor")
_LIBRARY.impl("packed_gated", lambda both: both.new_empty((*both.shape[:-1], both.shape[-1] // 2)), "Meta")
_LIBRARY.define("packed_gated_backward(Tensor gradient, Tensor both) -> Tensor")
_LIBRARY.impl("packed_gated_backward", lambda gradient, both: torch.empty_like(both), "Meta")
_LIBRARY.define("cross_entropy(Tensor scores, Tensor labels) -> (Tensor, Tensor)")
_LIBRARY.impl(
    "cross_entropy",
    lambda scores, labels: tuple(scores.new_empty(scores.shape[:-1], dtype=torch.float32) for _ in range(2)),
    "Meta",
)
_LIBRARY.define("cross_entropy_backward_(Tensor(a!) scores, Tensor labels, Tensor sums, Tensor gradient) -> ()")
_LIBRARY.impl("cross_entropy_backward_", lambda scores, labels, sums, gradient: None, "Meta")
_ops = torch.ops.stack


class SquaredRelu(torch.autograd.Function):
    """Square of ``relu``, in one kernel each way."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(given)
        return _ops.squared_relu(given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _ops.squared_relu_backward(gradients[0], *ctx.saved_tensors)


class Rotary(torch.autograd.Function):
    """Rotary embedding of queries or of keys; only the tables are kept for the backward pass."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(cosines, sines)
        return _ops.rotary(given, cosines, sines)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _ops.rotary_backward(gradients[0], *ctx.saved_tensors), None, None


class Gated(torch.autograd.Function):
    """Gated activation ``activation(gate) * given``."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, given: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, given)
        return _ops.gated(gate, given)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return _ops.gated_backward(gradients[0], *ctx.saved_tensors)


class PackedGated(torch.autograd.Function):
    """Gated activation of the two halves of one product's output."""

    @staticmethod
    def forward(ctx: Any, both: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(both)
        return _ops.packed_gated(both)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        return _ops.packed_gated_backward(gradients[0], *ctx.saved_tensors)


class SplitColumns(torch.autograd.Function):
    """Parts of one product's output, whose gradients are written directly into the whole gradient
    (``SplitAlongDim``).
    """

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, *sizes: int) -> tuple[torch.Tensor, ...]:
        ctx.shape = whole.shape
        return tuple(whole.split(sizes, -1))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        return (gradients[0].new_empty(ctx.shape), *(None for _ in gradients))


class FusedCrossEntropy(torch.autograd.Function):
    """Losses (tokens,) of scores (tokens, words); their gradient overwrites the scores."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        losses, sums = _ops.cross_entropy(scores, labels)
        ctx.save_for_backward(scores, labels, sums)
        return losses

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scores, labels, sums = ctx.saved_tensors
        _ops.cross_entropy_backward_(scores, labels, sums, gradients[0])
        return scores, None


class WideCrossEntropy(torch.autograd.Function):
    """Losses (tokens,) by PyTorch's operators in place on one FP32 copy of the scores (tokens, words), which becomes
    their gradient (``_VocabParallelCrossEntropy`` of Megatron-Core's tensor_parallel/cross_entropy.py).
    """

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        wide = scores.float()
        wide.sub_(wide.amax(-1, keepdim=True))
        chosen = wide.gather(1, labels.unsqueeze(1)).squeeze(1)
        total = wide.exp_().sum(-1)
        ctx.save_for_backward(wide.div_(total.unsqueeze(1)), labels)
        ctx.dtype = scores.dtype
        return total.log() - chosen

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        wide, labels = ctx.saved_tensors
        wide.scatter_add_(1, labels.unsqueeze(1), wide.new_full((len(labels), 1), -1.0))
        return wide.mul_(gradients[0].unsqueeze(1)).to(ctx.dtype), None


class ChunkedCrossEntropy(torch.autograd.Function):
    """Head and loss together, a few tokens at a time, with the gradients computed in the forward pass
    (``LigerFusedLinearCrossEntropyFunction``): the scores of all tokens never exist at once.
    """

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, weight: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        of_states, of_weight = torch.empty_like(states), torch.zeros_like(weight)
        losses = states.new_empty(states.shape[0], dtype=torch.float32)
        for begin, end in chunks(states.shape[0], weight.shape[0], states.shape[1]):
            part = states[begin:end]
            scores = torch.mm(part, weight.t())
            _, sums = _ops.cross_entropy(scores, labels[begin:end])
            _ops.cross_entropy_backward_(scores, labels[begin:end], sums, sums)
            torch.mm(scores, weight, out=of_states[begin:end])
            torch.addmm(of_weight, scores.t(), part, out=of_weight)
        ctx.save_for_backward(of_states, of_weight)
        return losses.sum()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        of_states, of_weight = ctx.saved_tensors
        return of_states, of_weight, None


def chunks(tokens: int, words: int, width: int) -> Sequence[tuple[int, int]]:
    """Return (begin, end) of the chunks of tokens.

    The number of chunks is the ratio of vocabulary to width of the states, with a power of two of tokens each
    (``fused_linear_cross_entropy_forward`` of Liger-Kernel).
    """
    parts = -(-words // width)
    size = 1 << (-(-tokens // parts) - 1).bit_length()
    return [(begin, min(begin + size, tokens)) for begin in range(0, tokens, size)]
