"""``flex_attention`` as the compiled kernel that it is on a GPU: one fused call over the pairs that its mask leaves.

The mask is asked for a grid of queries and keys. Where its values are known (:mod:`e2e.capture.known_values`: it
compares positions, or documents that the script wrote), the share of pairs that it leaves is; else all pairs count.
The record says the share as the window that has as many pairs. What ``score_mod`` computes for every pair is not
priced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from costmodel.operators.attention import seen_pairs
from e2e.capture import fused_attention  # noqa: F401, its library of operators
from e2e.capture.known_values import known

FORWARD, BACKWARD = "attention::flex", "attention::flex_backward"
_SAMPLES = 192  # queries and keys at which a mask is asked, evenly spaced
_ops = torch.ops.attention


class FlexibleAttention(torch.autograd.Function):
    """Attention of (batch, heads, length, head_dim), over ``window`` keys where it is not 0."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, causal: bool, window: int) -> torch.Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.how = (causal, window)
        return _ops.flex(query, key, value, None, causal, window, 0.0)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        query, key, value = ctx.saved_tensors
        return (*_ops.flex_backward(gradients[0], query, key, value, None, *ctx.how, 0.0), None, None)


def attend(
    paused: Callable[[], Any], query: Any, key: Any, value: Any, score: Any, block_mask: tuple[Any, ...], *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """In the place of PyTorch's higher-order operator: output, logarithm of the sum of exponentials and largest score
    of each row. ``block_mask``: its last member is the mask; ``paused`` keeps unrecorded what that computes.
    """
    with paused():
        share, causal = _seen(block_mask[-1], query.shape[2], key.shape[2])
    window = _window(share, causal, query.shape[2], key.shape[2])
    output = FlexibleAttention.apply(query, key, value, causal, window)
    rows = query.new_empty(query.shape[:3], dtype=torch.float32)
    return output, rows, rows


def _seen(mask: Any, queries: int, keys: int) -> tuple[float, bool]:
    """Of the first head of the first sample: the share of pairs that ``mask`` leaves, and whether no query sees a key
    behind it. All pairs where its values are unknown.
    """
    if mask is None:
        return 1.0, False
    # In the middle of equal parts, so that neither end is preferred.
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


def _window(share: float, causal: bool, queries: int, keys: int) -> int:
    """The narrowest window of as many pairs as ``share`` of all; 0 if it is no window at all."""
    wanted, low, high = share * queries * keys, 1, keys
    # Samples cannot tell a mask without a window from one of nearly all keys.
    if wanted >= 0.97 * seen_pairs(queries, keys, causal):
        return 0
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if seen_pairs(queries, keys, causal, middle) >= wanted else (middle + 1, high)
    return low
