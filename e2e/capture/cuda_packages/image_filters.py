"""CUDA extensions that StyleGAN2, StyleGAN3 and their descendants build when they start: activations with biases, and
filters that resample images, by shape and by the instructions that their kernels issue.

Both filters work on tiles in shared memory (NVlabs/stylegan3, torch_utils/ops/upfirdn2d.cu and filtered_lrelu.cu): a
thread reads a value of a tile for each product or for a few of them, finds its place and stores what it got. A tile
also holds what its filters take beyond its border, which its neighbours compute again: with 12 taps a third more than
the image, where four times fewer pixels come out of 24 taps two thirds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
    # Of the inserted zeros none is multiplied; a product reads the pixel and the tap.
    products = -(-rows // up_y) * -(-columns // up_x)
    count = torch.Size(shape).numel() * (3 * products + _PLACED) + data.numel() * _LOADED
    return OPERATORS.filtered("upfirdn2d", [data], data, shape, count)


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
    tile = _Tile.of(up_taps, up, down_taps, down)
    tiles = torch.Size(planes).numel() * -(-below // tile.height) * -(-across // tile.width)
    count = tiles * tile.instructions(up_taps, up, down_taps, down)
    read = [each for each in (data, bias, signs) if each.numel()]
    output = OPERATORS.filtered("filtered_lrelu", read, data, (*planes, below, across), count)
    of_signs = (*planes, rows, -(-columns // 16) * 4) if write_signs else (0,)
    return output, torch.empty(of_signs, dtype=torch.uint8, device=data.device), 0


# Instructions besides products and reads, counted in the sources: a value loaded into a tile (its place, the border,
# the type), an iteration that finds its place and stores, a value activated (gain, slope, clamp, the sign's two bits).
_LOADED, _PLACED, _ACTIVATED = 14, 12, 10
_TILE_VALUES = 48 * 1024 // 4  # of a tile's two buffers in shared memory
_WORDS = 4  # values that one read of shared memory takes where they lie side by side


@dataclass(frozen=True)
class _Tile:
    """``width`` x ``height`` pixels of the result, and ``columns`` x ``rows`` values between the filters."""

    width: int
    height: int
    columns: int
    rows: int

    @classmethod
    def of(cls, up_taps: torch.Tensor, up: int, down_taps: torch.Tensor, down: int) -> _Tile:
        """Return a tile of 32 columns (16 of four times fewer pixels), as high as shared memory lets it be, as those in
        the source are.
        """
        width, taps = 16 if down == 4 else 32, down_taps.shape[-1]
        columns = -(-(width * down + taps - down) // 4) * 4
        halved = columns / up if up_taps.dim() == 1 else 0  # the values of one dimension filtered, the other not yet
        held = columns + max(halved, width if down_taps.dim() == 1 else 0)
        rows = int((_TILE_VALUES - halved * up_taps.shape[-1]) / held)
        height = max((rows - taps + down) // down, 1)
        return cls(width, height, columns, height * down + taps - down)

    def instructions(self, up_taps: torch.Tensor, up: int, down_taps: torch.Tensor, down: int) -> int:
        """Return the instructions of all threads of a tile, stage by stage."""
        before, after = up_taps.shape[-1], down_taps.shape[-1]
        between, results = self.columns * self.rows, self.width * self.height
        lines, loaded = ((extent + before - 1) / up for extent in (self.rows, self.columns))
        count = _LOADED * lines * loaded + _ACTIVATED * between
        # One read serves the products of `up` values of a filter of one dimension, of four of a filter of two.
        along = before + before / up + 1 + _PLACED
        if up_taps.dim() == 1:
            count += (lines * self.columns + between) / up * along
        else:
            count += between * ((before / up) ** 2 + (before / up) * (before / up + 2) / 4 + _PLACED / 4)
        if down_taps.dim() == 1:
            pair = 2 * after + (after + down) / _WORDS + _PLACED
            return round(count + self.width * self.rows / 2 * pair + results * (2 * after + _PLACED))
        return round(count + results / 2 * (2 * after**2 + after * (after + down) / _WORDS + _PLACED))


def _activated(data: torch.Tensor, *_: Any) -> torch.Tensor:
    OPERATORS.one_pass("filtered_lrelu_act", [data], [data])
    return torch.empty((*data.shape[:-1], -(-data.shape[-1] // 4)), dtype=torch.uint8, device=data.device)


# Name of an extension -> its functions.
EXTENSIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "bias_act_plugin": {"bias_act": _bias_act},
    "upfirdn2d_plugin": {"upfirdn2d": _upfirdn2d},
    "filtered_lrelu_plugin": {"filtered_lrelu": _filtered_lrelu, "filtered_lrelu_act_": _activated},
}
