"""Products of matrices in the tile registers of AMX, as steps of TIR: what a task does with its eight tiles.

A tile of data has up to 16 rows (pixels of an image, rows of a matrix), each of up to 64 bytes of neighbouring input
channels; a tile of weights a row for every group of neighbours, 16 outputs wide: the weights of as many steps of a dot
product as :mod:`schedules.loops.weight_packing` and :mod:`schedules.loops.dot_products` lay behind one another.
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

# Outputs of a tile: 64 bytes of sums of 32 bits.
TILE_OUTPUTS = ROW_BYTES // 4
# How many blocks of 16 input channels a row of data may hold: of bfloat16 up to two, of bytes four.
DEPTHS = (1, 2, 3, 4)
# Of a product: cycles until its sums can be added to; a row of data enters each cycle (Intel's optimization manual).
_LATENCY = 52.0
# Vector operations on each row of sums: stored as a tile, loaded, biased, activated, rounded, stored.
_FINISHING = 4.0


@dataclass(frozen=True)
class TileShape:
    """A block of ``row_tiles`` x ``out_blocks`` tiles of sums, of ``rows`` rows each; ``depth_bytes`` of a row of data
    are multiplied at a step.
    """

    row_tiles: int
    out_blocks: int
    rows: int
    depth_bytes: int

    @property
    def numbers(self) -> TileNumbers:
        """Its tiles."""
        return TileNumbers(self.row_tiles, self.out_blocks)

    @property
    def all_rows(self) -> int:
        """Rows of a block."""
        return self.row_tiles * self.rows


class TileProduct:
    """The tiles of one task, by :func:`tile_product`. A block of sums is made by :meth:`zero`, :meth:`add` for every
    step, and :meth:`finish`.
    """

    def __init__(self, shape: TileShape, dtype: str) -> None:
        self.shape, self._dtype, self._dot = shape, dtype, dot_product(dtype)
        kept = {"disable_lower_builtin": True}  # on the stack, natively 64 bytes of it: never from the workspace pool
        self._state = T.alloc_buffer((STATE_BYTES // 4,), "int32", scope="local", annotations=kept)
        self._sums = T.alloc_buffer((shape.out_blocks, shape.all_rows, TILE_OUTPUTS), self._dot.sums)

    def configure(self) -> None:
        """Of this thread, whose tiles another kernel had before."""
        shape = self.shape
        words = configuration(shape.numbers, shape.rows, shape.depth_bytes)
        for index, word in enumerate(words):
            T.buffer_store(self._state, tirx.const(word, "int32"), [TILES * TILE_BYTES // 4 + index])
        self._call(CONFIGURE)

    def release(self) -> None:
        """Threads that hold no tiles are switched without saving 8 KiB."""
        self._call(RELEASE)

    def zero(self) -> None:
        """All sums become zeros."""
        for row_tile, out_block in self.shape.numbers.order:
            self._call(zero_symbol(self.shape.numbers.sums(row_tile, out_block)))

    def add(self, data: Callable[[int], Any], weights: Callable[[int], Any], stride_bytes: int) -> None:
        """A step: ``data(row tile)`` is its first element, rows ``stride_bytes`` apart; ``weights(output block)`` the
        first of a run of rows.
        """
        numbers = self.shape.numbers
        for row_tile, out_block in numbers.order:
            left, right = numbers.data(row_tile), numbers.weights(out_block)
            # What is used by several products stays in its register until the last of them.
            if out_block == 0:
                self._move(load_symbol(left), data(row_tile), stride_bytes)
            if row_tile == 0:
                self._move(load_symbol(right), weights(out_block), ROW_BYTES)
            self._call(product_symbol(self._dtype, numbers.sums(row_tile, out_block), left, right))

    def finish(self, sink: Callable[[int, Expr, int, Any], None]) -> None:
        """``sink(row tile, row of it, output block, vector of sums)`` for all of them."""
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
    """The tiles of a task, configured at its beginning and given back at its end.

    Once for each task, not for each thread: kernels want different shapes, a task cannot tell what its thread had
    before, and the two instructions cost a few hundred cycles of the tens of thousands of a task.
    """
    tiles = TileProduct(shape, dtype)
    tiles.configure()
    yield tiles
    tiles.release()


def has_tile_products(dtype: str, cpu: CpuTarget) -> bool:
    """Whether kernels may multiply values stored as ``dtype`` in tiles."""
    return dtype in cpu.tile_products and cpu.lanes == TILE_OUTPUTS


def depths(in_blocks: int, dtype: str, lanes: int) -> range:
    """How many blocks of input channels a row of data may hold: one up to what fills it."""
    return range(1, min(in_blocks, ROW_BYTES // (lanes * element_bytes(dtype))) + 1)


def tile_shapes(out_blocks: int, columns: int, depth_bytes: int, rows: int = 1) -> list[TileShape]:
    """Shapes for ``out_blocks`` output blocks and ``rows`` output rows of ``columns`` each; never empty.

    Tiles of data stand side by side in a row that is long enough for them, else below one another.
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
    """Cycles of one block of sums in ``steps`` steps, as :func:`schedules.loops.issue_slots.dense_cycles` counts: a
    row of data enters the multiplier each cycle, two rows of tiles are loaded, and a product waits for the sums of the
    step before.
    """
    sums = shape.row_tiles * shape.out_blocks
    loads = shape.all_rows + shape.out_blocks * shape.depth_bytes // 4
    step = max(sums * shape.rows, loads / PORTS, _LATENCY)
    return steps * step + _LATENCY + _FINISHING * sums * shape.rows + TILE_CYCLES
