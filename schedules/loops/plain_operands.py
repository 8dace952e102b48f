"""Operands of a dense register tile from a plain NCHW image with few channels."""

from __future__ import annotations

from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d
from schedules.loops import emit
from schedules.loops.dot_products import dot_product
from schedules.loops.emit import Expr
from schedules.loops.row_window import source_rows


class PlainOperands:
    """Operands from ``data``, plain, for a kernel of ``conv`` that computes ``rows`` output rows at a time.

    Values of float32 are operands without conversion. For a narrower dtype an operand is a word of adjacent channels,
    which are not contiguous in memory: the words of the rows are assembled in a buffer of the task, (steps, rows,
    columns).
    """

    def __init__(self, conv: Conv2d, data: Any, rows: int, lanes: int) -> None:
        self._conv, self._data, self._lanes = conv, data, lanes
        self._dot = dot_product(conv.dtype)
        self._count = source_rows(conv, rows)
        self._begin: Expr = 0
        self._words: Any = None
        if self._dot.group > 1:
            self._words = T.alloc_buffer((self.channels, self._count, conv.width), self._dot.word)

    @property
    def channels(self) -> int:
        """Number of operands per pixel."""
        return self._dot.steps(self._conv.in_channels)

    def fill(self, image: Expr, first_row: Expr) -> None:
        """Assemble the operands that the output rows from ``first_row`` on read."""
        if self._words is None:
            return
        conv, lanes = self._conv, self._lanes
        self._begin = emit.bind(emit.clamp_rows(first_row * conv.stride[0] - conv.padding[0], self._count, conv.height))
        whole, rest = divmod(conv.width, lanes)
        for step in range(self.channels):
            with emit.loop(self._count) as row:
                if whole:
                    with emit.loop(whole) as column:
                        self._fill(image, step, row, column * lanes, lanes)
                if rest and whole:
                    self._fill(image, step, row, conv.width - lanes, lanes)  # overlaps the vector before it
                elif rest:
                    with emit.loop(rest) as column:
                        self._fill(image, step, row, column, 1)

    def _fill(self, image: Expr, step: int, row: Expr, column: Expr, lanes: int) -> None:
        """Assemble ``lanes`` words from ``column`` on."""
        at = column if lanes == 1 else tirx.Ramp(column, 1, lanes)
        group = self._dot.group
        channels = range(step * group, min((step + 1) * group, self._conv.in_channels))
        values = [self._data[image, channel, self._begin + row, at] for channel in channels]
        T.buffer_store(self._words, self._dot.neighbours(values, lanes), [step, row, at])

    def value(self, image: Expr, step: Expr, row: Expr, column: Expr) -> Any:
        """Return the operand of a pixel of the image, in one of the rows of the last :meth:`fill`."""
        if self._words is None:
            return self._data[image, step, row, column]
        return self._words[step, row - self._begin, column]
