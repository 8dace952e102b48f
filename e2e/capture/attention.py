"""Attention as fused kernels other than ``scaled_dot_product_attention``: of libraries, of latents, ``flex_attention``.

Each call is recorded as one operator without effect, and one of its gradients. Imports ``torch``.

Libraries (:data:`FORWARD`): FlashAttention's package, Transformer Engine and kernels of Transformers skip keys outside
a window and support the learned score of a sink, where PyTorch's own function needs a mask over all pairs or has no
support. For sequences packed from documents, they take the lengths and skip pairs of different documents.

Latents (:data:`LATENT`), as serving engines decode (``--attention mla``): DeepSeek's attention keeps one latent per
token and a rotated key that all heads share (arXiv 2405.04434, section 2.1). The layers of Transformers compute keys
and values of every head from the latents of the whole cache for every token; vLLM, SGLang and TensorRT-LLM multiply the
queries by that projection instead (it is absorbed), attend over the cached latents, whose first part are also the
values, and multiply the outputs by the rest of the projection.

``flex_attention`` (:data:`FLEX_FORWARD`) as its compiled GPU kernel: one fused call over the pairs allowed by its mask.
The mask is evaluated on a grid of queries and keys. If its values are known (:mod:`e2e.capture.known_values`: it
compares positions, or documents given by the script), the fraction of allowed pairs is known; otherwise all pairs
count. Blocks of keys that a script lists itself (``BlockMask.from_kv_blocks``) bound the fraction, if their numbers are
known. The record expresses the fraction as a window with the same number of pairs. The work of ``score_mod`` per pair
is not priced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from costmodel.base.errors import InputError
from costmodel.operators.attention import seen_pairs
from e2e.capture.known_values import known

FORWARD, BACKWARD = "attention::fused", "attention::fused_backward"
FUSED_FORM = "fused"  # name of the function in the library's table
CACHED_TOKENS = "cached_tokens"  # attribute of a module: tokens in its cache
_DOCUMENT = "document_length"  # attribute of a module: tokens of each document in its sequences
MASK_FORM = "flash_attention_2"  # whose masks are None unless there is padding

_LIBRARY = torch.library.Library("attention", "DEF")
_ARGUMENTS = (
    "Tensor query, Tensor key, Tensor value, Tensor? sinks, bool causal, int window, float dropout, int document=0"
)
for _name in ("fused", "flex"):  # ``flex``: of :class:`FlexibleAttention`
    _LIBRARY.define(f"{_name}({_ARGUMENTS}) -> Tensor")
    _LIBRARY.define(f"{_name}_backward(Tensor gradient, {_ARGUMENTS}) -> (Tensor, Tensor, Tensor)")


def _fused_output(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _fused_gradients(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


for _name in ("fused", "flex"):
    _LIBRARY.impl(_name, _fused_output, "Meta")
    _LIBRARY.impl(f"{_name}_backward", _fused_gradients, "Meta")
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


def register_fused() -> str:
    """Register the function in the tables of Transformers; return its name there."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if FUSED_FORM not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(FUSED_FORM, fused_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(FUSED_FORM, ALL_MASK_ATTENTION_FUNCTIONS[MASK_FORM])
    return FUSED_FORM


def pack_documents(model: torch.nn.Module, form: str, tokens: int, source: str) -> None:
    """Make sequences of ``model``, with attention ``form`` of the library's table, consist of documents of ``tokens``
    tokens that attend to themselves alone.

    Raise ``InputError`` if the kernel does not support that.
    """
    if form != FUSED_FORM:
        raise InputError(
            f"{source}: --document-length {tokens}: PyTorch's own attention knows no documents; name a kernel that "
            "does (--attention flash2, flash3 or cudnn)"
        )
    for module in model.modules():
        setattr(module, _DOCUMENT, tokens)


