"""Random tensors for measurements (on zeros, chips draw less power and run faster), and calls on them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

TORCH = True
DeviceCall = Callable[[], Any]
DTYPES = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}


def random(shape: Sequence[int], dtype: str, device: Any) -> torch.Tensor:
    """Normally distributed values of shape ``shape``."""
    return torch.randn(tuple(shape), dtype=DTYPES[dtype], device=device)


def indices(rows: int, count: int, device: Any) -> torch.Tensor:
    """``count`` uniformly distributed row numbers below ``rows``, int64."""
    return torch.randint(rows, (count,), device=device)


def allow_tf32(allowed: bool) -> None:
    """Allow or forbid TF32 units for float32 products and convolutions."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed
