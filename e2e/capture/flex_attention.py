"""``flex_attention`` as its compiled GPU kernel: one fused call over the pairs allowed by its mask.

The mask is evaluated on a grid of queries and keys. If its values are known (:mod:`e2e.capture.known_values`: it
compares positions, or documents given by the script), the fraction of allowed pairs is known; otherwise all pairs
count. The record expresses the fraction as a window with the same number of pairs. The work of ``score_mod`` per pair
is not priced.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from costmodel.operators.attention import seen_pairs
from e2e.capture.fused_attention import OPERATORS
from e2e.capture.known_values import known

FORWARD, BACKWARD = "attention::flex", "attention::flex_backward"
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


def attend(
    paused: Callable[[], Any], query: Any, key: Any, value: Any, score: Any, block_mask: tuple[Any, ...], *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Replace PyTorch's higher-order operator; return output, log-sum-exp and largest score of each row.

    ``block_mask``: its last member is the mask; ``paused`` prevents recording of the mask's operators.
    """
    with paused():
        share, causal = _seen(block_mask[-1], query.shape[2], key.shape[2])
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