def fused_attention(
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
    if causal and 1 < query.shape[2] < key.shape[2] and hasattr(module, CACHED_TOKENS):
        raise InputError("--cache-length: kernels by name decode one token of each sequence; give --attention flash")
    document = getattr(module, _DOCUMENT, 0)
    output = WindowedAttention.apply(query, key, value, s_aux, causal, sliding_window or 0, float(dropout), document)
    return output.transpose(1, 2).contiguous(), None


LATENT = "attention::latent"
LATENT_FORM = "latent"  # name of the function in the library's table
_KEPT = "absorbed_projection"  # attribute of a layer

_LATENT_LIBRARY = torch.library.Library("attention", "FRAGMENT")
_LATENT_LIBRARY.define("latent(Tensor query, Tensor latents, Tensor rotated) -> Tensor")
_LATENT_LIBRARY.impl(
    "latent", lambda query, latents, rotated: query.new_empty((*query.shape[:-1], latents.shape[-1])), "Meta"
)


def register_latent() -> str:
    """Register the function in the tables of Transformers; return its name there."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if LATENT_FORM not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(LATENT_FORM, latent_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register(LATENT_FORM, ALL_MASK_ATTENTION_FUNCTIONS[MASK_FORM])
    return LATENT_FORM


def absorb(model: torch.nn.Module, cached: int | None, source: str) -> None:
    """Make the latent-attention layers of ``model``, built with the form ``latent``, pass on their latents as cached.

    Raise ``InputError`` if there are none, or if the step has no ``cached`` tokens: prefill computes keys and values.
    """
    layers = [module for module in model.modules() if hasattr(module, "expand_kv") and hasattr(module, "kv_b_proj")]
    if not layers:
        raise InputError(f"{source}: --attention mla: it has no latent attention; name another kernel, such as flash3")
    if cached is None:
        raise InputError(
            f"{source}: --attention mla decodes tokens behind a cache; give --cache-length, or name the kernel of "
            "whole sequences (flash2, flash3, cudnn)"
        )
    for layer in layers:
        layer.expand_kv = _as_cached  # type: ignore[assignment]


def _projection(layer: Any, dtype: torch.dtype) -> torch.Tensor:
    """Return the weights from latents to keys and values, in the type of the queries: engines keep such a copy of
    weights that are stored in 8 bits.
    """
    if not hasattr(layer, _KEPT):
        setattr(layer, _KEPT, layer.kv_b_proj.weight.detach().to(dtype))
    kept: torch.Tensor = getattr(layer, _KEPT)
    return kept


def _as_cached(latents: torch.Tensor, rotated: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return latents, rotated


def latent_attention(
    module: Any,
    query: torch.Tensor,
    latents: torch.Tensor,
    rotated: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    indices: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention with the interface of Transformers' attention functions.

    Queries (batch, heads, length, width), cached ``latents`` (batch, 1, tokens, rank) and ``rotated`` keys (batch, 1,
    tokens, rotary width); the output has tokens before heads.
    """
    if indices is not None:
        raise InputError(f"{type(module).__name__}: sparse attention over cached latents is not known; give eager")
    batch, heads, length, width = query.shape
    rank, rotary = latents.shape[-1], rotated.shape[-1]
    plain, turned = query.split([width - rotary, rotary], dim=-1)
    projection = _projection(module, query.dtype).view(heads, -1, rank)
    of_keys, of_values = projection.split([width - rotary, module.v_head_dim], dim=1)
    absorbed = torch.bmm(plain.transpose(0, 1).reshape(heads, batch * length, -1), of_keys)
    whole = torch.cat((absorbed.view(heads, batch, length, rank).transpose(0, 1), turned), dim=-1)
    found = torch.ops.attention.latent(whole, latents, rotated)
    rows = found.transpose(0, 1).reshape(heads, batch * length, rank)
    output = torch.bmm(rows, of_values.transpose(1, 2)).view(heads, batch, length, -1)
    return output.permute(1, 2, 0, 3).contiguous(), None


FLEX_FORWARD, FLEX_BACKWARD = "attention::flex", "attention::flex_backward"
_SAMPLES = 192  # queries and keys at which a mask is evaluated, evenly spaced


class FlexibleAttention(torch.autograd.Function):
    """Attention of (batch, heads, length, head_dim), over ``window`` keys if it is not 0."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, causal: bool, window: int) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.how = (causal, window)
        return OPERATORS.flex(query, key, value, None, causal, window, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        query, key, value = ctx.saved_tensors
        return (*OPERATORS.flex_backward(gradients[0], query, key, value, None, *ctx.how, 0.0), None, None)


def flex_attention(
    paused: Callable[[], Any], query: Any, key: Any, value: Any, score: Any, block_mask: tuple[Any, ...], *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace PyTorch's higher-order operator; return output, log-sum-exp and largest score of each row.

    ``block_mask``: the members of a ``BlockMask``, the last of which is the mask; ``paused`` prevents recording of the
    mask's operators.
    """
    with paused():
        share, causal = _seen(block_mask[-1], query.shape[2], key.shape[2])
        share = min(share, _listed_share(block_mask, query.shape[2], key.shape[2]))
    window = _window(share, causal, query.shape[2], key.shape[2])
    output = FlexibleAttention.apply(query, key, value, causal, window)
    rows = query.new_empty(query.shape[:3], dtype=torch.float32)
    return output, rows, rows


def _seen(mask: Any, queries: int, keys: int) -> tuple[float, bool]:
    """Return the fraction of pairs allowed by ``mask`` for the first head of the first sample, and True if no query
    sees a later key.

    All pairs if its values are unknown.
    """
    if mask is None:
        return 1.0, False
    # Centres of equal intervals, so that neither end is preferred.
    row, column = (
        torch.tensor([int((place + 0.5) * length / count) for place in range(count)], device="meta")
        for length, count in ((queries, min(queries, _SAMPLES)), (keys, min(keys, _SAMPLES)))
    )
    first = torch.tensor(0, device="meta")
    found = mask(first, first, row[:, None], column[None, :])
    values = known(found) if isinstance(found, torch.Tensor) else None
    if values is None:
        return 1.0, False
    behind = known(column[None, :] > row[:, None])
    assert behind is not None
    return float(values.expand(behind.shape).float().mean()), not bool((values & behind).any())


def _listed_share(block_mask: tuple[Any, ...], queries: int, keys: int) -> float:
    """Return the fraction of pairs in the blocks that ``block_mask`` lists, 1 if their numbers are unknown."""
    if len(block_mask) < _MEMBERS:
        return 1.0
    numbers = [each for each in (block_mask[2], block_mask[4]) if isinstance(each, torch.Tensor)]
    values = [known(each) for each in numbers]
    if not values or any(each is None for each in values):
        return 1.0
    rows, block = numbers[0].numel(), block_mask[-3] * block_mask[-2]
    heads = rows / -(-queries // block_mask[-3])
    return sum(int(each.sum()) for each in values if each is not None) / heads * block / (queries * keys)


_MEMBERS = 13  # of a BlockMask at least: lengths; numbers and places of partial, of full blocks; last sizes and mask


def _window(share: float, causal: bool, queries: int, keys: int) -> int:
    """Return the narrowest window with at least ``share`` of all pairs; 0 for no window."""
    wanted, low, high = share * queries * keys, 1, keys
    # Samples cannot distinguish no window from one of nearly all keys.
    if wanted >= 0.97 * seen_pairs(queries, keys, causal):
        return 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if seen_pairs(queries, keys, causal, middle) >= wanted else (middle + 1, high)
    return low
