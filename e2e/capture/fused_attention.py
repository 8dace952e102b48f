"""Fused attention of libraries other than ``scaled_dot_product_attention``: windows, sinks, packed documents.

FlashAttention's package, Transformer Engine and kernels of Transformers skip keys outside a window and support the
learned score of a sink, where PyTorch's own function needs a mask over all pairs or has no support. For sequences
packed from documents, they take the lengths and skip pairs of different documents. Such a call is recorded as one
operator without effect, :data:`FORWARD`, and one of its gradients. Imports ``torch``.
"""

from __future__ import annotations

from typing import Any

import torch

from costmodel.base.errors import InputError

FORWARD, BACKWARD = "attention::fused", "attention::fused_backward"
FORM = "fused"  # name of the function in the library's table
CACHED = "cached_tokens"  # attribute of a module: tokens in its cache
_DOCUMENT = "document_length"  # attribute of a module: tokens of each document in its sequences
MASK_FORM = "flash_attention_2"  # whose masks are None unless there is padding

_LIBRARY = torch.library.Library("attention", "DEF")
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sinks, bool causal, int window, float dropout, int document=0"
)
for _name in ("fused", "flex"):  # ``flex``: of :class:`FlexibleAttention`
    _LIBRARY.define(f"{_name}({_ARGUMENTS}) -> Tensor")
    _LIBRARY.define(f"{_name}_backward(Tensor gradient, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")


def _output(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _gradients(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


for _name in ("fused", "flex"):
    _LIBRARY.impl(_name, _output, "Meta")
    _LIBRARY.impl(f"{_name}_backward", _gradients, "Meta")
OPERATORS = torch.ops.attention


class WindowedAttention(torch.autograd.Function):
    """Causal attention of (batch, heads, length, head_dim), over ``window`` keys and inside documents of ``document``
    tokens, where these are not 0.
    """

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, sinks: Any, *how: Any) -> torch.Tensor:
        ctx.save_for_backward(query, key, value, *(() if sinks is None else (sinks,)))
        ctx.how = how
        return OPERATORS.fused(query, key, value, sinks, *how)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, *sinks = ctx.saved_tensors
        given = sinks[0] if sinks else None
        found = OPERATORS.fused_backward(gradients[0], query, key, value, given, *ctx.how)
        return (*found, torch.zeros_like(given) if given is not None else None, None, None, None, None)


def register() -> str:
    """Register the function in the tables of Transformers; return its name there."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if FORM not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(FORM, attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(FORM, ALL_MASK_ATTENTION_FUNCTIONS[MASK_FORM])
    return FORM


def pack_documents(model: torch.nn.Module, form: str, tokens: int, source: str) -> None:
    """Make sequences of ``model``, with attention ``form`` of the library's table, consist of documents of ``tokens``
    tokens that attend to themselves alone.

    Raise ``InputError`` if the kernel does not support that.
    """
    if form != FORM:
        raise InputError(
            f"{source}: --document-length {tokens}: PyTorch's own attention knows no documents; name a kernel that "
            "does (--attention flash2, flash3 or cudnn)"
        )
    for module in model.modules():
        setattr(module, _DOCUMENT, tokens)


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the interface of Transformers' attention functions; the output has tokens before heads."""
    causal = bool(getattr(module, "is_causal", True) if is_causal is None else is_causal)
    if causal and 1 < query.shape[2] < key.shape[2] and hasattr(module, CACHED):
        raise InputError("--cache-length: kernels by name decode one token of each sequence; give --attention flash")
    document = getattr(module, _DOCUMENT, 0)
    output = WindowedAttention.apply(query, key, value, s_aux, causal, sliding_window or 0, float(dropout), document)
    return output.transpose(1, 2).contiguous(), None
