"""Tensor parallelism in a node, FSDP2 across nodes (DTensor): ``examples/tensor_parallel_step.py:make_step``."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module
from torch.nn import functional as F


class Attention(nn.Module):
    """Self-attention; each rank of the tensor-parallel group computes some of the heads."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.head = head
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [part(x).unflatten(-1, (-1, self.head)).transpose(1, 2) for part in (self.query, self.key, self.value)]
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Layer(nn.Module):
    """Attention and a feed-forward part, each behind a norm."""

    def __init__(self, width: int, head: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, head)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


# The input of attention is prepared once, so that its three gradients are added up before they are reduced.
PLAN = {
    "attention": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    "attention.query": ColwiseParallel(),
    "attention.key": ColwiseParallel(),
    "attention.value": ColwiseParallel(),
    "attention.out": RowwiseParallel(),
    "up": ColwiseParallel(),
    "down": RowwiseParallel(),
}


def make_step(
    batch_size: int = 4,
    sequence_length: int = 2048,
    layers: int = 24,
    width: int = 2048,
    head: int = 128,
    tensor_parallel: int = 8,
):
    """Four all-reduces per layer: after attention and feed-forward part, in forward and in backward direction."""
    dist.init_process_group("nccl")
    shape = (dist.get_world_size() // tensor_parallel, tensor_parallel)
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(*(Layer(width, head) for _ in range(layers))).to("cuda", torch.bfloat16)
    for layer in model:
        parallelize_module(layer, mesh["tensor"], PLAN)
        fully_shard(layer, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(batch_size, sequence_length, width, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        optimizer.zero_grad()
        model(data).float().square().mean().backward()
        optimizer.step()

    return model, step
