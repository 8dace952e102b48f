"""Small models with host-bound steps: their kernels are short, so that host overheads dominate."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

TORCH = True
BATCH = 8


class _Convolutions(nn.Module):
    """Residual blocks of convolution, batch norm and ReLU, as in image networks."""

    def __init__(self, blocks: int = 6, width: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        x = self.stem(pictures)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return self.head(x.mean((2, 3)))


class _Transformer(nn.Module):
    """Transformer layers with separate operations: products, softmax, layer norm, dropout, GELU."""

    def __init__(self, layers: int = 4, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(1000, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * layers))
        self.mixing = nn.ModuleList(nn.Linear(width, 3 * width) for _ in range(layers))
        self.wide = nn.ModuleList(nn.Linear(width, 4 * width) for _ in range(layers))
        self.narrow = nn.ModuleList(nn.Linear(4 * width, width) for _ in range(layers))
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for place, (mixing, wide, narrow) in enumerate(zip(self.mixing, self.wide, self.narrow, strict=True)):
            x = x + self._attend(mixing(self.norms[2 * place](x)))
            hidden = nn.functional.gelu(wide(self.norms[2 * place + 1](x)))
            x = x + nn.functional.dropout(narrow(hidden), 0.1, self.training)
        return self.head(x.mean(1))

    def _attend(self, mixed: torch.Tensor) -> torch.Tensor:
        batch, length, width = mixed.shape
        q, k, v = mixed.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        weights = torch.softmax(q @ k.transpose(-1, -2) / (q.shape[-1] ** 0.5), -1)
        return (weights @ v).transpose(1, 2).reshape(batch, length, width // 3)


class _Recommender(nn.Module):
    """Embedding bags, pairwise interaction and an MLP, as in DLRM."""

    def __init__(self, tables: int = 8, dim: int = 16) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(1000, dim, mode="sum") for _ in range(tables))
        self.top = nn.Sequential(nn.Linear(tables * tables, 32), nn.ReLU(), nn.Linear(32, 10))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        looked_up = torch.stack([table(rows[:, place]) for place, table in enumerate(self.tables)], dim=1)
        return self.top((looked_up @ looked_up.transpose(1, 2)).flatten(1))


def _layers(depth: int = 8, width: int = 64) -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(width, width), nn.ReLU()) for _ in range(depth)), nn.Linear(width, 10)
    )


Make = Callable[[Any], tuple[nn.Module, torch.Tensor]]
MODELS: dict[str, Make] = {
    "mlp": lambda device: (_layers(), torch.randn(BATCH, 64, device=device)),
    "convolutions": lambda device: (_Convolutions(), torch.randn(BATCH, 3, 16, 16, device=device)),
    "transformer": lambda device: (_Transformer(), torch.randint(1000, (BATCH, 16), device=device)),
    "recommender": lambda device: (_Recommender(), torch.randint(1000, (BATCH, 8, 4), device=device)),
}
OPTIMIZERS = {"mlp": torch.optim.SGD, "recommender": torch.optim.Adagrad}


def make_step(name: str, device: Any) -> Callable[[], None]:
    """One training step of the model ``name``: forward, loss, backward, foreach optimizer (default: AdamW)."""
    torch.manual_seed(0)
    model, data = MODELS[name](device)
    model.to(device).train()
    labels = torch.randint(10, (BATCH,), device=device)
    optimizer = OPTIMIZERS.get(name, torch.optim.AdamW)(model.parameters(), lr=1e-3, foreach=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(data), labels).backward()
        optimizer.step()

    return step
