"""Attention of context-parallel ranks: keys and values are gathered, everything else stays with its tokens.

As in the training of Llama 3 (arXiv 2407.21783, section 3.3.2): each rank has one piece of the front and one of the
back of a sequence, so that causal attention is the same work for all, half of its queries x all keys. Gathered data are
gathered again for the backward pass. ``ring``: block by block. ``a2a``: tokens are exchanged for heads, so that every
rank attends over whole sequences with its share of the heads (DeepSpeed-Ulysses, arXiv 2309.14509;
``cp_comm_type=a2a`` of Megatron-Core, whose copy that reorders the halves of a sequence is left out). Kernels handle
windows and sinks as in :mod:`e2e.capture.attention`, here as on one rank.

A ring is PyTorch's ``context_parallel``. Keys and values of all ranks are gathered while the rank's own block is
computed (``rotate_method`` allgather, torchtitan's default); then follows a block for every other rank, of all queries
and the front half of its keys or of the back half of the queries and all its keys, which is the same work. Outputs and
their logarithmic sums are merged in FP32, gradients of keys and values are passed on in FP32 during the next block
(``convert_to_f32`` of torch/distributed/tensor/experimental/_attention.py, ``_SDPAMerger`` and
``_templated_ring_attention_backward``). Its kernels have as many key heads as query heads: shared key heads are
repeated.

Imports ``torch``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from costmodel.base.errors import InputError
from e2e.capture.attention import FUSED_FORM, fused_attention
from e2e.parallelism.communication import ExchangeHeads, Regathered, gather_context
from e2e.parallelism.spec import ContextForm

TOKENS = 2  # dimension of the tokens in (batch, heads, tokens, head_dim)
_attention, _parallel = torch.ops.attention, torch.ops.parallel
Block = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class RingAttention(torch.autograd.Function):
    """Causal attention of (batch, heads, length, head_dim), with as many key heads as query heads, among ``ranks``."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, ranks: int, dropout: float
    ) -> torch.Tensor:
        _gather(key, value, ranks)
        output = _attention.fused(query, key, value, None, True, 0, dropout).float()
        sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        for step in range(1, ranks):
            block, partial = _block(step, ranks, query, key, value)
            found = _attention.fused(*block, None, False, 0, dropout).float()
            others = query.new_empty(block[0].shape[:-1], dtype=torch.float32)
            before, until = (_back(output), _back(sums)) if partial else (output, sums)
            after = before - torch.sigmoid(others - until).unsqueeze(-1) * (before - found)
            until = until - torch.nn.functional.logsigmoid(until - others)
            output = torch.cat((_front(output), after), TOKENS) if partial else after
            sums = torch.cat((_front(sums), until), TOKENS) if partial else until
        result = output.to(query.dtype)
        ctx.save_for_backward(query, key, value, result, sums)
        ctx.how = ranks, dropout
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, _, _ = ctx.saved_tensors
        ranks, dropout = ctx.how
        _gather(key, value, ranks)
        of_query, of_key, of_value = (torch.zeros_like(each, dtype=torch.float32) for each in (query, key, value))
        for step in range(ranks):
            block, partial = _block(step, ranks, query, key, value) if step else ((query, key, value), False)
            gradient = _back(gradients[0]) if partial else gradients[0]
            found = _attention.fused_backward(gradient, *block, None, step == 0, 0, dropout)
            halved = step > 0 and not partial  # the front half of another rank's keys
            of_query = _added_behind(of_query, found[0]) if partial else of_query + found[0]
            of_key, of_value = (
                torch.cat((_front(each) + own, _back(each)), TOKENS) if halved else each + own
                for each, own in ((of_key, found[1]), (of_value, found[2]))
            )
            passed = torch.cat((of_key.flatten(), of_value.flatten()))
            passed = _parallel.context_all_to_all(passed, passed.shape[0])
            of_key, of_value = (part.view(key.shape) for part in passed.chunk(2))
        return of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype), None, None


def _gather(key: torch.Tensor, value: torch.Tensor, ranks: int) -> None:
    """Gather keys and values of all ranks in one message; the first block does not wait for it."""
    _parallel.context_all_gather_early(torch.cat((key.flatten(), value.flatten())), ranks, 0)


