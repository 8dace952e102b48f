"""Experts divided among ranks: rows of tokens go to the ranks of their experts, and back (GShard, arXiv 2006.16668).

As Megatron-LM's all-to-all dispatcher does it: tokens are sorted by expert, exchanged together with their routing
weights, sorted again among the experts of the rank that received them, computed, and sent back. Which experts tokens
choose depends on values: every rank is taken to receive as many as it sends. Imports ``torch``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from costmodel.base.errors import InputError
from e2e.parallelism.layers.autograd import ExchangeTokens
from e2e.parallelism.layers.tensor_parallel import EXPERTS


def divide(model: Any, layers: nn.ModuleList, ep: int, source: str) -> None:
    """Leaves ``1 / ep`` of the experts of every layer on this rank, in place; ``InputError`` where it cannot be."""
    found: list[Any] = [module for layer in layers for name, module in layer.named_modules() if name == EXPERTS]
    if not found or not all(hasattr(experts, "gate_up_proj") for experts in found):
        kind = model.config.model_type
        raise InputError(f"{source}: ep={ep}: the layers of model type {kind!r} have no experts to divide; use ep=1")
    for experts in found:
        if experts.num_experts % ep:
            raise InputError(f"{source}: ep={ep} does not divide {experts.num_experts} experts")
        _shrink(experts, ep)
        experts.forward = _exchanging(experts.forward)


def _shrink(experts: Any, ep: int) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        shape = (parameter.shape[0] // ep, *parameter.shape[1:])
        setattr(experts, name, nn.Parameter(parameter.new_empty(shape)))
    experts.num_experts //= ep


def _exchanging(own: Any) -> Any:
    """``own``: the library's forward of this rank's experts on rows that one expert each takes."""

    def forward(states: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, chosen = selected.shape
        _, order = torch.sort(selected.reshape(-1))
        rows = ExchangeTokens.apply(states[order // chosen])
        factors = ExchangeTokens.apply(weights.reshape(-1, 1)[order])
        computed = ExchangeTokens.apply(own(rows, selected.new_empty((tokens * chosen, 1)), factors))
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return computed[back].view(tokens, chosen, -1).sum(dim=1)

    return forward
