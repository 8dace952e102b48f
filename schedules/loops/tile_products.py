"""Matrix products in the tile registers of AMX as TIR: the use of its eight tiles by a task.

A tile of data has up to 16 rows (pixels of an image, rows of a matrix), each of up to 64 bytes of adjacent input
channels; a tile of weights has one row per group of adjacent channels, 16 outputs wide: the weights of consecutive
steps of a dot product, as packed by :mod:`schedules.loops.weight_packing` and :mod:`schedules.loops.dot_products`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import element_bytes
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.tile_operations import (
    CONFIGURE,
    RELEASE,
    ROW_BYTES,
    STATE_BYTES,
    TILE_BLOCKS,
    TILE_BYTES,
    TILE_ROWS,
    TILES,
    TileNumbers,
    configuration,
    load_symbol,
    product_symbol,
    store_symbol,
    zero_symbol,
)
from schedules.loops import emit
from schedules.loops.dot_products import dot_product
from schedules.loops.emit import Expr
from schedules.loops.issue_slots import PORTS, TILE_CYCLES
from schedules.loops.register_tiling import tile_widths

# Outputs of a tile: 64 bytes of 32-bit sums.
TILE_OUTPUTS = ROW_BYTES // 4
# Blocks of 16 input channels that a row of data may hold: up to two of bfloat16, up to four of bytes.
DEPTHS = (1, 2, 3, 4)
# Cycles until the sums of a product can be added to; a row of data enters each cycle (Intel's optimization manual).
_LATENCY = 52.0
# Vector operations on each row of sums: stored as a tile, loaded, biased, activated, rounded, stored.
_FINISHING = 4.0


@dataclass(frozen=True)
class TileShape:
    """Block of ``row_tiles`` x ``out_blocks`` tiles of sums, of ``rows`` rows each; a step multiplies ``depth_bytes``
    of each row of data.
    """

    row_tiles: int
    out_blocks: int
    rows: int
    depth_bytes: int

    @property
    def numbers(self) -> TileNumbers:
        """Tile registers of the block."""
        return TileNumbers(self.row_tiles, self.out_blocks)

    @property
    def all_rows(self) -> int:
        """Rows of a block."""
        return self.row_tiles * self.rows


class TileProduct:
    """Tiles of one task, from :func:`tile_product`. A block of sums is computed by :meth:`zero`, :meth:`add` for every
    step, and :meth:`finish`.
    """

    def __init__(self, shape: TileShape, dtype: str) -> None:
        self.shape, self._dtype, self._dot = shape, dtype, dot_product(dtype)
        kept = {"disable_lower_builtin": True}  # on the stack, natively 64 bytes of it: never in the workspace pool
        self._state = T.alloc_buffer((STATE_BYTES // 4,), "int32", scope="local", annotations=kept)
        self._sums = T.alloc_buffer((shape.out_blocks, shape.all_rows, TILE_OUTPUTS), self._dot.sums)

    def configure(self) -> None:
        """Configure the tiles of this thread, which another kernel may have used before."""
        shape = self.shape
        words = configuration(shape.numbers, shape.rows, shape.depth_bytes)
        for index, word in enumerate(words):
            T.buffer_store(self._state, tirx.const(word, "int32"), [TILES * TILE_BYTES // 4 + index])
        self._call(CONFIGURE)

    def release(self) -> None:
        """Release the tiles: context switches of threads without tiles need not save 8 KiB."""
        self._call(RELEASE)

    def zero(self) -> None:
        """Set all sums to zero."""
        for row_tile, out_block in self.shape.numbers.order:
            self._call(zero_symbol(self.shape.numbers.sums(row_tile, out_block)))

    def add(self, data: Callable[[int], Any], weights: Callable[[int], Any], stride_bytes: int) -> None:
        """Emit a step: ``data(row tile)`` is its first element, with rows ``stride_bytes`` apart; ``weights(output
        block)`` the first element of a run of rows.
        """
        numbers = self.shape.numbers
        for row_tile, out_block in numbers.order:
            left, right = numbers.data(row_tile), numbers.weights(out_block)
            # An operand of several products stays in its register until the last of them.
            if out_block == 0:
                self._move(load_symbol(left), data(row_tile), stride_bytes)
            if row_tile == 0:
                self._move(load_symbol(right), weights(out_block), ROW_BYTES)
            self._call(product_symbol(self._dtype, numbers.sums(row_tile, out_block), left, right))

    def finish(self, sink: Callable[[int, Expr, int, Any], None]) -> None:
        """Emit ``sink(row tile, row of it, output block, vector of sums)`` for all sums."""
        shape = self.shape
        for row_tile, out_block in shape.numbers.order:
            symbol = store_symbol(shape.numbers.sums(row_tile, out_block))
            self._move(symbol, self._sums[out_block, row_tile * shape.rows, 0], ROW_BYTES)
        for out_block in range(shape.out_blocks):
            for row_tile in range(shape.row_tiles):
                with emit.loop(shape.rows) as row:
                    vector = emit.load(self._sums, out_block, row_tile * shape.rows + row, lanes=TILE_OUTPUTS)
                    sink(row_tile, row, out_block, T.bind(vector))

    def _call(self, symbol: str, *arguments: Any) -> None:
        T.evaluate(T.call_extern("void", symbol, T.address_of(self._state[0]), *arguments))

    def _move(self, symbol: str, element: Any, stride_bytes: int) -> None:
        self._call(symbol, T.address_of(element), tirx.const(stride_bytes, "int32"))


@contextmanager
def tile_product(shape: TileShape, dtype: str) -> Iterator[TileProduct]:
    """Configure the tiles of a task at its beginning, and release them at its end.

    Per task, not per thread: kernels need different shapes, a task does not know the previous configuration of its
    thread, and the two instructions cost a few hundred cycles of the tens of thousands of a task.
    """
    tiles = TileProduct(shape, dtype)
    tiles.configure()
    yield tiles
    tiles.release()


def has_tile_products(dtype: str, cpu: CpuTarget) -> bool:
    """True if kernels may multiply values stored as ``dtype`` in tiles."""
    return dtype in cpu.tile_products and cpu.lanes == TILE_OUTPUTS


def depths(in_blocks: int, dtype: str, lanes: int) -> range:
    """Return the possible numbers of blocks of input channels in a row of data: from one to those that fill it."""
    return range(1, min(in_blocks, ROW_BYTES // (lanes * element_bytes(dtype))) + 1)


def tile_shapes(out_blocks: int, columns: int, depth_bytes: int, rows: int = 1) -> list[TileShape]:
    """Return shapes for ``out_blocks`` output blocks and ``rows`` output rows of ``columns`` each; never empty.

    Tiles of data are side by side in a row that is long enough for them, else below one another.
    """
    found = []
    for row_tiles, outputs in TILE_BLOCKS:
        if outputs <= out_blocks:
            widths = [
                each for each in tile_widths(columns, TILE_ROWS) if row_tiles * each <= columns or row_tiles <= rows
            ]
            found += [TileShape(row_tiles, outputs, width, depth_bytes) for width in widths]
    return found


def block_cycles(shape: TileShape, steps: int) -> float:
    """Return the cycles of one block of sums in ``steps`` steps, in the units of
    :func:`schedules.loops.issue_slots.dense_cycles`: a row of data enters the multiplier each cycle, two rows of tiles
    are loaded, and a product waits for the sums of the previous step.
    """
    sums = shape.row_tiles * shape.out_blocks
    loads = shape.all_rows + shape.out_blocks * shape.depth_bytes // 4
    step = max(sums * shape.rows, loads / PORTS, _LATENCY)
    return steps * step + _LATENCY + _FINISHING * sums * shape.rows + TILE_CYCLES
