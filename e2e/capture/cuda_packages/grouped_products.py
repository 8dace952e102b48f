"""``grouped_gemm``: products of groups of rows, such as the tokens of experts."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from e2e.capture.cuda_packages.kernels import OPERATORS


def gmm(a: Any, b: Any, batch_sizes: torch.Tensor, trans_b: bool = False, *_: Any, **__: Any) -> Any:
    """Multiply each group of the rows of ``a`` by its matrix of ``b``."""
    bounds = batch_sizes.to(device=a.device, dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return F.grouped_mm(a, b.transpose(-2, -1) if trans_b else b, offs=bounds)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, count: int) -> torch.Tensor:
        ctx.shape = rows.shape
        return OPERATORS.one_pass("permute", [rows], [rows.new_empty(count, rows.shape[1])])[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        like = gradients[0].new_empty(ctx.shape)
        return OPERATORS.one_pass("unpermute", [gradients[0]], [like])[0], None


def permute(rows: Any, indices: torch.Tensor, *_: Any, **__: Any) -> Any:
    """Sort copies of the rows by expert; return them and the map of rows."""
    return _Permute.apply(rows, indices.numel()), indices.flatten()


def unpermute(rows: Any, row_map: torch.Tensor, probs: Any = None, *_: Any, **__: Any) -> Any:
    """Sum the copies of each row, weighted by ``probs``."""
    return _Permute.apply(rows, rows.shape[0] if probs is None else probs.shape[0])


_OPS = {"gmm": gmm, "permute": permute, "unpermute": unpermute}
MODULES: dict[str, dict[str, Any]] = {"grouped_gemm": {}, "grouped_gemm.ops": _OPS}
