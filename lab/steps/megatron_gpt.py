"""GPT as built by Megatron-LM: sequence-first, fused kernels, tensor-parallel layers of one rank. Imports ``torch``.

The split over ranks follows Shoeybi et al. (arXiv 1909.08053): heads, the inner width of the MLP and the vocabulary are
split over ``tp`` ranks. Only shapes matter; nothing is initialised.

Fused kernels of Megatron-LM and Apex are operators on the meta device. Each represents one launch of a CUDA or
TorchScript-fused kernel; :mod:`e2e.lowering.families.library_kernels` gives the bytes it moves. Sources:
megatron/fused_kernels (scaled_upper_triang_masked_softmax), megatron/model/fused_bias_gelu.py,
``bias_dropout_add_fused_train`` of megatron/model/transformer.py, csrc/multi_tensor_adam.cu of Apex.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from costmodel.base.errors import InputError
from e2e.parallelism.communication import CopyToRanks, ReduceFromRanks

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


# --make-vocab-size-divisible-by of Megatron-LM: the vocabulary is padded to a multiple of this times tp.
VOCABULARY_MULTIPLE = 128


@dataclass(frozen=True)
class GptConfig:
    """Sizes of a GPT model.

    If ``padded``, the vocabulary is padded to divide evenly, and head and loss are Megatron-LM's; otherwise each rank
    has ``vocabulary // tp`` rows in a separate head, and the loss is ``torch.nn.CrossEntropyLoss`` over the second
    dimension, as in vTrain's profiled model (src/model/gpt_model.py).
    """

    layers: int
    hidden: int
    heads: int
    sequence_length: int
    vocabulary: int = 50257
    padded: bool = True

    def rows(self, tp: int) -> int:
        """Return the rows of the vocabulary on one rank."""
        multiple = VOCABULARY_MULTIPLE * tp
        return (-(-self.vocabulary // multiple) * multiple if self.padded else self.vocabulary) // tp

    def check(self, tp: int) -> None:
        """Raise ``InputError`` if the heads do not divide evenly."""
        if self.heads % tp or self.hidden % self.heads:
            raise InputError(
                f"hidden size {self.hidden}, {self.heads} heads: cannot be split over tp={tp}; "
                "choose a tp that divides both"
            )


class ParallelLinear(nn.Module):
    """Weights of a product whose bias is added elsewhere (``skip_bias_add``)."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs))
        self.bias = nn.Parameter(torch.empty(outputs))


