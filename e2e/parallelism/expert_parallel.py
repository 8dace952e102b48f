"""Experts divided among ranks: rows of tokens are sent to the ranks of their experts, and back (GShard, arXiv
2006.16668).

``alltoall``, as Megatron-LM's dispatcher of that name: rows are sorted by expert, exchanged together with their routing
weights, one row per token and expert, sorted again among the experts of the receiving rank, computed, and sent back.
``deepep`` (deepseek-ai/DeepEP): a token is sent once to every rank with any of its experts, over the network once to
every node, where the GPUs forward it; the receiving rank makes the rows, and sums their outputs before one is sent
back. The experts of tokens depend on values: :class:`ExpertRouting` gives the number of rows of the busiest rank, which
is the rank captured. Imports ``torch``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import comb
from typing import Any, Literal

import torch
from torch import nn

from costmodel.base.errors import InputError
from costmodel.operators.experts import BALANCED, ExpertRouting
from e2e.capture.models.expert_layers import Permute, Products, Unpermute, apply_experts, pads
from e2e.parallelism.communication import ExchangeTokens, exchange_rows
from e2e.parallelism.tensor_parallel import EXPERTS

Dispatch = Literal["alltoall", "deepep"]
_ops = torch.ops.moe


@dataclass(frozen=True)
class Exchange:
    """Exchange of tokens between expert-parallel ranks."""

    # Number of ranks that divide the experts.
    ranks: int
    dispatch: Dispatch = "alltoall"
    routing: ExpertRouting = BALANCED
    # Number of these ranks in one node (None: all).
    inside: int | None = None
    # (number of groups that a token may choose from, number of equal groups of experts), a restriction to few nodes
    # (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
    groups: tuple[int, int] = (1, 1)

    @property
    def in_node(self) -> int:
        """Number of ranks in one node."""
        return self.ranks if self.inside is None else max(min(self.inside, self.ranks), 1)


def parts_met(experts: int, chosen: int, parts: int) -> float:
    """Return the mean number of ``parts`` equal parts of the experts in which a token that chooses ``chosen`` experts
    has any.
    """
    outside = experts - experts // parts
    missed = comb(outside, chosen) / comb(experts, chosen) if outside >= chosen else 0.0
    return parts * (1 - missed)


def parts_met_in_groups(exchange: Exchange, experts: int, chosen: int, parts: int) -> float:
    """Return the number of :func:`parts_met` for a token restricted to its groups."""
    allowed, groups = exchange.groups
    if groups == 1 or experts % groups or (parts % groups and groups % parts):
        return parts_met(experts, chosen, parts)
    if parts % groups == 0:
        return parts_met(experts * allowed // groups, chosen, parts * allowed // groups)
    # A part holds several groups, ``k`` of which the token may choose from.
    own, size = groups // parts, experts // groups
    missed = 0.0
    for k in range(max(0, allowed - groups + own), min(own, allowed) + 1):
        drawn = comb(own, k) * comb(groups - own, allowed - k) / comb(groups, allowed)
        missed += drawn * comb((allowed - k) * size, chosen) / comb(allowed * size, chosen)
    return parts * (1 - missed)


def divide(model: Any, layers: nn.ModuleList, exchange: Exchange, source: str) -> None:
    """Keep ``1 / ranks`` of the experts of every layer on this rank, in place; raise ``InputError`` if not possible."""
    ep = exchange.ranks
    groups = getattr(model.config, "n_group", None) or 1
    exchange = replace(exchange, groups=(getattr(model.config, "topk_group", None) or groups, groups))
    found: list[Any] = [module for layer in layers for name, module in layer.named_modules() if name == EXPERTS]
    if not found or not all(hasattr(experts, "gate_up_proj") for experts in found):
        kind = model.config.model_type
        raise InputError(f"{source}: ep={ep}: the layers of model type {kind!r} have no experts to divide; use ep=1")
    for experts in found:
        if experts.num_experts % ep:
            raise InputError(f"{source}: ep={ep} does not divide {experts.num_experts} experts; choose an ep that does")
        whole = experts.num_experts
        _shrink(experts, ep)
        products = getattr(experts.forward, "products", None)
        if products is None:
            if exchange.dispatch != "alltoall":
                raise InputError(f"{source}: ep-dispatch={exchange.dispatch} needs --moe grouped")
            experts.forward = _library(experts.forward, exchange, whole)
        elif exchange.dispatch == "alltoall":
            experts.forward = _rows_exchanged(experts, exchange, whole, products)
        else:
            experts.forward = _tokens_exchanged(experts, exchange, whole, products)


def _shrink(experts: Any, ep: int) -> None:
    for name, parameter in list(experts.named_parameters(recurse=False)):
        shape = (parameter.shape[0] // ep, *parameter.shape[1:])
        setattr(experts, name, nn.Parameter(parameter.new_empty(shape)))
    experts.num_experts //= ep


def _received(exchange: Exchange, experts: int, rows: int) -> int:
    """Return the rows of the busiest rank, if every rank sends ``rows``."""
    return sum(exchange.routing.slowest(rows * exchange.ranks, experts, exchange.ranks))


def _library(own: Any, exchange: Exchange, experts: int) -> Callable[..., torch.Tensor]:
    """Return the exchanging forward; ``own``: the library's forward of this rank's experts on rows of one expert
    each.
    """

    def forward(states: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, chosen = selected.shape
        sent, received = tokens * chosen, _received(exchange, experts, tokens * chosen)
        _, order = torch.sort(selected.reshape(-1))
        rows = ExchangeTokens.apply(states[order // chosen], received)
        factors = ExchangeTokens.apply(weights.reshape(-1, 1)[order], received)
        computed = ExchangeTokens.apply(own(rows, selected.new_empty((received, 1)), factors), sent)
        back = torch.empty_like(order)
        back[order] = torch.arange(order.shape[0], device=order.device)
        return computed[back].view(tokens, chosen, -1).sum(dim=1)

    return forward


def _rows_exchanged(experts: Any, exchange: Exchange, whole: int, products: Products) -> Callable[..., torch.Tensor]:
    def forward(states: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, chosen = selected.shape
        sent, received = tokens * chosen, _received(exchange, whole, tokens * chosen)
        rows = _ops.row_map(selected, whole)
        _wait_for_counts(exchange, selected, whole)
        given = ExchangeTokens.apply(Permute.apply(states, rows), received)
        factors = ExchangeTokens.apply(Permute.apply(weights.reshape(-1, 1), rows), received)
        computed = _on_this_rank(experts, exchange, given, factors, received, products)
        return Unpermute.apply(ExchangeTokens.apply(computed, sent), rows, tokens)

    return forward


def _wait_for_counts(exchange: Exchange, selected: torch.Tensor, experts: int) -> None:
    """Record the host's wait for the numbers of rows sent, received and per expert; not needed with a capacity, to
    which rows are padded.
    """
    if exchange.routing.capacity is None:
        _ops.counts_to_host(selected, experts)


def _tokens_exchanged(experts: Any, exchange: Exchange, whole: int, products: Products) -> Callable[..., torch.Tensor]:
    def forward(states: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, chosen = selected.shape
        rows = _received(exchange, whole, tokens * chosen)
        _wait_for_counts(exchange, selected, whole)
        imbalance = rows / (tokens * chosen)
        sent = round(tokens * parts_met_in_groups(exchange, whole, chosen, exchange.ranks))
        received = round(sent * imbalance)
        nodes = exchange.ranks // exchange.in_node
        passed = round(tokens * parts_met_in_groups(exchange, whole, chosen, nodes))
        copies = states if nodes == 1 else _SentOn.apply(states, passed, passed, "across")
        group = "all" if nodes == 1 else "inside"
        given = _SentOn.apply(copies, sent, received, group)
        factors = _Resized.apply(weights.reshape(-1, 1), rows)
        rows_out = _on_this_rank(experts, exchange, given, factors, rows, products)
        computed = _SentOn.apply(rows_out, received, sent, group)
        if nodes > 1:
            computed = _SentOn.apply(_Resized.apply(computed, passed), passed, passed, "across")
        return _Resized.apply(computed, tokens)

    return forward


class _Resized(torch.autograd.Function):
    """Copy or sum rows to ``rows`` of them, as done inside the exchanging kernels: shapes change, no kernel runs."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.rows = given.shape[0]
        return given.new_empty((rows, *given.shape[1:]))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0].new_empty((ctx.rows, *gradients[0].shape[1:])), None


