"""DLRM (Naumov et al., arXiv:1906.00091): an MLP for dense features, tables for sparse ones, dot interaction.

All embedding tables are one operator, as in FBGEMM's table-batched embedding, with the optimizer inside. Rows of all
tables are in one weight (sum of rows, dim). The backward operator applies the optimizer itself, so that the weight has
no dense gradient.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

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


CRITEO_TERABYTE_ROWS = (
    (39884406, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 38532951, 2953546, 403346, 10)
    + (2208, 11938, 155, 4, 976, 14, 39979771, 25641295, 39664984, 585935, 12972, 108, 36)
)  # fmt: skip


@dataclass(frozen=True)
class DlrmConfig:
    """Sizes of a DLRM."""

    rows: tuple[int, ...]
    dim: int
    # Widths from the dense features to the embedding's width.
    bottom: tuple[int, ...]
    # Hidden widths and the output.
    top: tuple[int, ...]
    # Indices per table and sample.
    lookups: int
    loss: Literal["mse", "bce"] = "mse"
    # ``batched``: one fused operator for all tables; ``bags``: one ``nn.EmbeddingBag`` with a dense gradient per table.
    embedding: Literal["batched", "bags"] = "batched"


# Configurations of facebookresearch/dlrm (bench/ and README) used in published tests of performance models.
CONFIGS = {
    "dlrm": DlrmConfig((1_000_000,) * 8, 64, (512, 512, 64), (1024, 1024, 1024, 1), 100),
    "dlrm-mlperf": DlrmConfig(CRITEO_TERABYTE_ROWS, 128, (13, 512, 256, 128), (1024, 1024, 512, 256, 1), 1, "bce"),
    "dlrm-ddp": DlrmConfig((80_000,) * 8, 128, (128, 128, 128, 128), (512, 512, 512, 256, 1), 10, "bce"),
}


def random_tables(tables: int, seed: int, dim: int = 64, lookups: int = 20) -> DlrmConfig:
    """Return ``tables`` tables of 10^3 to 10^7 rows, log-uniform and reproducible, like the random placements in
    papers.
    """
    generator = torch.Generator().manual_seed(seed)
    exponents = 3 + 4 * torch.rand(tables, generator=generator, device="cpu")
    rows = tuple(int(10**exponent) for exponent in exponents.tolist())
    return DlrmConfig(rows, dim, (512, 512, dim), (1024, 1024, 1024, 1), lookups, "bce")


def mlp(widths: tuple[int, ...], last_sigmoid: bool) -> nn.Sequential:
    """Return linear layers with ReLU between; the last activation is a sigmoid for the click probability."""
    layers: list[nn.Module] = []
    for place, (before, after) in enumerate(zip(widths, widths[1:], strict=False)):
        layers.append(nn.Linear(before, after))
        final = last_sigmoid and place == len(widths) - 2
        layers.append(nn.Sigmoid() if final else nn.ReLU())
    return nn.Sequential(*layers)


class Dlrm(nn.Module):
    """DLRM: dense features (N, bottom[0]) and indices to probabilities (N, 1)."""

    def __init__(self, config: DlrmConfig) -> None:
        super().__init__()
        self.config = config
        vectors = len(config.rows) + 1
        self.bottom = mlp(config.bottom, last_sigmoid=False)
        self.top = mlp((config.dim + vectors * (vectors - 1) // 2, *config.top), last_sigmoid=True)
        self.tables: nn.Module
        if config.embedding == "batched":
            self.tables = TableBatchedEmbedding(config.rows, config.dim)
        else:
            self.tables = nn.ModuleList(nn.EmbeddingBag(rows, config.dim, mode="sum") for rows in config.rows)
        places = torch.tril_indices(vectors, vectors, offset=-1)
        self.register_buffer("row_places", places[0].clone())
        self.register_buffer("column_places", places[1].clone())

    def forward(self, dense: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        first = self.bottom(dense)
        stacked = torch.cat([first.unsqueeze(1), self._lookup(indices, offsets, dense.shape[0])], dim=1)
        products = torch.bmm(stacked, stacked.transpose(1, 2))
        pairs = products[:, self.row_places, self.column_places]
        return self.top(torch.cat([first, pairs], dim=1))

    def _lookup(self, indices: torch.Tensor, offsets: torch.Tensor, batch: int) -> torch.Tensor:
        """Return (N, tables, dim) for ``indices`` (tables, N x lookups)."""
        if isinstance(self.tables, TableBatchedEmbedding):
            return self.tables(indices.view(-1), batch)
        assert isinstance(self.tables, nn.ModuleList)
        rows = [table(indices[place], offsets) for place, table in enumerate(self.tables)]
        return torch.stack(rows, dim=1)
