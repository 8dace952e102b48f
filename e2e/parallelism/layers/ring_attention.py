"""Ring attention of context-parallel ranks, block by block (``cp-form=ring``): PyTorch's ``context_parallel``.

Each rank has a piece of the front and one of the back of every sequence. Keys and values of all ranks are gathered
while the rank's own block is computed (``rotate_method`` allgather, torchtitan's default); then follows a block for
every other rank, of all queries and the front half of its keys or of the back half of the queries and all its keys,
which is the same work. Outputs and their logarithmic sums are merged in FP32, gradients of keys and values are passed
on in FP32 during the next block (``convert_to_f32`` of torch/distributed/tensor/experimental/_attention.py,
``_SDPAMerger`` and ``_templated_ring_attention_backward``). Its kernels have as many key heads as query heads: shared
key heads are repeated. Imports ``torch``.
"""

from __future__ import annotations

from typing import Any

import torch

from e2e.capture import fused_attention  # noqa: F401  (its operators)

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


def repeated(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Repeat keys or values (batch, kv_heads, tokens, head_dim) for ``heads`` heads."""
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)
