"""Attention of ranks that share every sequence: keys and values are gathered, everything else stays with its tokens.

As Llama 3 was trained (arXiv 2407.21783, section 3.3.2): each rank has one piece of the front and one of the back of a
sequence, so that causal attention is the same work for all, half of its queries x all keys. What is gathered is
gathered again for the backward pass. ``ring``: block by block (:mod:`e2e.parallelism.layers.ring_attention`). What a
kernel does with windows and sinks says :mod:`e2e.capture.fused_attention`, here as on one rank. Imports ``torch``.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

import torch

from costmodel.base.errors import InputError
from e2e.capture import fused_attention
from e2e.parallelism.layers.autograd import gather_context
from e2e.parallelism.layers.regather import Regathered
from e2e.parallelism.layers.ring_attention import TOKENS, RingAttention, repeated


def split_attention(model: Any, cp: int, attention: str, ring: bool = False) -> None:
    """Makes a Hugging Face ``model`` that runs on ``1 / cp`` of the tokens attend to those of all ``cp`` ranks.

    ``attention``: ``eager``, ``sdpa`` or ``fused``, as the model was built. ``ring``: block by block. Models whose
    attention has no entry in the library's table of attention functions stay as they are.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = f"{attention}, {'ring' if ring else 'context parallel'} over {cp}"
    ALL_ATTENTION_FUNCTIONS.register(name, partial(_attend_ring, cp) if ring else partial(_attend, cp, attention))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[attention])
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "_attn_implementation_internal"):
            config._attn_implementation_internal = name


def _attend(
    cp: int,
    attention: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **others: Any,
) -> Any:
    """Attention of the rank's queries to the keys of all ranks."""
    gathered = Regathered(lambda part: torch.ops.parallel.context_all_gather(part, cp, TOKENS))
    keys, values = (gather_context(part, cp, TOKENS) for part in (key, value))
    gathered.know(keys, key)
    gathered.know(values, value)
    if attention_mask is not None:
        attention_mask = attention_mask.new_empty((*attention_mask.shape[:-1], keys.shape[TOKENS]))
    with gathered.hooks():
        if attention == "eager":
            own = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
            return own(module, query, keys, values, attention_mask, **others)
        if attention == fused_attention.FORM:
            return fused_attention.attend(module, query, keys, values, None, **others)
        return _fused(module, query, keys, values, attention_mask, **others)


def _attend_ring(
    cp: int,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attention of the rank's queries to the keys of all ranks, a block at a time."""
    if sliding_window or s_aux is not None or not getattr(module, "is_causal", True):
        raise InputError("cp-form=ring is for causal attention without windows and sinks; use cp-form=gather")
    keys, values = (repeated(each, query.shape[1]) for each in (key, value))
    output = RingAttention.apply(query, keys, values, cp, float(dropout))
    return output.transpose(1, 2).contiguous(), None


def _fused(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """As the library's ``sdpa_attention_forward``, which would drop keys where there are more than queries."""
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    output = torch.nn.functional.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        is_causal=causal and attention_mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None