class _SentOn(torch.autograd.Function):
    """Exchange of ``sent`` outgoing and ``received`` incoming copies of rows; gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, sent: int, received: int, group: Any) -> torch.Tensor:
        ctx.sizes = (given.shape[0], sent, received, group)
        return exchange_rows(given.new_empty((sent, *given.shape[1:])), received, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        rows, sent, _, group = ctx.sizes
        back = exchange_rows(gradients[0], sent, group)
        return back.new_empty((rows, *back.shape[1:])), None, None, None


def _on_this_rank(
    experts: Any, exchange: Exchange, given: torch.Tensor, weights: torch.Tensor, rows: int, products: Products
) -> torch.Tensor:
    """Sort rows by this rank's experts, compute, and restore their order."""
    # Rows of a capacity are a multiple already, and DeepEP's receiving kernels add the padding (pad_multiple of its
    # HybridEP).
    padded = pads(products) and exchange.routing.capacity is None and exchange.dispatch == "alltoall"
    if experts.num_experts == 1 and given.shape[0] == rows:
        return apply_experts(experts, given, weights, products, padded)
    order = given.new_empty((rows,), dtype=torch.int32)
    computed = apply_experts(experts, Permute.apply(given, order), weights, products, padded)
    return Unpermute.apply(computed, order, given.shape[0])
