"""Products in the tile registers of AMX: blocks of sums, pixels laid out as rows of tiles, a 1x1 convolution of them.

The instructions are in :mod:`schedules.contract.tile_operations`. In memory as tiles read it, neighbouring channel
blocks are side by side, and padding is zero.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d, element_bytes
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import blocks, tensor_dtype
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
    load_symbol,
    product_symbol,
    store_symbol,
    tile_configuration,
    zero_symbol,
)
from schedules.loops import emit
from schedules.loops.config_space import PORTS, TILE_CYCLES, exposed_traffic, tile_widths
from schedules.loops.dot_products import dot_product
from schedules.loops.emit import Expr
from schedules.loops.kernel_inputs import PreparedInput, preparing_operations
from schedules.loops.loop_nests import Sink, TiledExtent
from schedules.loops.requantised_sums import initial_sums

# Outputs of a tile: 64 bytes of 32-bit sums.
TILE_OUTPUTS = ROW_BYTES // 4
# Numbers of blocks of 16 input channels in a row of data: up to two for bfloat16, four for bytes.
DEPTHS = (1, 2, 3, 4)
# Cycles until the sums of a product can be accumulated again; a row of data enters per cycle (Intel's optimization
# manual).
_LATENCY = 52.0
# Vector operations per row of sums: stored as a tile, loaded, biased, activated, rounded, stored.
_FINISHING = 4.0


@dataclass(frozen=True)
class TileShape:
    """A block of ``row_tiles`` x ``out_blocks`` tiles of sums, of ``rows`` rows each.

    ``depth_bytes``: bytes of a row of data multiplied per step.
    """

    row_tiles: int
    out_blocks: int
    rows: int
    depth_bytes: int

    @property
    def numbers(self) -> TileNumbers:
        """Its tile numbers."""
        return TileNumbers(self.row_tiles, self.out_blocks)

    @property
    def all_rows(self) -> int:
        """Rows of a block."""
        return self.row_tiles * self.rows


class TileProduct:
    """Tiles of one task, created by :func:`tile_product`.

    A block of sums is computed by :meth:`zero`, :meth:`add` for every step, and :meth:`finish`.
    """

    def __init__(self, shape: TileShape, dtype: str) -> None:
        self.shape, self._dtype, self._dot = shape, dtype, dot_product(dtype)
        kept = {"disable_lower_builtin": True}  # on the stack (natively 64 bytes), never from the workspace pool
        self._state = T.alloc_buffer((STATE_BYTES // 4,), "int32", scope="local", annotations=kept)
        self._sums = T.alloc_buffer((shape.out_blocks, shape.all_rows, TILE_OUTPUTS), self._dot.sums)

    def configure(self) -> None:
        """Configure the tiles of this thread, which another kernel may have configured differently."""
        shape = self.shape
        words = tile_configuration(shape.numbers, shape.rows, shape.depth_bytes)
        for index, word in enumerate(words):
            T.buffer_store(self._state, tirx.const(word, "int32"), [TILES * TILE_BYTES // 4 + index])
        self._call(CONFIGURE)

    def release(self) -> None:
        """Release the tiles: context switches of threads without tiles do not save 8 KiB."""
        self._call(RELEASE)

    def zero(self) -> None:
        """Set all sums to zero."""
        for row_tile, out_block in self.shape.numbers.order:
            self._call(zero_symbol(self.shape.numbers.sums(row_tile, out_block)))

    def add(self, data: Callable[[int], Any], weights: Callable[[int], Any], stride_bytes: int) -> None:
        """Emit a step.

        ``data(row tile)`` is its first element, with rows ``stride_bytes`` apart; ``weights(output block)`` the first
        element of a run of rows.
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
        """Call ``sink(row tile, row of it, output block, vector of sums)`` for all sums."""
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
    """Tiles of a task, configured at its start and released at its end.

    Configured per task, not per thread: kernels need different shapes, a task cannot know the previous configuration of
    its thread, and the two instructions cost a few hundred cycles of the tens of thousands of a task.
    """
    tiles = TileProduct(shape, dtype)
    tiles.configure()
    yield tiles
    tiles.release()