class MegatronAttention(nn.Module):
    """Attention with heads / tp heads; column-parallel query-key-value, row-parallel output."""

    def __init__(self, config: GptConfig, tp: int) -> None:
        super().__init__()
        self.heads, self.head_dim, self.tp = config.heads // tp, config.hidden // config.heads, tp
        self.query_key_value = nn.Linear(config.hidden, 3 * config.hidden // tp)
        self.dense = ParallelLinear(config.hidden // tp, config.hidden)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        length, batch, _ = states.shape
        if self.tp > 1:
            states = CopyToRanks.apply(states)
        mixed = self.query_key_value(states).view(length, batch, self.heads, 3 * self.head_dim)
        query, key, value = (each.view(length, batch * self.heads, -1) for each in mixed.split(self.head_dim, -1))
        scores = torch.empty(batch * self.heads, length, length, dtype=query.dtype, device=query.device)
        scores = torch.baddbmm(scores, query.transpose(0, 1), key.transpose(0, 1).transpose(1, 2), beta=0.0)
        weights = nn.functional.dropout(MaskedSoftmax.apply(scores), 0.1)
        context = torch.bmm(weights, value.transpose(0, 1))
        context = context.view(batch, self.heads, length, -1).permute(2, 0, 1, 3).contiguous()
        output = nn.functional.linear(context.view(length, batch, -1), self.dense.weight)
        return ReduceFromRanks.apply(output) if self.tp > 1 else output


class Mlp(nn.Module):
    """MLP: column-parallel to four times the width, row-parallel back."""

    def __init__(self, config: GptConfig, tp: int) -> None:
        super().__init__()
        self.tp = tp
        self.dense_h_to_4h = ParallelLinear(config.hidden, 4 * config.hidden // tp)
        self.dense_4h_to_h = ParallelLinear(4 * config.hidden // tp, config.hidden)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        if self.tp > 1:
            states = CopyToRanks.apply(states)
        inner = nn.functional.linear(states, self.dense_h_to_4h.weight)
        inner = BiasGelu.apply(inner, self.dense_h_to_4h.bias)
        output = nn.functional.linear(inner, self.dense_4h_to_h.weight)
        return ReduceFromRanks.apply(output) if self.tp > 1 else output


class MegatronLayer(nn.Module):
    """Attention and MLP, each after a layer norm, with fused residual connections."""

    def __init__(self, config: GptConfig, tp: int) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(config.hidden)
        self.attention = MegatronAttention(config, tp)
        self.post_attention_layernorm = nn.LayerNorm(config.hidden)
        self.mlp = Mlp(config, tp)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        states = BiasDropoutAdd.apply(self.attention(self.input_layernorm(states)), self.attention.dense.bias, states)
        return BiasDropoutAdd.apply(
            self.mlp(self.post_attention_layernorm(states)), self.mlp.dense_4h_to_h.bias, states
        )


class MegatronEmbedding(nn.Module):
    """Embedding of tokens of this rank's part of the vocabulary, positions, dropout."""

    def __init__(self, config: GptConfig, tp: int) -> None:
        super().__init__()
        self.tp = tp
        self.word_embeddings = nn.Embedding(config.rows(tp), config.hidden)
        self.position_embeddings = nn.Embedding(config.sequence_length, config.hidden)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        if self.tp > 1:
            outside = (tokens < 0) | (tokens >= self.word_embeddings.num_embeddings)
            masked = tokens.clone() - 0
            masked[outside] = 0
            words = self.word_embeddings(masked)
            words = ReduceFromRanks.apply(words)
        else:
            words = self.word_embeddings(tokens)
        states = nn.functional.dropout(words + self.position_embeddings(positions), 0.1)
        return states.transpose(0, 1).contiguous()


class Gpt(nn.Module):
    """Whole model of one tensor-parallel rank; ``forward`` returns the loss."""

    def __init__(self, config: GptConfig, tp: int) -> None:
        super().__init__()
        config.check(tp)
        self.tp, self.padded = tp, config.padded
        self.embedding = MegatronEmbedding(config, tp)
        self.layers = nn.ModuleList(MegatronLayer(config, tp) for _ in range(config.layers))
        self.final_layernorm = nn.LayerNorm(config.hidden)
        self.head = self.embedding.word_embeddings.weight
        if not config.padded:
            self.head = nn.Parameter(torch.empty(config.rows(tp), config.hidden))

    @property
    def tied_weight(self) -> torch.Tensor | None:
        """Word embedding if the head shares it, or None."""
        return self.head if self.padded else None

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        states = self.embedding(tokens, positions)
        for layer in self.layers:
            states = layer(states)
        states = self.final_layernorm(states.transpose(0, 1).contiguous())
        if not self.padded:
            scores = nn.functional.linear(states, self.head)
            return nn.functional.cross_entropy(scores, labels)
        if self.tp > 1:
            states = CopyToRanks.apply(states)
        scores = nn.functional.linear(states, self.head)
        return ParallelCrossEntropy.apply(scores.float(), labels, self.tp).mean()


class ParallelCrossEntropy(torch.autograd.Function):
    """``_VocabParallelCrossEntropy`` of megatron/mpu/cross_entropy.py, operator by operator, in FP32."""

    @staticmethod
    def forward(ctx, scores: torch.Tensor, labels: torch.Tensor, tp: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
        over_ranks = torch.ops.parallel.all_reduce if tp > 1 else (lambda given: given)
        scores = scores - over_ranks(torch.max(scores, -1)[0]).unsqueeze(-1)
        outside = (labels < 0) | (labels >= scores.shape[-1])
        masked = labels.clone() - 0
        masked[outside] = 0
        rows = torch.arange(labels.numel(), device=scores.device)
        chosen = scores.view(-1, scores.shape[-1])[rows, masked.view(-1)].clone().view_as(labels)
        chosen[outside] = 0.0
        chosen = over_ranks(chosen)
        exponentials = torch.exp(scores)
        total = over_ranks(exponentials.sum(-1))
        loss = torch.log(total) - chosen
        exponentials.div_(total.unsqueeze(-1))
        ctx.save_for_backward(exponentials, outside, masked)
        return loss

    @staticmethod
    def backward(ctx, *gradients: torch.Tensor):  # type: ignore[no-untyped-def]
        softmax, outside, masked = ctx.saved_tensors
        rows = torch.arange(masked.numel(), device=softmax.device)
        flat = softmax.view(-1, softmax.shape[-1])
        flat[rows, masked.view(-1)] -= 1.0 - outside.view(-1).float()
        softmax.mul_(gradients[0].unsqueeze(-1))
        return softmax, None, None


def inputs(config: GptConfig, batch: int, tp: int = 1) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return tokens, positions and labels on the meta device: (batch, sequence), labels of the plain loss (batch, rows
    of the vocabulary).
    """
    with torch.device("meta"):
        shape = (batch, config.sequence_length)
        tokens, positions = (torch.zeros(shape, dtype=torch.int64) for _ in range(2))
        labels = torch.zeros(shape if config.padded else (batch, config.rows(tp)), dtype=torch.int64)
    return tokens, positions, labels
