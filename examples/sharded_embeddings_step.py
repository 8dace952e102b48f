"""DLRM with tables spread over the ranks: ``--script examples/sharded_embeddings_step.py:make_step --gpus 8``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Exchange(torch.autograd.Function):
    """Each rank looks up its tables for the whole batch; everyone gets all tables for its part of the batch."""

    @staticmethod
    def forward(ctx, looked_up: torch.Tensor, received_sizes: list[int], sent_sizes: list[int]) -> torch.Tensor:
        ctx.sizes = (received_sizes, sent_sizes)
        received = looked_up.new_empty(sum(received_sizes))
        dist.all_to_all_single(received, looked_up.flatten(), received_sizes, sent_sizes)
        return received

    @staticmethod
    def backward(ctx, gradient: torch.Tensor):
        received_sizes, sent_sizes = ctx.sizes
        returned = gradient.new_empty(sum(sent_sizes))
        dist.all_to_all_single(returned, gradient.contiguous(), sent_sizes, received_sizes)
        return returned, None, None


class Tables(nn.Module):
    """The tables of this rank, ``rank, rank + world size ...`` of all."""

    def __init__(self, tables: int, rows: int, width: int) -> None:
        super().__init__()
        self.width, self.world = width, dist.get_world_size()
        self.held = [len(range(rank, tables, self.world)) for rank in range(self.world)]
        mine = self.held[dist.get_rank()]
        self.bags = nn.ModuleList(nn.EmbeddingBag(rows, width, mode="sum") for _ in range(mine))

    def forward(self, indices: torch.Tensor) -> torch.Tensor:
        batch = indices.shape[1]
        part = batch // self.world
        looked_up = torch.stack([bag(index) for bag, index in zip(self.bags, indices, strict=True)])
        by_rank = looked_up.unflatten(1, (self.world, part)).transpose(0, 1)
        sent = [part * self.width * len(self.bags)] * self.world
        received = Exchange.apply(by_rank.reshape(-1), [part * self.width * held for held in self.held], sent)
        return received.view(-1, part, self.width).transpose(0, 1)


class Ranking(nn.Module):
    """Dense features and embeddings to a click probability."""

    def __init__(self, tables: int, width: int) -> None:
        super().__init__()
        self.bottom = nn.Sequential(nn.Linear(13, 512), nn.ReLU(), nn.Linear(512, width), nn.ReLU())
        self.top = nn.Sequential(nn.Linear((tables + 1) * width, 1024), nn.ReLU(), nn.Linear(1024, 1))

    def forward(self, dense: torch.Tensor, embedded: torch.Tensor) -> torch.Tensor:
        return self.top(torch.cat([self.bottom(dense).unsqueeze(1), embedded], dim=1).flatten(1))


def make_step(batch_size: int = 4096, tables: int = 26, rows: int = 1_000_000, width: int = 128, pooling: int = 20):
    """``batch_size`` per rank. The dense part is data parallel, the tables are not."""
    dist.init_process_group("nccl")
    held = Tables(tables, rows, width).cuda()
    dense_part = DistributedDataParallel(Ranking(tables, width).cuda())
    optimizer = torch.optim.SGD([*held.parameters(), *dense_part.parameters()], lr=0.1)
    dense = torch.randn(batch_size, 13, device="cuda")
    indices = torch.randint(rows, (len(held.bags), batch_size * dist.get_world_size(), pooling), device="cuda")
    clicks = torch.rand(batch_size, 1, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        scores = dense_part(dense, held(indices))
        nn.functional.binary_cross_entropy_with_logits(scores, clicks).backward()
        optimizer.step()

    return nn.ModuleList([held, dense_part]), step
