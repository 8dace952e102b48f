"""The two register tiles used by all convolutions: dense and depthwise."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tvm.script.ir_builder import tirx as T

from schedules.loops import emit
from schedules.loops.dot_products import BFLOAT16, FLOAT32, INT8, DotProduct, QuadWord, TapPlaces
from schedules.loops.emit import Expr


def _runs(width: int, joined: int) -> Iterator[range]:
    """Split ``width`` columns into runs of ``joined``, and single columns for the rest."""
    whole = width // joined * joined
    yield from (range(column, column + joined) for column in range(0, whole, joined))
    yield from (range(column, column + 1) for column in range(whole, width))


@dataclass(frozen=True)
class DenseTile:
    """``out_blocks`` blocks of output channels x ``width`` columns, summed over channels and taps.

    A step takes as many neighbouring input channels as a group of ``dot``.
    """

    out_blocks: int
    width: int
    lanes: int
    # Steps unrolled in the loop.
    unroll: int
    # ``x(block, lane, ky, kx, column)``: operand of the group that begins at ``lane`` (a value for float32), or None in
    # the padding.
    x: Callable[[Expr, Expr, Expr, int, int], Any | None]
    # ``weight(o, block, step, ky, kx)``: vector of output block ``o`` for a step of a block.
    weight: Callable[[int, Expr, Expr, Expr, int], Any]
    # ``initial(o, column)``: bias.
    initial: Callable[[int, int], Any]
    # ``finish(o, column, sums)``: store the vectors of ``joined`` columns from ``column`` on, or of one for the rest.
    finish: Callable[[int, int, Sequence[Any]], None]
    # Lanes of the last output block that contain channels; the others become zeros. Fewer lanes are faster on CPUs that
    # split their widest vectors (Zen 4), and never slower.
    last_lanes: int | None = None
    dot: DotProduct = FLOAT32
    joined: int = 1

    def emit(self, in_channels: int, rows: tuple[Expr, Expr], columns: int, block_lanes: int) -> None:
        """Emit the loops: ``in_channels`` in blocks of ``block_lanes``; taps ``rows`` x ``columns``.

        Blocks of one lane have one operand, of a whole group.
        """
        sums = [emit.registers(1, self.width, self._used(o), self.dot.sums)[0] for o in range(self.out_blocks)]
        for o in range(self.out_blocks):
            for column in range(self.width):
                initial = emit.first_lanes(self.initial(o, column), self.lanes, self._used(o))
                emit.store(sums[o][column], initial, lanes=self._used(o))
        full, rest = divmod(in_channels, block_lanes)
        group = min(self.dot.group, block_lanes)
        if full:
            with emit.loop(full) as block, emit.span(*rows) as ky:
                self._channels(sums, block, block_lanes, group, ky, columns)
        if rest:
            with emit.span(*rows) as ky:
                self._channels(sums, full, rest, group, ky, columns)
        for o in range(self.out_blocks):
            used = self._used(o)
            for run in _runs(self.width, self.joined):
                loaded = [emit.load(sums[o][column], lanes=used) for column in run]
                whole = [emit.zero_extended(each, used, self.lanes, self.dot.sums) for each in loaded]
                self.finish(o, run.start, whole)

    def _used(self, o: int) -> int:
        """Number of computed lanes of output block ``o``."""
        return self.last_lanes if self.last_lanes and o == self.out_blocks - 1 else self.lanes

    def _channels(self, sums: Any, block: Expr, count: int, group: int, ky: Expr, columns: int) -> None:
        """Emit ``count`` channels of a block; an incomplete last group is separate, with constant indices."""
        whole, part = divmod(count, group)
        rounds, rest = divmod(whole, self.unroll)
        if rounds:
            with emit.loop(rounds) as index:
                for k in range(self.unroll):
                    self._taps(sums, block, index * self.unroll + k, group, ky, columns)
        for k in range(rest + (part > 0)):
            self._taps(sums, block, rounds * self.unroll + k, group, ky, columns)

    def _taps(self, sums: Any, block: Expr, step: Expr, group: int, ky: Expr, columns: int) -> None:
        for kx in range(columns):
            values = [self.x(block, step * group, ky, kx, column) for column in range(self.width)]
            if all(value is None for value in values):
                continue
            weights = [
                T.bind(emit.first_lanes(self.weight(o, block, step, ky, kx), self.lanes, self._used(o)))
                for o in range(self.out_blocks)
            ]
            for column, value in enumerate(values):
                if value is None:
                    continue
                for o in range(self.out_blocks):
                    sum_, used = sums[o][column], self._used(o)
                    total = self.dot.multiply_add(
                        emit.load(sum_, lanes=used), emit.splat(value, used), weights[o], used
                    )
                    emit.store(sum_, total, lanes=used)


@dataclass(frozen=True)
class ColumnPairs:
    """Words of two neighbouring columns."""

    # ``x(ky, column)``: input at ``column`` and the next one, zero for one in the padding, None if both are.
    x: Callable[[Expr, int], Any | None]
    # ``weight(ky, tap, both)``: weights of two taps, or of the second one only unless ``both``.
    weight: Callable[[Expr, int, bool], Any]


@dataclass(frozen=True)
class ColumnQuads:
    """Words of four neighbouring columns of bytes."""

    # Words and the taps that outputs take from them.
    words: Sequence[QuadWord]
    # ``x(ky, offset)``: word at ``offset``.
    x: Callable[[Expr, int], Any]
    # ``weight(ky, taps)``: words of weights with ``taps`` at their positions in the word.
    weight: Callable[[Expr, TapPlaces], Any]


@dataclass(frozen=True)
class DepthwiseTile:
    """``width`` output columns of one channel block.

    Columns are input positions relative to the tile; each is loaded once and used by every tap.
    """

    width: int
    lanes: int
    axis: emit.Axis
    # ``x(ky, column)``: input vector at ``column`` of tap row ``ky``, or None in the padding.
    x: Callable[[Expr, int], Any | None]
    weight: Callable[[Expr, int], Any]
    initial: Callable[[int], Any]
    # As in :class:`DenseTile`, like ``joined``.
    finish: Callable[[int, Sequence[Any]], None]
    # Taps of a row at a time, for wide windows that exceed the registers; rows of the window are then a loop. None: all
    # of a row.
    taps: int | None = None
    # For bfloat16: words of two neighbouring columns, so that a dot product takes two taps of a row. None: one tap at a
    # time in FP32.
    pairs: ColumnPairs | None = None
    # For bytes: words of four, summed as integers.
    quads: ColumnQuads | None = None
    joined: int = 1

    def emit(self, rows: tuple[Expr, Expr]) -> None:
        (sums,) = emit.registers(1, self.width, self.lanes, (INT8 if self.quads else FLOAT32).sums)
        for column in range(self.width):
            emit.store(sums[column], self.initial(column), lanes=self.lanes)
        if isinstance(rows[0], int) and isinstance(rows[1], int) and self.taps is None:
            for ky in range(rows[0], rows[1]):
                self._row(sums, ky)
        else:
            with emit.span(*rows) as ky:
                self._row(sums, ky)
        for run in _runs(self.width, self.joined):
            self.finish(run.start, [emit.load(sums[column], lanes=self.lanes) for column in run])

    def _row(self, sums: Any, ky: Expr) -> None:
        if self.quads is not None:
            self._quads(sums, ky, self.quads)
            return
        if self.pairs is not None:
            self._pairs(sums, ky, self.pairs)
            return
        step = self.taps or self.axis.kernel
        for first in range(0, self.axis.kernel, step):
            self._taps(sums, ky, range(first, min(first + step, self.axis.kernel)))

    def _pairs(self, sums: Any, ky: Expr, pairs: ColumnPairs) -> None:
        loaded: dict[int, Any] = {}
        for tap in range(0, self.axis.kernel, 2):
            # An odd last tap is the second of a pair: the column after the window may not exist.
            first = min(tap, self.axis.kernel - 2)
            weights = T.bind(pairs.weight(ky, first, first == tap))
            for column in range(self.width):
                position = column * self.axis.stride + first
                if position not in loaded:
                    value = pairs.x(ky, position)
                    loaded[position] = None if value is None else T.bind(value)
                if loaded[position] is not None:
                    sum_ = emit.load(sums[column], lanes=self.lanes)
                    total = BFLOAT16.multiply_add(sum_, loaded[position], weights, self.lanes)
                    emit.store(sums[column], total, lanes=self.lanes)

    def _quads(self, sums: Any, ky: Expr, quads: ColumnQuads) -> None:
        weights: dict[TapPlaces, Any] = {}
        for word in quads.words:
            value = T.bind(quads.x(ky, word.offset))
            for column, taps in word.users:
                if taps not in weights:
                    weights[taps] = T.bind(quads.weight(ky, taps))
                sum_ = emit.load(sums[column], lanes=self.lanes)
                emit.store(sums[column], INT8.multiply_add(sum_, value, weights[taps], self.lanes), lanes=self.lanes)

    def _taps(self, sums: Any, ky: Expr, taps: range) -> None:
        weights = {kx: T.bind(self.weight(ky, kx)) for kx in taps}
        loaded: dict[int, Any] = {}
        for column in range(self.width):
            for kx in taps:
                position = column * self.axis.stride + kx * self.axis.dilation
                if position not in loaded:
                    value = self.x(ky, position)
                    loaded[position] = None if value is None else T.bind(value)
                if loaded[position] is None:
                    continue
                value = emit.load(sums[column], lanes=self.lanes) + loaded[position] * weights[kx]
                emit.store(sums[column], value, lanes=self.lanes)