def _block(step: int, ranks: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[Block, bool]:
    """Return the operands of the block after ``step`` others on the middle rank, and True if only the back half of the
    queries is used.
    """
    if step <= ranks // 2:
        return (query, _front(key), _front(value)), False
    return (_back(query), key, value), True


def _added_behind(whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """Return a copy of ``whole`` with ``own`` added to its back half."""
    return torch.cat((_front(whole), _back(whole) + own), TOKENS)


def _front(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(2, TOKENS)[0]


def _back(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.chunk(2, TOKENS)[1]


def repeat_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat keys or values (batch, kv_heads, tokens, head_dim) for ``heads`` heads."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)


HEADS = 1  # dimension of the heads in (batch, heads, tokens, head_dim)


def split_attention(model: Any, cp: int, attention: str, form: ContextForm) -> None:
    """Make a Hugging Face ``model`` on ``1 / cp`` of the tokens attend to those of all ``cp`` ranks.

    ``attention``: ``eager``, ``sdpa`` or ``fused``, as the model was built. ``form``: as ``cp-form`` of
    :mod:`e2e.parallelism.spec`. Models whose attention is not in the library's table of attention functions are
    unchanged.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    name = f"{attention}, context parallel by {form} over {cp}"
    attend: Callable[..., Any] = {
        "gather": partial(_attend, cp, attention),
        "ring": partial(_attend_ring, cp),
        "a2a": partial(_attend_by_heads, cp, attention),
    }[form]
    ALL_ATTENTION_FUNCTIONS.register(name, attend)
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
    """Compute attention of the rank's queries to the keys of all ranks."""
    gathered = Regathered(lambda part: torch.ops.parallel.context_all_gather(part, cp, TOKENS))
    keys, values = (gather_context(part, cp, TOKENS) for part in (key, value))
    gathered.know(keys, key)
    gathered.know(values, value)
    if attention_mask is not None:
        attention_mask = attention_mask.new_empty((*attention_mask.shape[:-1], keys.shape[TOKENS]))
    with gathered.hooks():
        return _own(attention, module, query, keys, values, attention_mask, **others)


def _own(
    attention: str,
    module: Any,
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **others: Any,
) -> Any:
    """Compute attention by the function that the model was built with."""
    if attention == "eager":
        own = sys.modules[type(module).__module__].eager_attention_forward  # type: ignore[attr-defined]
        return own(module, query, keys, values, attention_mask, **others)
    if attention == FUSED_FORM:
        return fused_attention(module, query, keys, values, None, **others)
    return _fused(module, query, keys, values, attention_mask, **others)


def _attend_by_heads(
    ranks: int,
    attention: str,
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **others: Any,
) -> Any:
    """Compute attention over the tokens of all ``ranks`` with a share of the heads."""
    for part, kind in ((query, "attention heads"), (key, "key-value heads")):
        if part.shape[HEADS] % ranks:
            count = part.shape[HEADS]
            raise InputError(f"cp-form=a2a: {ranks} ranks cannot share {count} {kind} of a rank; use cp-form=gather")
    if attention == "eager" and getattr(module, "sinks", None) is not None:
        raise InputError("cp-form=a2a: eager attention with sinks is not split by heads; give --attention cudnn")
    query, key, value = (ExchangeHeads.apply(part, ranks, HEADS, TOKENS) for part in (query, key, value))
    if others.get("s_aux") is not None:
        others["s_aux"] = others["s_aux"].chunk(ranks)[0]
    if attention_mask is not None:
        length = query.shape[TOKENS]
        attention_mask = attention_mask.new_empty((*attention_mask.shape[:-2], length, length))
    output, *rest = _own(attention, module, query, key, value, attention_mask, **others)
    # The output of attention has tokens before heads: the two dimensions are exchanged.
    return ExchangeHeads.apply(output, ranks, HEADS, TOKENS), *rest


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
    """Compute attention of the rank's queries to the keys of all ranks, block by block."""
    if sliding_window or s_aux is not None or not getattr(module, "is_causal", True):
        raise InputError("cp-form=ring is for causal attention without windows and sinks; use cp-form=gather")
    keys, values = (repeat_heads(each, query.shape[1]) for each in (key, value))
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
    """Compute attention as the library's ``sdpa_attention_forward``, which would drop keys if there are more than
    queries.
    """
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
