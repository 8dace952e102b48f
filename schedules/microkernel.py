"""The two register tiles that every convolution is made of: dense and depthwise."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from schedules import emit
from schedules.emit import Expr


@dataclass(frozen=True)
class DenseTile:
    """``out_blocks`` blocks of output channels x ``width`` columns, summed over channels and taps.

    ``x(block, lane, ky, kx, column)`` is the input scalar, ``None`` in the padding;
    ``weight(o, block, lane, ky, kx)`` the vector of output block ``o``; ``initial(o)`` the bias;
    ``finish(o, column, sums)`` stores. Lanes are walked in steps of ``unroll``.
    """

    out_blocks: int
    width: int
    lanes: int
    unroll: int
    x: Callable[[Expr, Expr, Expr, int, int], Any | None]
    weight: Callable[[int, Expr, Expr, Expr, int], Any]
    initial: Callable[[int], Any]
    finish: Callable[[int, int, Any], None]

    def emit(self, in_channels: int, rows: tuple[Expr, Expr], columns: int, block_lanes: int) -> None:
        """``in_channels`` in blocks of ``block_lanes``; taps ``rows`` x ``columns``."""
        sums = emit.registers(self.out_blocks, self.width, self.lanes)
        for o in range(self.out_blocks):
            for column in range(self.width):
                emit.store(sums[o][column], self.initial(o), lanes=self.lanes)
        full, rest = divmod(in_channels, block_lanes)
        if full:
            with emit.loop(full) as block, emit.span(*rows) as ky:
                self._channels(sums, block, block_lanes, ky, columns)
        if rest:
            with emit.span(*rows) as ky:
                self._channels(sums, full, rest, ky, columns)
        for o in range(self.out_blocks):
            for column in range(self.width):
                self.finish(o, column, emit.load(sums[o][column], lanes=self.lanes))

    def _channels(self, sums: Any, block: Expr, count: int, ky: Expr, columns: int) -> None:
        steps, rest = divmod(count, self.unroll)
        if steps:
            with emit.loop(steps) as step:
                for k in range(self.unroll):
                    self._taps(sums, block, step * self.unroll + k, ky, columns)
        for k in range(rest):
            self._taps(sums, block, steps * self.unroll + k, ky, columns)

    def _taps(self, sums: Any, block: Expr, lane: Expr, ky: Expr, columns: int) -> None:
        for kx in range(columns):
            values = [self.x(block, lane, ky, kx, column) for column in range(self.width)]
            if all(value is None for value in values):
                continue
            weights = [T.bind(self.weight(o, block, lane, ky, kx)) for o in range(self.out_blocks)]
            for column, value in enumerate(values):
                if value is None:
                    continue
                vector = emit.splat(value, self.lanes)
                for o in range(self.out_blocks):
                    sum_ = sums[o][column]
                    emit.store(sum_, emit.load(sum_, lanes=self.lanes) + vector * weights[o], lanes=self.lanes)


@dataclass(frozen=True)
class DepthwiseTile:
    """``width`` output columns of one channel block.

    ``x(ky, column)`` is the input vector at ``column`` of tap row ``ky``, ``None`` in the padding; the
    columns are input positions relative to the tile. Each is loaded once and used by every tap.
    """

    width: int
    lanes: int
    axis: emit.Axis
    x: Callable[[Expr, int], Any | None]
    weight: Callable[[Expr, int], Any]
    initial: Callable[[], Any]
    finish: Callable[[int, Any], None]

    def emit(self, rows: tuple[Expr, Expr]) -> None:
        (sums,) = emit.registers(1, self.width, self.lanes)
        for column in range(self.width):
            emit.store(sums[column], self.initial(), lanes=self.lanes)
        if isinstance(rows[0], int) and isinstance(rows[1], int):
            for ky in range(rows[0], rows[1]):
                self._row(sums, ky)
        else:
            with emit.span(*rows) as ky:
                self._row(sums, ky)
        for column in range(self.width):
            self.finish(column, emit.load(sums[column], lanes=self.lanes))

    def _row(self, sums: Any, ky: Expr) -> None:
        weights = [T.bind(self.weight(ky, kx)) for kx in range(self.axis.kernel)]
        loaded: dict[int, Any] = {}
        for column in range(self.width):
            for kx in range(self.axis.kernel):
                position = column * self.axis.stride + kx * self.axis.dilation
                if position not in loaded:
                    value = self.x(ky, position)
                    loaded[position] = None if value is None else T.bind(value)
                if loaded[position] is None:
                    continue
                value = emit.load(sums[column], lanes=self.lanes) + loaded[position] * weights[kx]
                emit.store(sums[column], value, lanes=self.lanes)
