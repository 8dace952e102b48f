"""Pixels of an image laid out for the tiles of AMX: adjacent blocks of channels side by side, zeros in the padding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d, element_bytes
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import tensor_dtype
from schedules.loops import emit
from schedules.loops.emit import Expr
from schedules.loops.issue_slots import PORTS, exposed_traffic
from schedules.loops.prepared_input import PreparedInput, preparing_operations


class TileRows:
    """Buffer of a task with ``rows`` x ``columns`` pixels of the input of ``conv``: (runs, ``rows``, ``columns``,
    ``together``, V).

    A blocked tensor stores 16 channels of a pixel contiguously, a quarter or a half of a tile's row; here a run of
    ``together`` blocks makes up a row. A gate or prologue of the input is applied on the way.
    """

    def __init__(self, conv: Conv2d, lanes: int, together: int, rows: int, columns: int) -> None:
        self._conv, self._lanes, self._together = conv, lanes, together
        self._rows, self._columns = rows, columns
        runs = -(-blocks(conv.in_channels, lanes) // together)
        self._buffer = T.alloc_buffer((runs, rows, columns, together, lanes), tensor_dtype(conv.dtype))

    def first(self, run: Expr, row: Expr, column: Expr) -> Any:
        """Return the first element of a pixel's run."""
        return self._buffer[run, row, column, 0, 0]

    def fill(self, source: PreparedInput, image: Expr, top: Expr, left: Expr, width: int) -> None:
        """Fill the buffer with the pixels from row ``top`` and column ``left`` of the image on, whose rows are
        ``width`` wide (for a 1x1 the whole image is one row). Either may be in the padding; if ``left`` may be, it is a
        number.
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
        """Fill the first ``used`` blocks of a run, in those ``columns`` [begin, end) that are in the image; all else
        becomes zeros.
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
        """Return the rows [begin, end) of the buffer that are in the image."""
        above, _, below, _ = self._conv.padding
        if not above and not below:
            return 0, self._rows
        low = emit.bind(emit.smaller(self._rows, emit.larger(0, 0 - top)))
        return low, emit.bind(emit.smaller(self._rows, emit.larger(low, self._conv.height - top)))

    def _reader(self, source: PreparedInput, image: Expr, block: Expr) -> Callable[[Expr, Expr], Any]:
        """Return a function of row and column of the image that returns vectors of a block in the dtype of
        the buffer.
        """
        lanes = self._lanes
        if is_copied(self._conv):
            return lambda row, column: source.data[image, block, row, column, tirx.Ramp(0, 1, lanes)]
        prepared = source.block(image, block)
        return lambda row, column: emit.rounded(prepared(row, column), lanes)

    def _zero(self) -> Any:
        """Return a vector of zeros in the dtype of the buffer."""
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
    """Return the cycles of :meth:`TileRows.fill` for ``pixels``, from a tensor of which this core reads
    ``source_bytes``: a load, a store and the operations between them for each vector.
    """
    vectors = pixels * blocks(conv.in_channels, cpu.lanes)
    moved = vectors * cpu.lanes * element_bytes(conv.dtype)
    # A store takes the place of two operations.
    return vectors * (2 + preparing_operations(conv)) / PORTS + exposed_traffic(cpu, moved, source_bytes)


def is_copied(conv: Conv2d) -> bool:
    """True if the input is copied without a gate or prologue."""
    return not conv.gated and conv.prologue is None
