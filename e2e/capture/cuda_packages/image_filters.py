"""CUDA extensions that StyleGAN2, StyleGAN3 and their descendants build when they start: activations with biases, and
filters that resample images, by shape and by the multiplications that their kernels do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from e2e.capture.cuda_packages.kernels import OPERATORS


def _bias_act(data: torch.Tensor, *others: Any) -> torch.Tensor:
    read = [each for each in others if isinstance(each, torch.Tensor) and each.numel()]
    return OPERATORS.one_pass("bias_act", [data, *read], [data])[0]


def _upfirdn2d(
    data: torch.Tensor, taps: torch.Tensor, up_x: int, up_y: int, down_x: int, down_y: int,
    left: int, right: int, top: int, bottom: int, *_: Any,
) -> torch.Tensor:  # fmt: skip
    *planes, height, width = data.shape
    rows, columns = taps.shape
    shape = (
        *planes,
        (height * up_y + top + bottom - rows + down_y) // down_y,
        (width * up_x + left + right - columns + down_x) // down_x,
    )
    # Of the inserted zeros none is multiplied.
    products = torch.Size(shape).numel() * -(-rows // up_y) * -(-columns // up_x)
    return OPERATORS.filtered("upfirdn2d", [data], data, shape, products)


def _filtered_lrelu(
    data: torch.Tensor, up_taps: torch.Tensor, down_taps: torch.Tensor, bias: torch.Tensor, signs: torch.Tensor,
    up: int, down: int, left: int, right: int, top: int, bottom: int, sx: int, sy: int,
    gain: float, slope: float, clamp: float, flip: bool, write_signs: bool,
) -> tuple[torch.Tensor, torch.Tensor, int]:  # fmt: skip
    """Return the result, the signs that its gradient reads (two bits for each value between the filters), success."""
    *planes, height, width = data.shape
    rows, columns = (extent * up + more for extent, more in ((height, top + bottom), (width, left + right)))
    rows, columns = (extent - up_taps.shape[place] + 1 for extent, place in ((rows, 0), (columns, -1)))
    below, across = ((extent - down_taps.shape[place] + down) // down for extent, place in ((rows, 0), (columns, -1)))
    products = _products(up_taps, -(-up_taps.shape[-1] // up), height * columns, rows * columns)
    products += _products(down_taps, down_taps.shape[-1], rows * across, below * across)
    products = (products + _ACTIVATION * rows * columns) * torch.Size(planes).numel()
    read = [each for each in (data, bias, signs) if each.numel()]
    output = OPERATORS.filtered("filtered_lrelu", read, data, (*planes, below, across), products)
    of_signs = (*planes, rows, -(-columns // 16) * 4) if write_signs else (0,)
    return output, torch.empty(of_signs, dtype=torch.uint8, device=data.device), 0


def _products(taps: torch.Tensor, along: int, one_way: int, both_ways: int) -> int:
    """Return the multiplications of a filter: one dimension after the other if it is separable."""
    if taps.numel() == 1:
        return 0
    return (one_way + both_ways) * along if taps.dim() == 1 else both_ways * along**2


_ACTIVATION = 4  # multiplications whose time a gain, a comparison, a clamp and a sign take: a judgement


def _activated(data: torch.Tensor, *_: Any) -> torch.Tensor:
    OPERATORS.one_pass("filtered_lrelu_act", [data], [data])
    return torch.empty((*data.shape[:-1], -(-data.shape[-1] // 4)), dtype=torch.uint8, device=data.device)


# Name of an extension -> its functions.
EXTENSIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "bias_act_plugin": {"bias_act": _bias_act},
    "upfirdn2d_plugin": {"upfirdn2d": _upfirdn2d},
    "filtered_lrelu_plugin": {"filtered_lrelu": _filtered_lrelu, "filtered_lrelu_act_": _activated},
}
