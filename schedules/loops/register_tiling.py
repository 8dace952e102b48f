"""Choices of register tiles and row blocks that fit the registers and the caches.

Every function returns a deterministic, non-empty list.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

from costmodel.operators.layers import Conv2d
from schedules.contract.cpu_target import CpuTarget

# FMA units have a latency of 4 and 2 ports: fewer accumulators than this leave them idle.
_LATENCY_HIDING = 8
# Registers for the inputs in flight of a depthwise tile.
_INPUTS = 4
# Unrolled steps of a reduction in the inner loop.
UNROLLS = (2, 4, 8)
# Limit of unrolled taps of a row times steps for a register tile: that of a 7x7 window in eight steps. A 3x39 window in
# eight steps took 21 s to compile, though a few steps are enough to hide the overhead of the loop.
_WRITTEN_OUT = 56


class RegisterTile(NamedTuple):
    """Sums of ``out_blocks`` output blocks x ``columns`` in registers, with ``unroll`` steps of the sum unrolled."""

    out_blocks: int
    columns: int
    unroll: int


def register_tiles(
    out_blocks: int, extent: int, cpu: CpuTarget, most: int = 8, sizes: Collection[int] | None = None
) -> list[tuple[int, int]]:
    """Return (output blocks, columns) whose accumulators, weights and one broadcast input fit the registers; never
    empty.

    ``sizes``: allowed numbers of output blocks of a tile, including 1 (None: all up to ``most``).
    """
    found: list[tuple[int, int]] = []
    for size in range(1, min(most, out_blocks) + 1):
        if sizes is not None and size not in sizes:
            continue
        widest = (cpu.registers - 1) // size - 1
        found += [(size, width) for width in tile_widths(extent, widest)]
    busy = [tile for tile in found if tile[0] * tile[1] >= _LATENCY_HIDING]
    return busy or found


def tile_widths(extent: int, widest: int) -> list[int]:
    """Return the widest tile, the widest that divides ``extent``, and the widest balanced one."""
    if widest < 1:
        return []
    widest = min(widest, extent)
    divisor = max(width for width in range(1, widest + 1) if extent % width == 0)
    balanced = -(-extent // -(-extent // widest))
    return sorted({width for width in (widest, divisor, balanced) if 2 * width >= widest}, reverse=True)


def depthwise_widths(conv: Conv2d, cpu: CpuTarget, taps: int | None = None) -> list[int]:
    """Return columns of the depthwise register tile: sums, ``taps`` (None: those of one row) and the inputs in flight
    must fit.
    """
    widest = max(1, cpu.registers - (taps or conv.kernel[1]) - _INPUTS)
    return sorted({*tile_widths(conv.out_width, widest), *tile_widths(conv.out_width, max(1, widest // 2))})


def window_unrolls(columns: int, unrolls: Sequence[int] = UNROLLS) -> list[int]:
    """Return those of ``unrolls``, steps over input channels, whose code size is acceptable if each step has the
    ``columns`` taps of a row; never empty.
    """
    return [unroll for unroll in unrolls if unroll * columns <= _WRITTEN_OUT] or [1]


def row_blocks(height: int) -> list[int]:
    """Return row tiles: powers of two, the divisors of the height and the whole image."""
    small = {rows for rows in (1, 2, 4, 8, 14, 16, 28) if rows <= height}
    return sorted({rows for rows in small if height % rows == 0 or rows <= 4} | {height, -(-height // 2)})
