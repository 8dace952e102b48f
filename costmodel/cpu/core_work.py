"""Work of one kernel inside a core, for the roofline: vector lanes, operands through L1, Winograd's algorithm.

A multiply-accumulate needs its operands in registers or at a load port. A kernel keeps a tile of accumulators in
registers, so that each loaded vector serves several of them; the remaining loads go through L1 and can limit the
kernel well below the arithmetic peak, above all in depthwise convolutions, which reuse little.

**Winograd's minimal filtering** of a 3x3 convolution: tiles of m x m outputs are computed from n x n products,
n = m + 2, instead of 9 m^2: the input is transformed, multiplied with transformed weights position by position, and
transformed back. The products are fewer, but the transforms are additions, and n^2 values take the place of m^2
between the steps and of 9 in the weights. (Lavin and Gray, CVPR 2016; kernels:
``schedules/kernels/winograd_conv2d.py``.)

**Lines**: a convolution with a long window by Winograd's filtering along one axis. The window is a row of pieces of r
taps. Tiles of r outputs take 2 r - 1 products for each piece instead of r * r, and the transformed input of one piece
is shared by all others (kernels: ``schedules/kernels/winograd_conv2d.py``).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from costmodel.machines.machine_records import Machine, VectorUnit
from costmodel.operators.layers import ChannelNorm, Conv2d, Dense, Pool2d, element_bytes

UnfusedLayer = Conv2d | Pool2d | Dense | ChannelNorm
# Registers used for operands, broadcasts and addresses rather than accumulators.
_OPERAND_REGISTERS = 4
# Bytes of an accumulator, and of the neighbouring values that a dot product adds to it.
_WORD_BYTES = 4
# Rows of a tile register, and depth of a tile of weights; number of tiles of sums that leaves registers for operands.
_TILE_ROWS, _TILE_SUMS = 16, 4
_LEAST_ROWS, _LEAST_CHANNELS = 4, 8
_TILE_FEATURES = {"bfloat16": "amx_bf16", "int8": "amx_int8"}
# Vector operations to widen a narrow value to FP32, to pair it with its neighbour, and to round.
_WIDENING, _PAIRING, _ROUNDING = 2, 1, 1


@dataclass(frozen=True)
class CoreWork:
    """Work of one run of an operator inside the cores.

    flops: including the unused lanes of the last channel block, which are computed too; excluding the taps of a window
    that lie in its padding, which are neither computed nor loaded.

    load_bytes, store_bytes: whole vector registers through L1's ports (a broadcast occupies one like a vector).

    units: equal pieces of work that threads can share (rows of channel blocks).

    arithmetic: dtype in which the flops are computed.
    """

    flops: float
    load_bytes: float
    store_bytes: float
    units: int
    arithmetic: str


def core_work(operator: UnfusedLayer, machine: Machine, tiles: bool = True) -> CoreWork:
    """Work of ``operator`` on ``machine``; without a vector unit there is neither padding nor operand traffic.

    ``tiles``: the kernel may multiply in tile registers. On a CPU with tile registers the rate of their dtype is that
    of the tiles; dot products of vectors are then priced as one FP32 multiply-add per 32-bit word.
    """
    lanes = vector_lanes(machine, operator.dtype)
    blocks, padding = _blocks(_vector_channels(operator), lanes)
    shared = _columns_share(operator, lanes)
    padding *= shared
    groups = _groups(operator)
    pixels = _pixels(operator)
    units = (
        groups * blocks * (operator.batch * operator.out_height if isinstance(operator, Conv2d | Pool2d) else pixels)
    )
    inside = _inside(operator)
    flops = operator.flops * padding * inside
    products = is_product(operator)
    narrow = element_bytes(operator.dtype) < _WORD_BYTES
    # Narrow dtypes only have dot products; everything else is computed in FP32.
    arithmetic = "float32" if narrow and not products else operator.dtype
    if machine.vector is None:
        return CoreWork(flops, 0.0, 0.0, units, arithmetic)
    outputs = groups * blocks * pixels
    tiled = tiles and multiplies_in_tiles(operator, machine.vector)
    loads = outputs * _loads_per_output(operator, blocks, machine.vector, tiled) * inside * shared
    if products and not tiled and _TILE_FEATURES.get(operator.dtype) in machine.vector.features:
        flops, arithmetic = flops * element_bytes(operator.dtype) / _WORD_BYTES, "float32"
    if narrow and not products:
        flops = 2 * lanes * _narrow_operations(operator, flops / (2 * lanes), loads, outputs)
    if operator.residual_bytes:
        loads += outputs
    size = machine.vector.register_bytes
    return CoreWork(flops, float(loads * size), float(outputs * size), units, arithmetic)


def _narrow_operations(operator: UnfusedLayer, operations: float, loads: float, outputs: int) -> float:
    """Vector operations on narrow values equivalent to ``operations`` on FP32: a depthwise convolution processes as
    many neighbouring taps of a row at a time as fill a 32-bit word. As in `winograd_work.py`, each takes the slot of a
    multiply-add.
    """
    preparing, group = _WIDENING, _WORD_BYTES // element_bytes(operator.dtype)
    if isinstance(operator, Conv2d) and operator.kernel[1] > 1 and operator.dilation[1] == 1:
        preparing, operations = _PAIRING, operations * -(-operator.kernel[1] // group) / operator.kernel[1]
    return operations + preparing * loads + _ROUNDING * outputs


def is_product(operator: UnfusedLayer) -> bool:
    """True if the operator sums over channels: a dense or grouped convolution, or a fully connected layer."""
    return isinstance(operator, Dense) or (isinstance(operator, Conv2d) and not operator.is_depthwise)


def vector_lanes(machine: Machine, dtype: str) -> int:
    """Values of one vector register that are accumulated at once (accumulators have at least 32 bits)."""
    if machine.vector is None:
        return 1
    return max(machine.vector.register_bytes // max(element_bytes(dtype), 4), 1)


def _blocks(channels: int, lanes: int) -> tuple[int, float]:
    """Number of vectors that hold ``channels`` values, and ratio of computed to useful lanes."""
    blocks = -(-channels // lanes)
    return blocks, blocks * lanes / channels


def lane_columns(conv: Conv2d, lanes: int) -> tuple[int, ...]:
    """Numbers of neighbouring columns that one vector of sums can hold when output channels are few, limited to those
    that need fewer products than separate columns (kernels: ``schedules/kernels/few_channels.py``).
    """
    plain = conv.dtype == "float32" and conv.groups == 1 and not conv.gated and conv.prologue is None
    if not plain or conv.dilation[1] > 1:
        return ()
    return tuple(
        columns
        for columns in (2, 4, 8, 16)
        if conv.out_channels * columns <= lanes
        and 2 * columns <= conv.out_width
        and columns_reach(conv, columns) < columns * conv.kernel[1]
    )


def columns_reach(conv: Conv2d, columns: int) -> int:
    """Number of inputs of a row spanned by ``columns`` neighbouring outputs."""
    return (columns - 1) * conv.stride[1] + conv.kernel[1]


def _columns_share(operator: UnfusedLayer, lanes: int) -> float:
    """Least ratio of products with vectors of columns to products with one column per vector."""
    if not isinstance(operator, Conv2d):
        return 1.0
    shares = (columns_reach(operator, each) / (each * operator.kernel[1]) for each in lane_columns(operator, lanes))
    return min(shares, default=1.0)


def _vector_channels(operator: UnfusedLayer) -> int:
    """Extent of the dimension that lies along the vector: output channels (of one group)."""
    if isinstance(operator, Dense):
        return operator.out_features
    if isinstance(operator, Pool2d | ChannelNorm):
        return operator.channels
    return operator.out_channels if operator.is_depthwise else operator.out_channels // operator.groups


def _groups(operator: UnfusedLayer) -> int:
    return operator.groups if isinstance(operator, Conv2d) and not operator.is_depthwise else 1


def _pixels(operator: UnfusedLayer) -> int:
    if isinstance(operator, Dense):
        return operator.rows
    if isinstance(operator, ChannelNorm):
        return operator.batch * operator.height * operator.width
    return operator.batch * operator.out_height * operator.out_width


def _inside(operator: UnfusedLayer) -> float:
    """Share of the taps of all windows that lie inside the image: at a border the loop is shorter, zeros are
    not added.
    """
    if not isinstance(operator, Conv2d):
        return 1.0
    top, left, _, _ = operator.padding
    share = 1.0
    for axis, (size, before, outputs) in enumerate(
        ((operator.height, top, operator.out_height), (operator.width, left, operator.out_width))
    ):
        kernel, stride, dilation = operator.kernel[axis], operator.stride[axis], operator.dilation[axis]
        read = sum(taps_inside(size, outputs, stride, tap * dilation - before) for tap in range(kernel))
        share *= read / (kernel * outputs)
    return share


def taps_inside(size: int, outputs: int, stride: int, offset: int) -> int:
    """Number of the ``outputs`` positions ``stride * i + offset`` that lie in [0, ``size``)."""
    first = max(0, -(offset // stride))  # the least i with stride * i + offset >= 0
    last = (size - 1 - offset) // stride
    return max(0, min(outputs - 1, last) - first + 1)


def _loads_per_output(operator: UnfusedLayer, blocks: int, vector: VectorUnit, tiled: bool) -> float:
    """Vector loads per vector of outputs, with the best register tile.

    For values narrower than 32 bits a product takes as many neighbours per step as fill 32 bits (dot products).
    """
    sums, group = accumulators(vector), max(1, _WORD_BYTES // element_bytes(operator.dtype))
    if isinstance(operator, ChannelNorm):
        return 3.0  # for the mean, for the variance, for the result
    if isinstance(operator, Dense):
        steps = -(-operator.in_features // group)
        return tile_loads(steps, blocks, operator.rows) if tiled else steps * product_loads(blocks, operator.rows, sums)
    if isinstance(operator, Conv2d) and not operator.is_depthwise:
        reduction = operator.in_channels // operator.groups * operator.kernel[0] * operator.kernel[1]
        columns = _pixels(operator) if operator.is_pointwise else operator.out_width
        steps = -(-reduction // group)
        return tile_loads(steps, blocks, columns) if tiled else steps * product_loads(blocks, columns, sums)
    weighted = isinstance(operator, Conv2d)
    return _window_loads(operator.kernel, operator.stride[1], min(operator.out_width, sums), weighted)


def multiplies_in_tiles(operator: UnfusedLayer, vector: VectorUnit) -> bool:
    """True if the product uses the tile registers of AMX: narrow dtype, no groups, more channels than an image has, and
    more rows than vectors handle equally well.
    """
    if _TILE_FEATURES.get(operator.dtype) not in vector.features or not is_product(operator):
        return False
    if isinstance(operator, Dense):
        return operator.rows >= _LEAST_ROWS
    return isinstance(operator, Conv2d) and operator.groups == 1 and operator.in_channels >= _LEAST_CHANNELS


def tile_loads(steps: int, blocks: int, columns: int) -> float:
    """Tile rows loaded per row of sums in ``steps`` steps of 32 bits: a tile takes sixteen at once, and a block of up
    to four tiles of sums loads each of its tiles of data and of weights once.
    """
    tiles = -(-columns // _TILE_ROWS)
    rows = columns / tiles
    shapes = ((b, c) for b in range(1, _TILE_SUMS + 1) for c in range(1, _TILE_SUMS // b + 1))
    depths = -(-steps // _TILE_ROWS)
    weight_rows = min(_TILE_ROWS, steps)
    return depths * min((c * rows + b * weight_rows) / (b * c * rows) for b, c in shapes if b <= blocks and c <= tiles)


def accumulators(vector: VectorUnit) -> int:
    """Number of registers used as accumulators."""
    return max(vector.registers - _OPERAND_REGISTERS, 1)


def product_loads(blocks: int, columns: int, sums: int) -> float:
    """Loads per multiply-accumulate of a tile of ``b`` weight vectors by ``c`` broadcasts: the least (b + c) / bc.

    ``sums``: registers available as accumulators.
    """
    tiles = ((b, min(columns, sums // b)) for b in range(1, min(blocks, sums) + 1))
    return min((b + c) / (b * c) for b, c in tiles)


def _window_loads(kernel: tuple[int, int], stride: int, columns: int, weighted: bool) -> float:
    """Loads per output of a window over ``columns`` neighbours: each input vector once a row, the taps once a tile."""
    height, width = kernel
    reach = min((columns - 1) * stride + width, columns * width)
    taps = height * width if weighted else 0
    return (height * reach + taps) / columns


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
