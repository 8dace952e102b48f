"""Winograd's minimal filtering of 3-tap windows: matrices, transforms between image and tiles, and a block of tiles on
one core, which is transformed, multiplied position by position and transformed back.

m outputs of a 3-tap filter need n = m + 2 multiplications instead of 3 m: y = A^T [(G g) * (B^T d)] (Winograd 1980;
for convolutions Lavin and Gray, CVPR 2016). The matrices are those of Toom and Cook: values of polynomials at n - 1
points and their leading coefficient. All points except zero are pairs of both signs, so that even and odd parts are
shared.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.cpu.core_work import TAPS, transform_operations
from costmodel.operators.layers import Conv2d
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import blocks
from schedules.loops import emit
from schedules.loops.config_space import PORTS, TILE_CYCLES, RegisterTile, dense_cycles, exposed_traffic
from schedules.loops.dot_products import FLOAT32
from schedules.loops.emit import Expr
from schedules.loops.kernel_inputs import preparing_operations
from schedules.loops.loop_nests import PREFETCH_VECTORS, TiledExtent, task_index
from schedules.loops.register_kernels import DenseTile

# Positive point of each pair, by the outputs of a tile: those of smallest error among the candidates of Barabasz et al.
# (ACM TOMS 2020, arXiv:1803.10986) and Alam et al. (ACM TECS 2022: c and 1/c). Their matrix elements are exact in FP32.
# Mean error over 128 channels against FP64, relative to direct summation: 2 outputs 0.7; 4 outputs 1.7, at 1 and 2 3.2,
# at 1 and 1/2 3.1, at 2/3 and 3/2 1.8; 6 outputs 6.6 at best for at most 1.3 times fewer products: not used.
_POINTS: dict[int, tuple[float, ...]] = {2: (1.0,), 4: (0.625, 1.5)}


class WinogradMatrices(NamedTuple):
    """Matrices in FP64: ``input`` is B^T (n, n), ``weight`` G (n, taps), ``output`` A^T (m, n)."""

    input: np.ndarray
    weight: np.ndarray
    output: np.ndarray


@lru_cache
def winograd_matrices(outputs: int) -> WinogradMatrices:
    """Matrices for tiles of ``outputs``, which must be in ``_POINTS``; rows: points 0, +p, -p, +q, -q ..., infinity."""
    points = [0.0, *(sign * point for point in _POINTS[outputs] for sign in (1.0, -1.0))]
    return toom_cook(points, outputs, TAPS)


def toom_cook(points: Sequence[float], outputs: int, taps: int) -> WinogradMatrices:
    """Matrices for ``outputs`` of a window of ``taps``; the finite ``points`` are followed by infinity."""
    count = outputs + taps - 1
    inputs, weights, sums = np.zeros((count, count)), np.zeros((count, taps)), np.zeros((outputs, count))
    for row, point in enumerate(points):
        others = [other for other in points if other != point]
        inputs[row, : count - 1] = np.poly(others)[::-1]
        weights[row] = point ** np.arange(taps) / np.prod([point - other for other in others])
        sums[:, row] = point ** np.arange(outputs)
    inputs[-1] = np.poly(points)[::-1]
    weights[-1, -1] = sums[-1, -1] = 1.0
    return WinogradMatrices(inputs, weights, sums)


def transformed_weight(weight: np.ndarray, outputs: int) -> np.ndarray:
    """Transform (O, I, 3, 3) to FP64 (O, I, n * n): G g G^T."""
    matrix = winograd_matrices(outputs).weight
    return np.einsum("ay,oiyx,bx->oiab", matrix, weight.astype(np.float64), matrix).reshape(*weight.shape[:2], -1)


def relative_rounding(outputs: int) -> float:
    """RMS error of the sums over many channels, relative to that of direct summation.

    The k-th partial sum of terms of variance v has an error variance of eps^2 k v. Direct: 9 C terms of variance 1;
    here C terms at each position, of variance |G_i|^2 |G_j|^2 |B_i|^2 |B_j|^2, weighted by the squares of A: norms of
    rows, as in the bound of Barabasz et al., but of independent errors instead of the worst case. Rounding in the
    transforms is ignored.
    """
    inputs, weights, sums = (matrix**2 for matrix in winograd_matrices(outputs))
    return float((sums @ (weights.sum(axis=1) * inputs.sum(axis=1))).mean()) / TAPS**2


def input_transform(tile: Sequence[Sequence[Any]], outputs: int, lanes: int) -> list[list[Any]]:
    """B^T d B of n rows of n vectors."""
    return _both_axes(tile, lambda line: _input_line(line, outputs, lanes))


def output_transform(tile: Sequence[Sequence[Any]], outputs: int, lanes: int) -> list[list[Any]]:
    """A^T M A: m rows of m vectors from n rows of n."""
    return _both_axes(tile, lambda line: _output_line(line, outputs, lanes))


def _both_axes(tile: Sequence[Sequence[Any]], line: Any) -> list[list[Any]]:
    """Apply ``line`` to every column, then to every row."""
    columns = [line([row[x] for row in tile]) for x in range(len(tile[0]))]
    return [line([column[y] for column in columns]) for y in range(len(columns[0]))]


def _input_line(values: Sequence[Any], outputs: int, lanes: int) -> list[Any]:
    matrix = winograd_matrices(outputs).input
    result = [combination(matrix[0], values, lanes)]
    for pair, point in enumerate(_POINTS[outputs]):
        row = matrix[1 + 2 * pair]
        # (x + p) E(x) and (x - p) E(x), E of odd powers only: x E(x) is even and shared, as p E(x) is.
        even = combination(row[::2].tolist(), values[::2], lanes)
        odd = combination((row[1::2] / point).tolist(), values[1::2], lanes)
        result += _sum_and_difference(even, odd, point, lanes)
    return [*result, combination(matrix[-1], values, lanes)]


def _output_line(values: Sequence[Any], outputs: int, lanes: int) -> list[Any]:
    pairs = [(values[1 + 2 * pair], values[2 + 2 * pair]) for pair in range(len(_POINTS[outputs]))]
    sums = [T.bind(plus + minus) for plus, minus in pairs]
    differences = [T.bind(plus - minus) for plus, minus in pairs]
    result = []
    for power in range(outputs):
        terms = sums if power % 2 == 0 else differences
        factors = [point**power for point in _POINTS[outputs]]
        if power == 0:
            terms, factors = [values[0], *terms], [1.0, *factors]
        if power == outputs - 1:
            terms, factors = [values[-1], *terms], [1.0, *factors]
        result.append(combination(factors, terms, lanes))
    return result


def combination(factors: Sequence[float], values: Sequence[Any], lanes: int) -> Any:
    """Sum of ``factors`` times ``values``; zero factors are skipped."""
    terms = [(float(factor), value) for factor, value in zip(factors, values, strict=True) if factor]
    terms.sort(key=lambda term: (abs(term[0]) != 1.0, term[0] < 0.0))
    result = _scaled(*terms[0], lanes)
    for factor, value in terms[1:]:
        if abs(factor) == 1.0:
            result = result + value if factor > 0 else result - value
        else:
            result = result + _scaled(factor, value, lanes)
    return T.bind(result)


def _scaled(factor: float, value: Any, lanes: int) -> Any:
    return value if factor == 1.0 else value * emit.splat(factor, lanes)


def _sum_and_difference(even: Any, odd: Any, point: float, lanes: int) -> list[Any]:
    scaled = _scaled(point, odd, lanes)
    return [T.bind(even + scaled), T.bind(even - scaled)]


class WinogradTiles:
    """Tiles of ``outputs`` x ``outputs`` over the output of ``conv``, image by image; tiles at the end are partial."""

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
        """Transform the input of the tile with the first output at ``row`` and ``column``: ``keep(position, vector)``.

        ``load(row, column)`` is a vector of the input. Tiles that touch the padding use the buffer ``border``.
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
        """Transform ``sums(position)`` of the tile at ``row`` and ``column`` to outputs: ``finish(row, column,
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
        """Image, and row and column of the first output of a tile."""
        image, row, column = task_index(tile, self.conv.batch, self.rows, self.columns)
        return image, emit.bind(row * self.outputs), emit.bind(column * self.outputs)


def _either(conditions: Sequence[Any], then: Callable[[], None], otherwise: Callable[[], None]) -> None:
    """Emit ``then`` if all ``conditions`` hold, otherwise ``otherwise``; without a branch if known at compile time."""
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


class WinogradBuffers(NamedTuple):
    """Buffers of one task: transformed input, products of a group of output blocks, a tile at the border."""

    inputs: Any
    sums: Any
    border: Any


@dataclass(frozen=True)
class WinogradBlock:
    """``tiles`` tiles of ``grid`` at a time, with ``tile`` as the register tile of the products."""

    grid: WinogradTiles
    tile: RegisterTile
    tiles: int
    lanes: int

    @property
    def _positions(self) -> int:
        return self.grid.size**2

    @property
    def _in_blocks(self) -> int:
        return blocks(self.grid.conv.in_channels, self.lanes)

    def allocate(self) -> WinogradBuffers:
        """Allocate buffers in the task that is being emitted."""
        positions, grid = self._positions, self.grid
        return WinogradBuffers(
            # An odd number of lines between two positions, so that they fall into different cache sets.
            inputs=T.alloc_buffer((positions, self._in_blocks * self.tiles | 1, self.lanes), "float32"),
            sums=T.alloc_buffer((self.tile.out_blocks, self.tiles, positions | 1, self.lanes), "float32"),
            border=T.alloc_buffer((max(grid.size, grid.outputs) ** 2, self.lanes), "float32"),
        )

    def emit(
        self,
        buffers: WinogradBuffers,
        *,
        groups: TiledExtent,
        channel_task: Expr,
        place: Callable[[Expr], tuple[Expr, Expr, Expr]],
        source: Callable[[Expr, Expr], Callable[[Expr, Expr], Any]],
        weight: Any,
        bias: Any,
        finish: Callable[[tuple[Expr, ...], Sequence[Any]], None],
    ) -> None:
        """Emit all three steps for the output blocks of ``channel_task``.

        ``place(index)``: image, and row and column of the first output of a tile; ``source(image, block)(row,
        column)``: a vector of the input; ``finish(indices of the output, its sums with bias, one vector)`` stores.
        """
        inputs, sums, border = buffers
        lanes = self.lanes
        with emit.loop(self._in_blocks) as channel, emit.loop(self.tiles) as index:

            def keep(position: int, value: Any) -> None:
                emit.store(inputs, value, position, channel * self.tiles + index, lanes=lanes)

            image, row, column = place(index)
            self.grid.read(source(image, channel), border, row, column, lanes, keep)
        with emit.loop(groups.per_task) as group:
            first_block = groups.start(channel_task, group)
            with emit.loop(self._positions) as position:
                self._products(inputs, weight, sums, position, first_block)
            with emit.loop(self.tile.out_blocks) as o, emit.loop(self.tiles) as index:
                channel = first_block + o
                image, row, column = place(index)

                def write(y: Expr, x: Expr, value: Any) -> None:
                    finish((image, channel, y, x), [value + emit.load(bias, channel, lanes=lanes)])

                self.grid.write(
                    lambda position: emit.load(sums, o, index, position, lanes=lanes), border, row, column, lanes, write
                )

    def _products(self, inputs: Any, weight: Any, sums: Any, position: Expr, first: Expr) -> None:
        """Compute ``sums``, the matrix product at one ``position`` for a group of output blocks from ``first``."""
        lanes = self.lanes
        for segment in emit.segments(self.tiles, self.tile.columns):
            with emit.column_tile(segment) as start:
                DenseTile(
                    out_blocks=self.tile.out_blocks,
                    width=segment.width,
                    lanes=lanes,
                    unroll=self.tile.unroll,
                    x=lambda block, lane, _ky, _kx, column, start=start: inputs[  # type: ignore[misc]
                        position, block * self.tiles + start + column, lane
                    ],
                    weight=lambda o, block, lane, _ky, _kx: FLOAT32.weights(
                        weight, first + o, position, block * lanes + lane, lanes=lanes, ahead=PREFETCH_VECTORS
                    ),
                    initial=lambda _o, _column: emit.splat(0.0, lanes),
                    finish=lambda o, column, values, start=start: emit.store(  # type: ignore[misc]
                        sums, values[0], o, start + column, position, lanes=lanes
                    ),
                ).emit(self.grid.conv.in_channels, (0, 1), 1, lanes)

    def cycles(self, cpu: CpuTarget, groups: int, beside: float = 0.0) -> float:
        """Cycles of :meth:`emit` for ``groups`` groups of output blocks.

        ``beside``: bytes used by other parts of the kernel between two blocks of tiles.
        """
        outputs, positions, channels = self.grid.outputs, self._positions, self.grid.conv.in_channels
        into, out_of = (operations / PORTS for operations in transform_operations(outputs))
        into += positions * preparing_operations(self.grid.conv) / PORTS
        vector = 4 * cpu.lanes
        inputs = self.tiles * self._in_blocks * positions * vector
        weights = self.tile.out_blocks * positions * channels * vector
        sums = self.tiles * self.tile.out_blocks * positions * vector
        # Every position is written by one step and read by the next.
        transform = self.tiles * self._in_blocks * (max(into, positions) + positions + TILE_CYCLES)
        transform += exposed_traffic(cpu, inputs, inputs)
        finish = self.tiles * self.tile.out_blocks * (out_of + positions + outputs**2 + TILE_CYCLES)
        finish += exposed_traffic(cpu, sums, sums)
        one = dense_cycles(
            cpu,
            self.tile,
            self.tiles,
            channels,
            data_bytes=4 * self.tiles * channels,
            weight_bytes=weights / positions,
        )
        # The weights of a position were last used a block of tiles ago, its input a group of output blocks ago.
        one += exposed_traffic(cpu, weights / positions, weights * groups + inputs + sums + beside)
        one += exposed_traffic(cpu, inputs / positions, inputs + weights + sums)
        return transform + groups * (positions * one + finish)
