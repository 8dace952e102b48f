"""Inputs of a convolution as its kernel reads them.

``PreparedInput``: blocked data after gate, scale and shift, and activation. ``PlainOperands``: a plain NCHW image with
few channels. ``RowWindow``: rows that a fused kernel keeps while it processes an image from top to bottom.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d
from schedules.contract.template import blocks
from schedules.loops import emit
from schedules.loops.dot_products import dot_product
from schedules.loops.emit import Expr


@dataclass(frozen=True)
class RowWindow:
    """Rows of ``conv``: ``tasks`` tasks each process their output rows from top to bottom, ``rows`` per step.

    Source rows are in a ring of :attr:`ring` rows. Tasks may overlap at the end of the image: the overlap is computed
    twice, identically.
    """

    conv: Conv2d
    rows: int
    tasks: int

    @property
    def steps(self) -> int:
        """Number of steps of one task."""
        return -(-(-(-self.conv.out_height // self.rows)) // self.tasks)

    @property
    def ring(self) -> int:
        """Rows of the ring: those read by a step, rounded up to a power of two, so that the remainder is a mask."""
        return 1 << (_extent(self.conv, self.rows) - 1).bit_length()

    def first_row(self, task: Expr, step: Expr) -> Expr:
        """First output row of a step."""
        count = self.steps * self.rows
        return emit.bind(emit.clamp_start(task * count, count, self.conv.out_height) + step * self.rows)

    def new_sources(self, first_row: Expr, step: Expr) -> tuple[Expr, Expr]:
        """Source rows [begin, end) not used in earlier steps of this task."""
        stride, extent = self.conv.stride[0], _extent(self.conv, 1)
        top = first_row * stride - self.conv.padding[0]
        end = emit.smaller(self.conv.height, top + (self.rows - 1) * stride + extent)
        begin = emit.larger(0, top)
        if not isinstance(step, int):
            # The previous step ended at the end of its last row's window; with wide strides, before this step's begin.
            following = top if stride > extent else top - stride + extent
            if self.rows * stride - self.conv.padding[0] - stride + extent < 0:  # whole rows of padding
                following = emit.larger(0, following)
            begin = tirx.Select(step == 0, begin, emit.smaller(self.conv.height, following))
        return emit.bind(begin), emit.bind(emit.larger(begin, end))

    def slot(self, row: Expr) -> Expr:
        """Position of source ``row`` in the ring."""
        return emit.remainder(row, self.ring)


def source_rows(conv: Conv2d, rows: int) -> int:
    """Input rows read by ``rows`` output rows, at most the image."""
    return min(conv.height, _extent(conv, rows))


def _extent(conv: Conv2d, rows: int) -> int:
    """Number of rows, padding included, read by ``rows`` output rows."""
    return (rows - 1) * conv.stride[0] + (conv.kernel[0] - 1) * conv.dilation[0] + 1


@dataclass(frozen=True)
class PreparedInput:
    """Blocked ``data`` and the operands that prepare it for a kernel of ``conv``."""

    conv: Conv2d
    data: Any
    # Blocked, one pixel per image; None without a gate.
    gate: Any | None
    # Scales, then shifts of a prologue (:func:`schedules.loops.weight_packing.pack_prologue`), or None.
    constants: Any | None
    lanes: int

    def block(self, image: Expr, block: Expr) -> Callable[[Expr, Expr], Any]:
        """Return ``pixel(row, column)`` for one block of channels; operands shared by all pixels are loaded here,
        once.
        """
        lanes, prologue = self.lanes, self.conv.prologue
        factor = scale = shift = None
        if self.gate is not None:
            factor = T.bind(emit.load(self.gate, image, block, 0, 0, lanes=lanes))
        if self.constants is not None:
            scale = T.bind(emit.load(self.constants, block, lanes=lanes))
            shift = T.bind(emit.load(self.constants, block + blocks(self.conv.in_channels, lanes), lanes=lanes))

        def pixel(row: Expr, column: Expr) -> Any:
            value = emit.load(self.data, image, block, row, column, lanes=lanes)
            value = value if factor is None else value * factor
            value = value if scale is None or shift is None else value * scale + shift
            if prologue is None:
                return value
            coarse = self.conv.dtype == "bfloat16"
            return emit.activate(value, prologue.activation, lanes, prologue.slope, coarse)

        return pixel


def preparing_operations(conv: Conv2d) -> int:
    """Vector operations per input vector without its load, for analytic costs."""
    prologue = conv.prologue
    return int(conv.gated) + (0 if prologue is None else int(prologue.affine) + (prologue.activation is not None))


class PlainOperands:
    """Plain ``data`` as read by a kernel of ``conv`` for ``rows`` output rows at a time.

    float32 values are operands themselves. For a narrower dtype an operand is a word of neighbouring channels, which
    are not contiguous: the words are assembled in a task buffer, (steps, rows, columns).
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
        """Assemble the operands of the output rows from ``first_row`` on."""
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
                    self._fill(image, step, row, conv.width - lanes, lanes)  # overlaps the previous vector
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
        """Operand of a pixel of the image, whose row must be among those of the last :meth:`fill`."""
        if self._words is None:
            return self._data[image, step, row, column]
        return self._words[step, row - self._begin, column]
