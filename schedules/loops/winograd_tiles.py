"""Tiles of a Winograd convolution: read from the image with the input transform, written with the output transform."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.cpu.winograd_work import TAPS
from costmodel.operators.layers import Conv2d
from schedules.loops import emit
from schedules.loops.emit import Expr
from schedules.loops.loop_nests import task_index
from schedules.loops.winograd_transforms import input_transform, output_transform


class WinogradTiles:
    """Tiles of ``outputs`` x ``outputs`` over the output of ``conv``, image by image; tiles at the end hold fewer."""

    def __init__(self, conv: Conv2d, outputs: int) -> None:
        self.conv = conv
        self.outputs = outputs
        self.size = outputs + TAPS - 1
        self.rows, self.columns = -(-conv.out_height // outputs), -(-conv.out_width // outputs)

    @property
    def count(self) -> int:
        return self.conv.batch * self.rows * self.columns

    def read(
        self,
        load: Callable[[Expr, Expr], Any],
        border: Any,
        row: Expr,
        column: Expr,
        lanes: int,
        keep: Callable[[int, Any], None],
    ) -> None:
        """Transform the input of the tile whose outputs begin at ``row`` and ``column``; emits ``keep(position,
        vector)``.

        ``load(row, column)`` returns a vector of the input. Tiles that reach into the padding are copied to ``border``
        first.
        """
        conv, size = self.conv, self.size
        top, left = emit.bind(row - conv.padding[0]), emit.bind(column - conv.padding[1])

        def transform(value: Callable[[int, int], Any]) -> None:
            values = [[T.bind(value(y, x)) for x in range(size)] for y in range(size)]
            for y, line in enumerate(input_transform(values, self.outputs, lanes)):
                for x, vector in enumerate(line):
                    keep(y * size + x, vector)

        if self._even and not any(conv.padding):
            transform(lambda y, x: load(top + y, left + x))
            return

        def from_border() -> None:
            with emit.loop(size * size) as index:
                emit.store(border, emit.splat(0.0, lanes), index, lanes=lanes)
            rows = emit.larger(0, -top), emit.smaller(size, conv.height - top)
            columns = emit.larger(0, -left), emit.smaller(size, conv.width - left)
            with emit.span(*rows) as y, emit.span(*columns) as x:
                value = load(top + y, left + x)
                emit.store(border, value, y * size + x, lanes=lanes)
            transform(lambda y, x: emit.load(border, y * size + x, lanes=lanes))

        inside = (top >= 0, left >= 0, top + size <= conv.height, left + size <= conv.width)
        _either(inside, lambda: transform(lambda y, x: load(top + y, left + x)), from_border)

    def write(
        self,
        sums: Callable[[int], Any],
        border: Any,
        row: Expr,
        column: Expr,
        lanes: int,
        finish: Callable[[Expr, Expr, Any], None],
    ) -> None:
        """Write the outputs of the tile at ``row`` and ``column`` from its ``sums(position)``: ``finish(row, column,
        value)``.
        """
        conv, size, outputs = self.conv, self.size, self.outputs
        values = [[T.bind(sums(y * size + x)) for x in range(size)] for y in range(size)]
        result = output_transform(values, outputs, lanes)

        def whole() -> None:
            for y, line in enumerate(result):
                for x, vector in enumerate(line):
                    finish(row + y, column + x, vector)

        def part() -> None:
            for y, line in enumerate(result):
                for x, vector in enumerate(line):
                    emit.store(border, vector, y * outputs + x, lanes=lanes)
            heights, widths = (
                emit.smaller(outputs, conv.out_height - row),
                emit.smaller(outputs, conv.out_width - column),
            )
            with emit.span(0, heights) as y, emit.span(0, widths) as x:
                finish(row + y, column + x, emit.load(border, y * outputs + x, lanes=lanes))

        if self._even:
            whole()
            return
        _either((row + outputs <= conv.out_height, column + outputs <= conv.out_width), whole, part)

    @property
    def _even(self) -> bool:
        """True if every tile is full."""
        return self.conv.out_height % self.outputs == 0 and self.conv.out_width % self.outputs == 0

    def place(self, tile: Expr) -> tuple[Expr, Expr, Expr]:
        """Return image, and row and column of the first output."""
        image, row, column = task_index(tile, self.conv.batch, self.rows, self.columns)
        return image, emit.bind(row * self.outputs), emit.bind(column * self.outputs)


def _either(conditions: Sequence[Any], then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Emit ``then`` if all ``conditions`` hold, else ``otherwise``; without a branch if that is known."""
    if any(condition is False for condition in conditions):
        otherwise()
        return
    unknown = [condition for condition in conditions if condition is not True]
    if not unknown:
        then()
        return
    with T.If(tirx.all(*unknown)):
        with T.Then():
            then()
        with T.Else():
            otherwise()
