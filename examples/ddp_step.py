"""Data parallelism: ``python -m e2e predict --script examples/ddp_step.py:make_step --gpus 64 --gpu h100-sxm``."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def make_step(batch_size: int = 32, width: int = 4096, layers: int = 8):
    """A perceptron whose gradients are averaged while the backward pass still runs."""
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    blocks = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*blocks).cuda(), device_ids=[int(os.environ["LOCAL_RANK"])])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    data = torch.randn(batch_size, width, device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return model, step
