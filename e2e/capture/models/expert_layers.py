"""Mixtures of experts as in training frameworks: fused permutation, grouped products. Imports ``torch``.

Megatron-LM, torchtitan and vLLM sort the rows of tokens by expert in one kernel (``permute``), multiply all experts in
one launch, apply weights and gate in one kernel, and sum the outputs of a token in one (``unpermute``); the backward
passes of the first and the last are each other. Here these are operators without effect, with the shapes and autograd
structure of the kernels (megatron/core/fusions/fused_weighted_swiglu.py, transformer_engine/pytorch/permutation.py);
:mod:`e2e.lowering.families.library_kernels` gives the bytes they move. The layers are those of Hugging Face's library:
their own loop with gathers and ``index_put`` is the form ``huggingface``.

Transformer Engine's ``GroupedLinear`` launches a cuBLAS product for every expert (``by_expert``; up to version 2.14
except for Blackwell's fused forms: ``te_general_grouped_gemm`` loops over streams, and casts that need a scale of the
current tensor over experts, ``multi_tensor_quantize_impl`` of its cast.cpp). The number of rows of each expert must
then be known on the host, and also wherever rows are exchanged: the host waits for the counts (:data:`COUNTS`), unless
experts have a capacity that all are padded to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

_LIBRARY = torch.library.Library("moe", "DEF")
_LIBRARY.define("row_map(Tensor selected, int experts) -> Tensor")
_LIBRARY.define("permute(Tensor states, Tensor rows) -> Tensor")
_LIBRARY.define("unpermute(Tensor states, Tensor rows, int tokens) -> Tensor")
_LIBRARY.define("gate(Tensor given, Tensor weights) -> Tensor")
_LIBRARY.define("gate_backward(Tensor gradient, Tensor given, Tensor weights) -> (Tensor, Tensor)")
_LIBRARY.define("activation(Tensor given, Tensor weights) -> Tensor")
_LIBRARY.define("activation_backward(Tensor gradient, Tensor given, Tensor weights) -> (Tensor, Tensor)")
_LIBRARY.define("counts_to_host(Tensor selected, int experts) -> ()")
_LIBRARY.define("each_mm(Tensor first, Tensor second, Tensor ends) -> Tensor")
_LIBRARY.define("each_gradient(Tensor first, Tensor second, Tensor ends) -> Tensor")


def _row_map(selected: torch.Tensor, experts: int) -> torch.Tensor:
    return selected.new_empty((selected.numel(),), dtype=torch.int32)


def _permute(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return states.new_empty((rows.shape[0], states.shape[1]))


def _unpermute(states: torch.Tensor, rows: torch.Tensor, tokens: int) -> torch.Tensor:
    return states.new_empty((tokens, states.shape[1]))


def _gate(given: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return given.new_empty((given.shape[0], given.shape[1] // 2))


def _gate_backward(
    gradient: torch.Tensor, given: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(given), torch.empty_like(weights)


_LIBRARY.impl("row_map", _row_map, "Meta")
_LIBRARY.impl("permute", _permute, "Meta")
_LIBRARY.impl("unpermute", _unpermute, "Meta")
_LIBRARY.impl("gate", _gate, "Meta")
_LIBRARY.impl("gate_backward", _gate_backward, "Meta")
_LIBRARY.impl("activation", lambda given, weights: torch.empty_like(given), "Meta")
_LIBRARY.impl("activation_backward", _gate_backward, "Meta")
_LIBRARY.impl("counts_to_host", lambda selected, experts: None, "Meta")
_LIBRARY.impl("each_mm", lambda first, second, ends: first.new_empty((first.shape[0], second.shape[2])), "Meta")
_LIBRARY.impl(
    "each_gradient",
    lambda first, second, ends: first.new_empty((ends.shape[0], first.shape[1], second.shape[1])),
    "Meta",
)
_ops = torch.ops.moe
COUNTS = "moe::counts_to_host"
_BIASED = "adds_biases"  # attribute of a layer of experts
Products = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class Permute(torch.autograd.Function):
    """Rows of tokens (tokens, width) selected by ``rows``, sorted by expert; gradients are summed per token."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows)
        ctx.tokens = states.shape[0]
        return _ops.permute(states, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _ops.unpermute(gradients[0], *ctx.saved_tensors, ctx.tokens), None


class Unpermute(torch.autograd.Function):
    """Sum of the outputs of rows per token, for ``tokens`` tokens."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor, rows: torch.Tensor, tokens: int) -> torch.Tensor:
        ctx.save_for_backward(rows)
        return _ops.unpermute(states, rows, tokens)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _ops.permute(gradients[0], *ctx.saved_tensors), None, None


class _WeightedGate(torch.autograd.Function):
    """Activation, product with the other half (if gated) and with the row's routing weight, in one kernel."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weights: torch.Tensor, gated: bool) -> torch.Tensor:
        ctx.save_for_backward(given, weights)
        ctx.gated = gated
        return (_ops.gate if gated else _ops.activation)(given, weights)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        backward = _ops.gate_backward if ctx.gated else _ops.activation_backward
        return (*backward(gradients[0], *ctx.saved_tensors), None)


def grouped_products(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply rows (all, k) sorted by expert by the matrices (experts, k, n), in one launch."""
    if rows.dtype is torch.float32:  # PyTorch has the kernel for 16 bits only
        return torch.nn.functional.grouped_mm(rows, matrices, offs=ends)
    product: torch.Tensor = torch._grouped_mm(rows, matrices, offs=ends)
    return product


class _ByExpert(torch.autograd.Function):
    """Products of rows (all, k) sorted by expert with (experts, k, n): one launch per expert forward and two
    backward.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(rows, matrices, ends)
        return _ops.each_mm(rows, matrices, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None]:
        rows, matrices, ends = ctx.saved_tensors
        of_rows = _ops.each_mm(gradients[0], matrices.transpose(1, 2), ends)
        return of_rows, _ops.each_gradient(rows, gradients[0], ends), None


def products_by_expert(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Multiply as :func:`grouped_products`, with one launch per expert."""
    product: torch.Tensor = _ByExpert.apply(rows, matrices, ends)
    return product


def use_grouped_experts(model: torch.nn.Module, products: Products = grouped_products, waits: bool = False) -> int:
    """Set the grouped form in every layer of experts of ``model`` with stacked weights; return their number.

    ``products``: function of the products, such as one in 8 bits. ``waits``: it needs the counts of rows on the host.
    """
    found = list(stacked_experts(model))
    for experts in found:
        experts.forward = _grouped(experts, products, waits)
        setattr(experts, _BIASED, waits and hasattr(experts, "down_proj_bias"))
    return len(found)


def stacked_experts(model: torch.nn.Module) -> Iterator[Any]:
    """Yield the modules of ``model`` with the weights of all experts of a layer in one tensor (experts, out, in)."""
    for module in model.modules():
        if hasattr(module, "down_proj") and hasattr(module, "is_transposed") and hasattr(module, "has_gate"):
            yield module


def _grouped(experts: Any, products: Products, waits: bool) -> Callable[..., torch.Tensor]:
    def forward(states: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens = states.shape[0]
        rows = _ops.row_map(selected, experts.num_experts)
        if waits:
            _ops.counts_to_host(selected, experts.num_experts)
        given = Permute.apply(states, rows)
        factors = Permute.apply(weights.reshape(-1, 1), rows) if selected.shape[-1] > 1 else weights
        computed = apply_experts(experts, given, factors, products, pads(products))
        return Unpermute.apply(computed, rows, tokens)

    forward.products = products  # type: ignore[attr-defined]
    return forward


def pads(products: Products) -> bool:
    """True if each expert's rows are first copied into memory padded to a multiple of 16 (``Fp8Padding``), and back."""
    return bool(getattr(products, "pads", False))


def apply_experts(
    experts: Any,
    rows: torch.Tensor,
    weights: torch.Tensor,
    products: Products = grouped_products,
    padded: bool = False,
) -> torch.Tensor:
    """Compute both products of ``experts`` on ``rows`` sorted by expert, weighted by ``weights`` (rows, 1).

    ``padded``: rows are copied before and after; the padding itself, less than 16 rows per expert, is neglected.
    """
    if padded:
        order = rows.new_empty((rows.shape[0],), dtype=torch.int32)
        computed = apply_experts(experts, Permute.apply(rows, order), weights, products)
        return Unpermute.apply(computed, order, rows.shape[0])
    ends = rows.new_empty((experts.num_experts,), dtype=torch.int32)
    first = experts.gate_up_proj if experts.has_gate else experts.up_proj
    inner = products(rows, _matrices(experts, first), ends)
    gated = _WeightedGate.apply(inner, weights, experts.has_gate)
    output = products(gated, _matrices(experts, experts.down_proj), ends)
    return _with_biases(output, experts.down_proj_bias, weights) if getattr(experts, _BIASED, False) else output


def _with_biases(output: torch.Tensor, biases: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Add to rows (all, width) sorted by expert the weighted bias (experts, width) of each, in FP32 and expert by
    expert (``_apply_bias`` of Megatron-LM's experts.py; cuBLAS adds the bias of the first product).
    """
    parts = zip(output.tensor_split(len(biases)), biases, weights.float().tensor_split(len(biases)), strict=True)
    return torch.cat([rows + bias * share for rows, bias, share in parts]).to(output.dtype)


def _matrices(experts: Any, weight: torch.Tensor) -> torch.Tensor:
    """Return the weights as (experts, in, out)."""
    return weight if experts.is_transposed else weight.transpose(-2, -1)
