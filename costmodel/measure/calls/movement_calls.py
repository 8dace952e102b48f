"""Calls of operators that move data, and of optimizers; other operators are in
:mod:`costmodel.measure.calls.operator_calls`.
"""

from __future__ import annotations

from functools import singledispatch
from typing import Any

import torch

from costmodel.measure.calls.sample_tensors import DeviceCall, indices, random
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.device_work import MemoryCopy, OptimizerStep, Rearrangement

TORCH = True
OPTIMIZERS = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


@singledispatch
def make_call(operator: AnyOperator, device: Any) -> DeviceCall | None:
    """Call of ``operator`` on ``device``, or ``None`` if not supported."""
    return None


@make_call.register
def _copy(operator: MemoryCopy, device: Any) -> DeviceCall | None:
    elements = max(operator.size_bytes // 4, 1)
    here = random((elements,), "float32", device)
    if operator.kind == "memset":
        return lambda: here.zero_()
    if operator.kind == "device_to_device":
        other = torch.empty_like(here)
        return lambda: other.copy_(here)
    host = random((elements,), "float32", "cpu")
    if operator.pinned and here.is_cuda:
        host = host.pin_memory()
    if operator.kind == "host_to_device":
        return lambda: here.copy_(host, non_blocking=operator.pinned)
    if operator.kind == "device_to_host":
        return lambda: host.copy_(here, non_blocking=operator.pinned)
    return None


@make_call.register
def _rearrangement(operator: Rearrangement, device: Any) -> DeviceCall | None:
    outer = max(operator.elements // operator.inner, 1)
    if operator.kind == "transpose":
        rows = _divisor(operator.elements)
        x = random((rows, operator.elements // rows), operator.dtype, device)
        return lambda: x.t().contiguous()
    if operator.kind == "concat":
        parts = [
            random((outer // operator.inputs, operator.inner), operator.dtype, device) for _ in range(operator.inputs)
        ]
        return lambda: torch.cat(parts, dim=1)
    x = random((outer, operator.inner), operator.dtype, device)
    if operator.kind in ("tril", "triu"):
        return lambda: getattr(torch, operator.kind)(x)
    if operator.kind == "index":
        rows_wanted = indices(outer, outer, device)
        return lambda: x.index_select(0, rows_wanted)
    if operator.kind == "gather":
        places = indices(operator.inner, operator.elements, device).view(outer, operator.inner)
        return lambda: torch.gather(x, 1, places)
    return None


def _divisor(elements: int) -> int:
    """Largest divisor of ``elements`` up to its square root: rows of the squarest matrix."""
    return next(rows for rows in range(int(elements**0.5), 0, -1) if elements % rows == 0)


@make_call.register
def _optimizer(operator: OptimizerStep, device: Any) -> DeviceCall | None:
    each = operator.elements // operator.tensors

    def tensors() -> list[torch.Tensor]:
        return [random((each,), operator.dtype, device) for _ in range(operator.tensors)]

    if operator.kind in OPTIMIZERS:
        return _fused(OPTIMIZERS[operator.kind], tensors(), tensors())
    one = tensors()
    if operator.kind == "foreach_add":
        other = tensors()
        return lambda: torch._foreach_add_(one, other, alpha=1e-6)
    if operator.kind == "foreach_mul":
        return lambda: torch._foreach_mul_(one, 0.999999)
    if operator.kind == "foreach_addcmul":
        left, right = tensors(), tensors()
        return lambda: torch._foreach_addcmul_(one, left, right, value=1e-6)
    if operator.kind == "foreach_sqrt":
        positive = [value.abs() for value in one]
        return lambda: torch._foreach_sqrt(positive)
    return None


def _fused(optimizer_class: Any, parameters: list[torch.Tensor], gradients: list[torch.Tensor]) -> DeviceCall:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.requires_grad_(True)
        parameter.grad = gradient
    settings = {"momentum": 0.9} if optimizer_class is torch.optim.SGD else {}
    step: DeviceCall = optimizer_class(parameters, lr=1e-6, fused=True, **settings).step
    return step
