"""Optimizer steps as a capture runs them. Imports ``torch``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch


def adamw(parameters: list[torch.nn.Parameter]) -> Callable[[], Any]:
    """Return the step of AdamW on the parameters themselves, in the form that PyTorch selects on a GPU."""
    return torch.optim.AdamW(parameters, lr=1e-4).step


def mixed_adamw(parameters: list[torch.nn.Parameter]) -> Callable[[], Any]:
    """Return the update of :class:`MixedAdamW`."""
    return MixedAdamW(parameters).update


class MixedAdamW(torch.optim.Optimizer):
    """Optimizer of 16-bit parameters with FP32 master weights, as ``Float16OptimizerWithFloat16Params`` of Megatron-LM.

    Gradients are copied to FP32, for FP16 divided by the loss scale and checked (which the host waits for), AdamW
    updates the master weights, and they are copied back.
    """

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        self.narrow = list(parameters)
        super().__init__(self.narrow, {"lr": 1e-4})
        self.masters = [torch.nn.Parameter(each.detach().to(torch.float32)) for each in self.narrow]
        self.inner = torch.optim.AdamW(self.masters, lr=1e-4)
        self.state = self.inner.state
        self.values = [each.detach() for each in self.narrow]
        self.scaled = self.narrow[0].dtype is torch.float16
        self.found, self.inverse_scale = (torch.zeros(1, device=self.narrow[0].device) for _ in range(2))
        for master in self.masters:
            master.grad = torch.empty_like(master)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Run :meth:`update`, with the hooks of optimizers."""
        self.update()

    def update(self) -> None:
        """Run one step on the parameters with gradients."""
        there = [place for place, each in enumerate(self.narrow) if each.grad is not None]
        gradients = [self.narrow[place].grad.to(torch.float32) for place in there]  # type: ignore[union-attr]
        if self.scaled:
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, self.found, self.inverse_scale)
            self.found.item()
        for master in self.masters:
            master.grad = None
        for place, gradient in zip(there, gradients, strict=True):
            self.masters[place].grad = gradient
        self.inner.step()
        torch._foreach_copy_(self.values, [each.detach() for each in self.masters])
