"""The two convolutions of a fused pair, each by direct sums or by Winograd's algorithm: their loops and their cycles.

Between them is a buffer of rows, (channel blocks, pixels, V), in which a row begins at ``position(row)``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from costmodel.cpu.fused_tile import middle_dtype
from costmodel.cpu.winograd_work import winograd_applies
from costmodel.operators.layers import Conv2d, element_bytes
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.kernels.fused_chain import (
    ChainInput,
    ChainLayer,
    conv_output_phase,
    pointwise_output_phase,
)
from schedules.loops import emit
from schedules.loops.emit import Expr
from schedules.loops.issue_slots import TapRow, dense_cycles, depthwise_cycles, exposed_traffic
from schedules.loops.loop_nests import TiledExtent, depthwise_phase, store_finished, task_index
from schedules.loops.register_tiling import RegisterTile, depthwise_widths, register_tiles
from schedules.loops.winograd_block import WinogradBlock, WinogradBuffers
from schedules.loops.winograd_tiles import WinogradTiles

Position = Callable[[Expr], Expr]


def has_winograd(conv: Conv2d, outputs: int, lanes: int) -> bool:
    """True if ``conv`` is computed in tiles of ``outputs`` x ``outputs`` (0: no Winograd): bands of tiles must fit its
    rows.
    """
    return outputs > 0 and winograd_applies(conv, lanes) and conv.out_height >= outputs


@dataclass(frozen=True)
class PairLayer:
    """Convolution ``conv`` of a pair with the register tile ``tile``."""

    conv: Conv2d
    tile: RegisterTile
    # Outputs along each side of a Winograd tile; 0: direct sums.
    outputs: int
    lanes: int
    # Limit of Winograd tiles of a step that go through the three steps together; 0: all.
    block_tiles: int = 0

    @property
    def groups(self) -> TiledExtent:
        """Output blocks of the layer: every task computes all of them."""
        return TiledExtent(blocks(self.conv.out_channels, self.lanes), self.tile.out_blocks, 1)

    def block(self, rows: int) -> WinogradBlock | None:
        """Return a block of the Winograd tiles of ``rows`` rows; None with direct sums."""
        if not self.outputs:
            return None
        return WinogradBlock(WinogradTiles(self.conv, self.outputs), self.tile, self.shares(rows).size, self.lanes)

    def shares(self, rows: int) -> TiledExtent:
        """Return the Winograd tiles of ``rows`` rows in equal blocks."""
        count = rows // self.outputs * WinogradTiles(self.conv, self.outputs).columns
        parts = -(-count // (self.block_tiles or count))
        return TiledExtent(count, -(-count // parts), 1)

    def transformed_bytes(self, rows: int) -> int:
        """Return the bytes of the transformed input of a block of ``rows`` rows; 0 with direct sums."""
        block = self.block(rows)
        count = 0 if block is None else block.tiles * block.grid.size**2
        return element_bytes("float32") * count * blocks(self.conv.in_channels, self.lanes) * self.lanes

    @property
    def _depth(self) -> int:
        return self.conv.in_channels * self.conv.kernel[0] * self.conv.kernel[1]

    @property
    def _row_bytes(self) -> int:
        return element_bytes(self.conv.dtype) * self.conv.in_channels * self.conv.width * self.conv.stride[0]

    @property
    def _group_bytes(self) -> int:
        return element_bytes(self.conv.dtype) * self.tile.out_blocks * self.lanes * self._depth

    def _exposed_weights(self, cpu: CpuTarget, resident: int) -> float:
        """Return the cycles of reading all weights once per step."""
        size = blocks(self.conv.out_channels, self.lanes) * self.lanes * self._depth * element_bytes(self.conv.dtype)
        return exposed_traffic(cpu, size, size + resident)


class FirstLayer(PairLayer):
    """First layer of a pair, which fills rows of the buffer."""

    def rows(
        self,
        layer: ChainLayer,
        buffers: WinogradBuffers | None,
        source: ChainInput,
        image: Expr,
        new_rows: tuple[Expr, Expr],
        middle: Any,
        position: Position,
    ) -> None:
        """Emit the rows [begin, end) of its output, all channel blocks."""
        conv, lanes = self.conv, self.lanes

        def keep(block: Expr, start: Expr, sums: Any) -> None:
            store_finished(middle, sums, (block, start), conv, lanes, channel=(layer.bias, block))

        if buffers is None:
            with emit.loop(self.groups.per_task) as group, emit.span(*new_rows) as row:
                start = emit.bind(position(row))
                source.row(
                    layer, self.tile, image, row, self.groups.start(0, group),
                    lambda block, column, sums: keep(block, start + column, sums),
                )  # fmt: skip
            return
        begin, end = new_rows
        tiles = self.block(self.outputs)
        assert tiles is not None, "buffers are allocated for its tiles"
        with emit.span(0, emit.quotient(end - begin + self.outputs - 1, self.outputs)) as band:
            # The last band is moved back to end with the rows: the overlap of two bands is computed twice.
            row = emit.bind(emit.larger(0, emit.smaller(begin + band * self.outputs, end - self.outputs)))
            shares = self.shares(self.outputs)
            with emit.loop(shares.per_task) as part:
                tile_0 = shares.start(0, part)
                tiles.emit(
                    buffers,
                    groups=self.groups,
                    channel_task=0,
                    place=lambda tile: (image, row, emit.bind((tile_0 + tile) * self.outputs)),
                    source=lambda n, block: lambda y, x: emit.load(source.data, n, block, y, x, lanes=lanes),
                    weight=layer.weight,
                    bias=layer.bias,
                    finish=lambda at, sums: keep(at[1], position(at[2]) + at[3], sums),
                )

    def shapes(self, cpu: CpuTarget) -> list[tuple[int, int]]:
        """Return the candidate register tiles."""
        block = self.block(self.outputs)
        columns = self.conv.out_width if block is None else block.tiles
        return register_tiles(self.groups.extent, columns, cpu, most=6)

    def cycles(self, cpu: CpuTarget, rows: int, resident: int) -> float:
        """Return the cycles of ``rows`` new rows; ``resident``: bytes that are used before its weights are
        read again.
        """
        filling = exposed_traffic(cpu, resident, resident)
        block = self.block(self.outputs)
        if block is not None:
            parts = -(-rows // self.outputs) * self.shares(self.outputs).per_task
            return parts * block.cycles(cpu, self.groups.per_task, resident) + filling
        one = dense_cycles(
            cpu, self.tile, self.conv.out_width, self._depth,
            data_bytes=self._row_bytes, weight_bytes=self._group_bytes, dtype=self.conv.dtype,
            taps=TapRow.of(self.conv),
        )  # fmt: skip
        one += exposed_traffic(cpu, self._row_bytes, rows * self._row_bytes)
        return self.groups.per_task * rows * one + self._exposed_weights(cpu, resident) + filling


class LastLayer(PairLayer):
    """Last layer of a pair, which computes rows of the output from the buffer."""

    def rows(
        self,
        layer: ChainLayer,
        buffers: WinogradBuffers | None,
        rows: int,
        image: Expr,
        first_row: Expr,
        middle: Any,
        position: Position,
        residual: Any | None,
        output: Any,
    ) -> None:
        """Emit ``rows`` rows from ``first_row``, all output blocks, with the epilogue."""
        conv, lanes, tiles = self.conv, self.lanes, self.block(rows)
        if tiles is not None:
            assert buffers is not None, "buffers are allocated for its tiles"

            shares = self.shares(rows)

            def place(tile: Expr) -> tuple[Expr, Expr, Expr]:
                band, column = task_index(tile, rows // self.outputs, tiles.grid.columns)
                return image, emit.bind(first_row + band * self.outputs), emit.bind(column * self.outputs)

            def finish(at: tuple[Expr, ...], sums: Any) -> None:
                store_finished(output, sums, at, conv, lanes, residual, channel=(layer.bias, at[1]))

            with emit.loop(shares.per_task) as part:
                tile_0 = shares.start(0, part)
                tiles.emit(
                    buffers,
                    groups=self.groups,
                    channel_task=0,
                    place=lambda tile: place(tile_0 + tile),
                    source=lambda _, block: lambda y, x: emit.load(middle, block, position(y) + x, lanes=lanes),
                    weight=layer.weight,
                    bias=layer.bias,
                    finish=finish,
                )
        elif conv.is_pointwise:
            pointwise_output_phase(
                layer, self.tile, lanes, rows=rows, groups=self.groups, task=0, image=image, first_row=first_row,
                tile=middle, residual=residual, output=output,
            )  # fmt: skip
        elif conv.is_depthwise:
            self._depthwise_rows(layer, rows, image, first_row, middle, position, residual, output)
        else:
            conv_output_phase(
                layer, self.tile, lanes, rows=rows, groups=self.groups, image=image, first_row=first_row,
                tile=middle, position=position, residual=residual, output=output,
            )  # fmt: skip

    def _depthwise_rows(
        self,
        layer: ChainLayer,
        rows: int,
        image: Expr,
        first_row: Expr,
        middle: Any,
        position: Position,
        residual: Any | None,
        output: Any,
    ) -> None:
        conv, lanes = self.conv, self.lanes
        with emit.loop(self.groups.extent) as block:

            def sink(row: Expr, column: Expr, sums: Any) -> None:
                at = (image, block, first_row + row, column)
                store_finished(output, sums, at, conv, lanes, residual, channel=(layer.bias, block))

            depthwise_phase(
                conv, self.tile.columns, lanes, rows=rows, first_row=first_row, block=block,
                data=middle, at=lambda row, column: (block, position(row) + column),
                weight=layer.weight, bias=layer.bias, sink=sink,
            )  # fmt: skip

    def shapes(self, cpu: CpuTarget, rows: int) -> list[tuple[int, int]]:
        """Return the candidate register tiles for steps of ``rows`` rows."""
        conv, block = self.conv, self.block(rows)
        if conv.is_depthwise:
            return [(1, width) for width in depthwise_widths(conv, cpu)[-2:]]
        columns = rows * conv.width if conv.is_pointwise else conv.out_width
        return register_tiles(self.groups.extent, columns if block is None else block.tiles, cpu, most=6)

    def cycles(self, cpu: CpuTarget, rows: int, resident: int) -> float:
        """Return the cycles of a step of ``rows`` rows that reads ``resident`` bytes of intermediate rows."""
        conv, groups, block = self.conv, self.groups, self.block(rows)
        if block is not None:
            return self.shares(rows).per_task * block.cycles(cpu, groups.per_task, resident)
        if conv.is_depthwise:
            return groups.extent * depthwise_cycles(
                conv, self.tile.columns, rows, source=middle_dtype(conv)
            ) + exposed_traffic(cpu, resident, resident)
        weights = self._exposed_weights(cpu, resident)
        if conv.is_pointwise:
            one = dense_cycles(
                cpu, self.tile, rows * conv.width, self._depth,
                data_bytes=resident, weight_bytes=self._group_bytes, dtype=conv.dtype,
            )  # fmt: skip
            return groups.per_task * one + weights
        row = dense_cycles(
            cpu, self.tile, conv.out_width, self._depth,
            data_bytes=self._row_bytes, weight_bytes=self._group_bytes, dtype=conv.dtype, taps=TapRow.of(conv),
        )  # fmt: skip
        return groups.per_task * (rows * row + exposed_traffic(cpu, resident, resident)) + weights
