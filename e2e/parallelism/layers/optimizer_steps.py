"""Optimizer steps as a capture runs them. Imports ``torch``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def adamw(parameters: list[torch.nn.Parameter]) -> Callable[[], Any]:
    """AdamW on the parameters themselves, in the form that PyTorch chooses on a GPU."""
    return torch.optim.AdamW(parameters, lr=1e-4).step


def mixed_adamw(parameters: list[torch.nn.Parameter]) -> Callable[[], Any]:
    """16-bit parameters with FP32 master weights, as ``Float16OptimizerWithFloat16Params`` of Megatron-LM.

    Gradients are copied to FP32, for FP16 divided by the loss scale and checked (which the host waits for), AdamW
    updates the master weights, and they are copied back.
    """
    masters = [torch.nn.Parameter(each.detach().to(torch.float32)) for each in parameters]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    values = [each.detach() for each in parameters]
    scaled = parameters[0].dtype is torch.float16
    found, inverse_scale = (torch.zeros(1, device=parameters[0].device) for _ in range(2))
    for master in masters:
        master.grad = torch.empty_like(master)

    def step() -> None:
        gradients = [each.grad.to(torch.float32) for each in parameters if each.grad is not None]
        if scaled:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, inverse_scale)
            found.item()
        for master, gradient in zip(masters, gradients, strict=True):
            master.grad = gradient
        optimizer.step()
        torch._foreach_copy_(values, [each.detach() for each in masters])

    return step
