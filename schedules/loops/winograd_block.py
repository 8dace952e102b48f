"""Block of Winograd tiles on one core: transformed, multiplied position by position, transformed back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tvm.script.ir_builder import tirx as T

from costmodel.cpu.winograd_work import transform_operations
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.loops import emit
from schedules.loops.dot_products import FLOAT32
from schedules.loops.emit import Expr
from schedules.loops.issue_slots import PORTS, TILE_CYCLES, dense_cycles, exposed_traffic
from schedules.loops.loop_nests import PREFETCH_VECTORS, TiledExtent
from schedules.loops.prepared_input import preparing_operations
from schedules.loops.register_kernels import DenseTile
from schedules.loops.register_tiling import RegisterTile
from schedules.loops.winograd_tiles import WinogradTiles


class WinogradBuffers(NamedTuple):
    """Buffers of one task: transformed input, products of a group of output blocks, a tile at the border."""

    inputs: Any
    sums: Any
    border: Any


@dataclass(frozen=True)
class WinogradBlock:
    """Block of ``tiles`` tiles of ``grid``, with ``tile`` as the register tile of the products."""

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
        """Allocate the buffers of the task that is being emitted."""
        positions, grid = self._positions, self.grid
        return WinogradBuffers(
            # An odd number of lines between two positions: they fall into different sets of the cache.
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
        column)``: a vector of the input; ``finish(indices of the output, its sums with bias, one vector)``.
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
        """Compute the matrix product at one ``position`` for the output blocks of a group from ``first``
        into ``sums``.
        """
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
        """Return the cycles of :meth:`emit` for ``groups`` groups of output blocks; ``beside``: bytes used by other
        parts of the kernel between two blocks of tiles.
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
        # The weights of a position were last used one block of tiles ago, its input one group of output blocks ago.
        one += exposed_traffic(cpu, weights / positions, weights * groups + inputs + sums + beside)
        one += exposed_traffic(cpu, inputs / positions, inputs + weights + sums)
        return transform + groups * (positions * one + finish)
