"""All embedding tables of a model as one operator, as in FBGEMM's table-batched embedding, with the optimizer inside.

Rows of all tables are in one weight (sum of rows, dim). The backward operator applies the optimizer itself, so that the
weight has no dense gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

NAMESPACE = "e2e"


@torch.library.custom_op(f"{NAMESPACE}::table_batched_embedding", mutates_args=())
def table_batched_embedding(
    weights: torch.Tensor, indices: torch.Tensor, rows: int, tables: int, batch: int, optimizer: str
) -> torch.Tensor:
    """Sum the looked-up rows to (batch, tables, dim). ``indices``: table by table, the same number per bag."""
    bags = indices.view(tables, batch, -1)
    base = torch.arange(tables, device=indices.device).view(-1, 1, 1) * rows
    return weights[bags + base].sum(2).transpose(0, 1).contiguous()


@table_batched_embedding.register_fake
def _forward_shape(
    weights: torch.Tensor, indices: torch.Tensor, rows: int, tables: int, batch: int, optimizer: str
) -> torch.Tensor:
    return weights.new_empty((batch, tables, weights.shape[1]))


@torch.library.custom_op(f"{NAMESPACE}::table_batched_embedding_backward", mutates_args=("weights",))
def table_batched_embedding_backward(
    gradient: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    rows: int,
    tables: int,
    batch: int,
    optimizer: str,
) -> None:
    """Update the rows of the batch; only shapes are ever needed here."""
    raise NotImplementedError("table_batched_embedding_backward is for capture on meta tensors")


@table_batched_embedding_backward.register_fake
def _backward_shape(
    gradient: torch.Tensor,
    weights: torch.Tensor,
    indices: torch.Tensor,
    rows: int,
    tables: int,
    batch: int,
    optimizer: str,
) -> None:
    return None


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, trigger: torch.Tensor, weights: torch.Tensor, indices: torch.Tensor, sizes: Any) -> Any:
        ctx.tensors, ctx.sizes = (weights, indices), sizes
        return torch.ops.e2e.table_batched_embedding(weights, indices, *sizes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        torch.ops.e2e.table_batched_embedding_backward(gradients[0].contiguous(), *ctx.tensors, *ctx.sizes)
        return None, None, None, None


class TableBatchedEmbedding(nn.Module):
    """Embedding of ``tables`` tables with ``rows`` rows each on average and width ``dim``; the optimizer is part of the
    backward pass.
    """

    def __init__(self, rows: tuple[int, ...], dim: int, optimizer: str = "sgd") -> None:
        super().__init__()
        self.tables = len(rows)
        self.mean_rows = sum(rows) // len(rows)
        self.optimizer = optimizer
        # A buffer instead of a parameter, without optimizer step and dense gradient.
        self.register_buffer("weights", torch.empty((sum(rows), dim)))
        self.trigger = torch.empty(0, requires_grad=True)

    def forward(self, indices: torch.Tensor, batch: int) -> torch.Tensor:
        sizes = (self.mean_rows, self.tables, batch, self.optimizer)
        return _Lookup.apply(self.trigger, self.weights, indices, sizes)
