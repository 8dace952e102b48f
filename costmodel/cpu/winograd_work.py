"""Work of a 3x3 convolution inside a core by Winograd's minimal filtering, for the roofline.

Tiles of m x m outputs are computed from n x n products, n = m + 2, instead of 9 m^2: the input is transformed,
multiplied with transformed weights position by position, and transformed back. The products are fewer, but the
transforms are additions, and n^2 values take the place of m^2 between the steps and of 9 in the weights. (Lavin and
Gray, CVPR 2016; kernels: ``schedules/kernels/winograd_conv2d.py``.)
"""

from __future__ import annotations

from dataclasses import dataclass

from costmodel.cpu.register_tile import CoreWork, accumulators, product_loads, vector_lanes
from costmodel.machines.machine_records import Machine
from costmodel.operators.layers import Conv2d, element_bytes

TAPS = 3
# Supported numbers of outputs along each side of a tile.
OUTPUTS = (2, 4)


@dataclass(frozen=True)
class WinogradWork:
    """Work of one run of a convolution in ``tiles`` tiles of ``outputs`` x ``outputs``, all images together."""

    outputs: int
    tiles: int
    # The three steps.
    transform: CoreWork
    products: CoreWork
    finish: CoreWork
    # Bytes of the transformed weights and of the epilogue's operands.
    weight_bytes: int
    # Bytes of one tile of the transformed input.
    tile_bytes: int


def winograd_applies(conv: Conv2d, lanes: int) -> bool:
    """True if a Winograd kernel may compute ``conv``; inputs with few channels (first layers) are read in plain NCHW.

    It computes in float32, whatever the storage dtype: in a narrower dtype, transformed values would be rounded where
    they have grown.
    """
    plain = (conv.kernel, conv.stride, conv.dilation) == ((TAPS, TAPS), (1, 1), (1, 1))
    return (
        conv.dtype in ("float32", "bfloat16")
        and plain
        and conv.groups == 1
        and not conv.gated
        and conv.in_channels >= lanes // 2
    )


def transform_operations(outputs: int) -> tuple[int, int]:
    """Vector operations of the input transform of a tile, and of the output transform of its products.

    The points are zero, infinity and pairs of both signs, which share even and odd parts.
    """
    count, pairs = outputs + TAPS - 1, outputs // 2
    return 2 * count * 2 * pairs * (pairs + 1), (count + outputs) * pairs * (outputs + 2)


def winograd_work(conv: Conv2d, machine: Machine, outputs: int) -> WinogradWork:
    """Work of ``conv``, for which :func:`winograd_applies`; ``ValueError`` on a machine without a vector unit."""
    if machine.vector is None:
        raise ValueError(f"{machine.name} has no vector unit: transforms cannot be priced")
    lanes, size = vector_lanes(machine, conv.dtype), machine.vector.register_bytes
    in_blocks, out_blocks = -(-conv.in_channels // lanes), -(-conv.out_channels // lanes)
    positions = (outputs + TAPS - 1) ** 2
    tiles = conv.batch * -(-conv.out_height // outputs) * -(-conv.out_width // outputs)
    into, out_of = transform_operations(outputs)
    ins, outs = tiles * in_blocks, tiles * out_blocks
    products = outs * positions * conv.in_channels
    loads = products * product_loads(out_blocks, tiles, accumulators(machine.vector))
    # An addition takes a slot of the vector units as a multiply-add does: both count as two operations a lane.
    slot = 2 * lanes
    residual = outs * outputs**2 if conv.epilogue.residual else 0
    constants = conv.weight_bytes - conv.out_channels * conv.in_channels * TAPS**2 * element_bytes(conv.dtype)
    return WinogradWork(
        outputs=outputs,
        tiles=tiles,
        transform=CoreWork(ins * into * slot, ins * positions * size, ins * positions * size, ins, "float32"),
        products=CoreWork(products * slot, loads * size, outs * positions * size, outs, "float32"),
        finish=CoreWork(
            outs * out_of * slot, (outs * positions + residual) * size, outs * outputs**2 * size, outs, "float32"
        ),
        weight_bytes=positions * conv.in_channels * out_blocks * size + constants,
        tile_bytes=positions * in_blocks * size,
    )
