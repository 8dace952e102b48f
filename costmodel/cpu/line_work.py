"""Work of a convolution with a long window by Winograd's filtering along one axis, for the roofline.

The window is a row of pieces of r taps. Tiles of r outputs take 2 r - 1 products for each piece instead of r * r, and
the transformed input of one piece is shared by all others (kernels: ``schedules/kernels/line_winograd.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from costmodel.cpu.register_tile import CoreWork, accumulators, product_loads, vector_lanes
from costmodel.cpu.winograd_work import WinogradWork
from costmodel.machines.machine_records import Machine
from costmodel.operators.layers import Conv2d

# Supported numbers of taps of a piece.
PIECES = (3, 4)
# Windows with fewer taps (per phase) are left to other algorithms, 3x3 windows to two-dimensional tiles; with more
# phases the generated code is too large.
_LEAST_TAPS, _MOST_PHASES = 3, 8
# Largest share of the products of direct sums for which the transforms pay off.
_MOST_PRODUCTS = 0.8


@dataclass(frozen=True)
class Lines:
    """Decomposition of ``conv`` into lines along ``axis`` (0: down the rows) and pieces of ``taps``: a line is computed
    in tiles of ``taps`` outputs. A stride along the line gives phases, each with its own window.
    """

    conv: Conv2d
    taps: int
    axis: int

    @property
    def positions(self) -> int:
        """Products of a tile and a piece."""
        return 2 * self.taps - 1

    @property
    def phases(self) -> int:
        """Number of phases: distance in inputs between neighbouring outputs of a line."""
        return self.conv.stride[self.axis]

    @property
    def pieces(self) -> int:
        """Pieces of a phase's window; the last is padded with zeros."""
        return -(-self.conv.kernel[self.axis] // (self.phases * self.taps))

    @property
    def across(self) -> int:
        """Taps of the window across the lines."""
        return self.conv.kernel[1 - self.axis]

    @property
    def outputs(self) -> tuple[int, int]:
        """Outputs along a line, and number of lines."""
        size = (self.conv.out_height, self.conv.out_width)
        return size[self.axis], size[1 - self.axis]

    @property
    def tiles(self) -> int:
        """Tiles of a line."""
        return -(-self.outputs[0] // self.taps)

    @property
    def steps(self) -> int:
        """Products summed per position of a tile and output channel."""
        return self.conv.in_channels * self.phases * self.pieces * self.across

    def place(self, along: Any, across: Any) -> tuple[Any, Any]:
        """Row and column from positions along and across the lines."""
        return (along, across) if self.axis == 0 else (across, along)

    def source_lines(self, lines: int) -> int:
        """Input lines, padding included, read by ``lines`` output lines."""
        conv, other = self.conv, 1 - self.axis
        return (lines - 1) * conv.stride[other] + (self.across - 1) * conv.dilation[other] + 1

    @property
    def window(self) -> Conv2d:
        """Convolution whose weights are those of one position: (taps across x pieces) x phases."""
        size = (self.across * self.pieces, self.phases)
        return replace(
            self.conv, kernel=size, stride=(1, 1), dilation=(1, 1), height=size[0], width=size[1], padding=(0, 0, 0, 0)
        )

    @property
    def applies(self) -> bool:
        """True if a kernel exists and saves products."""
        conv, axis = self.conv, self.axis
        plain = conv.dtype == "float32" and conv.groups == 1 and not conv.gated and conv.prologue is None
        if not plain or conv.dilation[axis] > 1 or conv.stride[axis] > _MOST_PHASES or self.tiles < 2:
            return False
        products = self.pieces * self.phases * self.positions
        long_window = conv.kernel[axis] >= (_LEAST_TAPS + (self.across > 1)) * self.phases
        return long_window and products < _MOST_PRODUCTS * conv.kernel[axis] * self.taps


def lines_of(conv: Conv2d) -> Iterator[Lines]:
    """All decompositions of ``conv`` into lines that apply."""
    for taps in PIECES:
        yield from (lines for axis in (0, 1) if (lines := Lines(conv, taps, axis)).applies)


def line_work(lines: Lines, machine: Machine) -> WinogradWork:
    """Work of ``lines``; ``ValueError`` on a machine without a vector unit. Transforms are priced as dense matrices;
    with few channels, stored unblocked, they run value by value.
    """
    if machine.vector is None:
        raise ValueError(f"{machine.name} has no vector unit: transforms cannot be priced")
    conv, lanes, size = lines.conv, vector_lanes(machine, lines.conv.dtype), machine.vector.register_bytes
    in_blocks = -(-conv.in_channels // lanes) if conv.in_channels >= lanes // 2 else conv.in_channels
    out_blocks, count = -(-conv.out_channels // lanes), lines.positions
    tiles = conv.batch * lines.tiles * lines.outputs[1]
    sources = (lines.tiles + lines.pieces - 1) * lines.source_lines(lines.outputs[1])
    ins, outs = conv.batch * sources * lines.phases * in_blocks, tiles * out_blocks
    products = outs * count * lines.steps
    loads = products * product_loads(out_blocks, lines.tiles, accumulators(machine.vector))
    slot = 2 * lanes
    residual = outs * lines.taps if conv.epilogue.residual else 0
    constants = 4 * conv.out_channels * conv.epilogue.constants
    return WinogradWork(
        outputs=lines.taps,
        tiles=tiles,
        transform=CoreWork(ins * count * (count - 1) * slot, ins * count * size, ins * count * size, ins, "float32"),
        products=CoreWork(products * slot, loads * size, outs * count * size, outs, "float32"),
        finish=CoreWork(
            outs * lines.taps * count * slot,
            (outs * count + residual) * size,
            outs * lines.taps * size,
            outs,
            "float32",
        ),
        weight_bytes=count * lines.steps * out_blocks * size + constants,
        tile_bytes=max(1, ins * count * size // tiles),
    )
