"""Latent attention computed in the space of the latents, as serving engines decode (``--attention mla``).

DeepSeek's attention keeps one latent per token and a rotated key that all heads share (arXiv 2405.04434, section 2.1).
The layers of Transformers compute keys and values of every head from the latents of the whole cache for every token;
vLLM, SGLang and TensorRT-LLM multiply the queries by that projection instead (it is absorbed), attend over the cached
latents, whose first part are also the values, and multiply the outputs by the rest of the projection. The attention
itself is recorded as one operator without effect, :data:`OPERATOR`. Imports ``torch``.
"""

from __future__ import annotations

from typing import Any

import torch

from costmodel.base.errors import InputError
from e2e.capture.fused_attention import MASK_FORM

OPERATOR = "attention::latent"
FORM = "latent"  # name of the function in the library's table
_KEPT = "absorbed_projection"  # attribute of a layer

_LIBRARY = torch.library.Library("attention", "FRAGMENT")
_LIBRARY.define("latent(Tensor query, Tensor latents, Tensor rotated) -> Tensor")
_LIBRARY.impl("latent", lambda query, latents, rotated: query.new_empty((*query.shape[:-1], latents.shape[-1])), "Meta")


def register() -> str:
    """Register the function in the tables of Transformers; return its name there."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    if FORM not in ALL_ATTENTION_FUNCTIONS:
        ALL_ATTENTION_FUNCTIONS.register(FORM, attend)
        ALL_MASK_ATTENTION_FUNCTIONS.register(FORM, ALL_MASK_ATTENTION_FUNCTIONS[MASK_FORM])
    return FORM


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


def attend(
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