def has_tile_products(dtype: str, cpu: CpuTarget) -> bool:
    """True if kernels may multiply values stored as ``dtype`` in tiles."""
    return dtype in cpu.tile_products and cpu.lanes == TILE_OUTPUTS


def depths(in_blocks: int, dtype: str, lanes: int) -> range:
    """Allowed numbers of blocks of input channels in a row of data."""
    return range(1, min(in_blocks, ROW_BYTES // (lanes * element_bytes(dtype))) + 1)


def tile_shapes(out_blocks: int, columns: int, depth_bytes: int, rows: int = 1) -> list[TileShape]:
    """Shapes for ``out_blocks`` output blocks and ``rows`` output rows of ``columns`` each; never empty.

    Tiles of data are side by side if a row is long enough, otherwise in consecutive rows.
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
    """Cycles of one block of sums in ``steps`` steps, as in :func:`schedules.loops.config_space.dense_cycles`.

    A row of data enters the multiplier per cycle, two rows of tiles are loaded, and a product waits for the sums of the
    previous step.
    """
    sums = shape.row_tiles * shape.out_blocks
    loads = shape.all_rows + shape.out_blocks * shape.depth_bytes // 4
    step = max(sums * shape.rows, loads / PORTS, _LATENCY)
    return steps * step + _LATENCY + _FINISHING * sums * shape.rows + TILE_CYCLES


class TileRows:
    """Task buffer (runs, ``rows``, ``columns``, ``together``, V) for pixels of the input of ``conv``.

    A blocked tensor has 16 contiguous channels per pixel, a quarter or a half of a tile's row; here a run of
    ``together`` blocks forms a row. Gate and prologue are applied while copying.
    """

    def __init__(self, conv: Conv2d, lanes: int, together: int, rows: int, columns: int) -> None:
        self._conv, self._lanes, self._together = conv, lanes, together
        self._rows, self._columns = rows, columns
        runs = -(-blocks(conv.in_channels, lanes) // together)
        self._buffer = T.alloc_buffer((runs, rows, columns, together, lanes), tensor_dtype(conv.dtype))

    def first(self, run: Expr, row: Expr, column: Expr) -> Any:
        """First element of a pixel's run."""
        return self._buffer[run, row, column, 0, 0]

    def fill(self, source: PreparedInput, image: Expr, top: Expr, left: Expr, width: int) -> None:
        """Copy the pixels from row ``top`` and column ``left`` of the image, whose rows are ``width`` wide.

        For a 1x1 the whole image is one row. Both positions may be in the padding; ``left`` must then be a number.
        """
        full, rest = divmod(blocks(self._conv.in_channels, self._lanes), self._together)
        before = max(0, -left) if isinstance(left, int) else 0
        inside = self._columns
        if isinstance(left, int):
            inside = max(0, min(self._columns - before, width - left - before))
        columns = before, before + inside
        if full:
            with emit.loop(full) as run:
                self._fill_run(source, image, run, self._together, top, left, columns)
        if rest:
            self._fill_run(source, image, full, rest, top, left, columns)

    def _fill_run(
        self,
        source: PreparedInput,
        image: Expr,
        run: Expr,
        used: int,
        top: Expr,
        left: Expr,
        columns: tuple[int, int],
    ) -> None:
        """Copy the first ``used`` blocks of a run for the ``columns`` [begin, end) inside the image; zeros
        elsewhere.
        """
        first = emit.bind(run * self._together)
        readers = [self._reader(source, image, first + index) for index in range(used)]
        low, high = self._inside_rows(top)
        begin, end = columns
        self._zeros(run, 0, low, 0, self._columns)
        self._zeros(run, low, high, 0, begin)
        self._zeros(run, low, high, end, self._columns)
        if begin < end:
            with emit.span(low, high) as row, emit.loop(end - begin) as column:
                for index in range(self._together):
                    value = readers[index](top + row, left + begin + column) if index < used else self._zero()
                    self._store(value, run, row, begin + column, index)
        self._zeros(run, high, self._rows, 0, self._columns)

    def _inside_rows(self, top: Expr) -> tuple[Expr, Expr]:
        """Rows of the buffer that are inside the image."""
        above, _, below, _ = self._conv.padding
        if not above and not below:
            return 0, self._rows
        low = emit.bind(emit.smaller(self._rows, emit.larger(0, 0 - top)))
        return low, emit.bind(emit.smaller(self._rows, emit.larger(low, self._conv.height - top)))

    def _reader(self, source: PreparedInput, image: Expr, block: Expr) -> Callable[[Expr, Expr], Any]:
        """Vectors of a block by row and column of the image, in the dtype of the buffer."""
        lanes = self._lanes
        if is_copied(self._conv):
            return lambda row, column: source.data[image, block, row, column, tirx.Ramp(0, 1, lanes)]
        prepared = source.block(image, block)
        return lambda row, column: emit.rounded(prepared(row, column), lanes)

    def _zero(self) -> Any:
        """Zero vector in the dtype of the buffer."""
        lanes = self._lanes
        if self._buffer.dtype == "uint8":
            return tirx.Broadcast(tirx.const(0, "uint8"), lanes)
        return tirx.reinterpret(f"bfloat16x{lanes}", tirx.Broadcast(tirx.const(0, "uint16"), lanes))

    def _zeros(self, run: Expr, low: Expr, high: Expr, begin: int, end: int) -> None:
        if begin >= end or (isinstance(low, int) and isinstance(high, int) and low >= high):
            return
        with emit.span(low, high) as row, emit.loop(end - begin) as column:
            for index in range(self._together):
                self._store(self._zero(), run, row, begin + column, index)

    def _store(self, value: Any, run: Expr, row: Expr, column: Expr, index: int) -> None:
        T.buffer_store(self._buffer, value, [run, row, column, index, tirx.Ramp(0, 1, self._lanes)])


def laying_out_cycles(conv: Conv2d, cpu: CpuTarget, pixels: int, source_bytes: float) -> float:
    """Cycles of :meth:`TileRows.fill` for ``pixels`` of a tensor of which this core reads ``source_bytes``.

    Each vector takes a load, a store and the preparing operations.
    """
    vectors = pixels * blocks(conv.in_channels, cpu.lanes)
    moved = vectors * cpu.lanes * element_bytes(conv.dtype)
    # A store counts as two operations.
    return vectors * (2 + preparing_operations(conv)) / PORTS + exposed_traffic(cpu, moved, source_bytes)


def is_copied(conv: Conv2d) -> bool:
    """True if the input is read without gate and prologue."""
    return not conv.gated and conv.prologue is None


def pixels_phase(
    conv: Conv2d,
    product: TileProduct,
    *,
    pixels: int,
    first_block: Expr,
    source: Callable[[Expr, Expr], Any],
    weight: Any,
    bias: Any,
    sink: Sink,
) -> None:
    """Emit :func:`schedules.loops.loop_nests.pointwise_phase` in tiles, for the output blocks from ``first_block``.

    ``source(run, pixel)`` is the first element of a row of data: a run of blocks of input channels of a pixel, followed
    by the next pixel's. ``weight`` is packed by :func:`schedules.loops.weight_packing.pack_tiles`.
    """
    shape = product.shape
    passes = TiledExtent(pixels, shape.all_rows, 1)
    with emit.loop(passes.per_task) as part:
        start = passes.start(0, part)
        product.zero()
        with emit.loop(int(weight.shape[1])) as run:
            product.add(
                lambda tile: source(run, start + tile * shape.rows),
                lambda out: weight[first_block + out, run, 0, 0, 0, 0],
                shape.depth_bytes,
            )

        def finished(tile: int, row: Expr, out: int, sums: Any) -> None:
            total = sums + initial_sums(conv, bias, first_block + out, TILE_OUTPUTS)
            sink(first_block + out, start + tile * shape.rows + row, total)

        product.finish(finished)
