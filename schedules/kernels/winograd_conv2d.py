"""3x3 convolution, stride 1, by Winograd's minimal filtering: a matrix product over the channels at each of the n * n
positions of a transformed tile, for m * m outputs with n = m + 2.

A block of tiles goes through all three steps on one core, so that what was transformed never leaves its caches (Jia et
al., PPoPP 2018). Lanes are channels in every step, so that the transforms are additions of vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.cpu.winograd_work import TAPS, transform_operations, winograd_applies
from costmodel.operators.layers import Conv2d, Operator
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template
from schedules.kernels.pointwise_kernel import conv_signature
from schedules.loops import emit
from schedules.loops.emit import Expr
from schedules.loops.issue_slots import PORTS, TILE_CYCLES, dense_cycles, exposed_traffic, parallel_cycles
from schedules.loops.loop_nests import PREFETCH_VECTORS, TiledExtent, store_finished, task_index
from schedules.loops.register_kernels import DenseTile
from schedules.loops.register_tiling import RegisterTile, register_tiles
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits
from schedules.loops.weight_packing import pack_channel_constants
from schedules.loops.winograd_tiles import WinogradTiles
from schedules.loops.winograd_transforms import relative_rounding, transformed_weight

# The knob that no other algorithm has.
WINOGRAD_OUTPUTS = "winograd_outputs"
_UNROLL = 4
# Share of L2 that the transformed input of a block of tiles may take: the weights stream through the rest.
_L2_SHARE = 0.6


class WinogradKnobs(NamedTuple):
    """``winograd_outputs`` along each side of a tile, ``out_blocks`` x ``columns`` register tile of the products,
    ``tiles`` of a block, ``channel_tasks`` x ``tile_tasks`` parallel tasks.
    """

    winograd_outputs: int
    out_blocks: int
    columns: int
    tiles: int
    channel_tasks: int
    tile_tasks: int

    @property
    def tile(self) -> RegisterTile:
        return RegisterTile(self.out_blocks, self.columns, _UNROLL)


class WinogradConv2d(Template):
    """Tasks of output blocks x tiles, by tiles of ``outputs`` x ``outputs``."""

    def __init__(self, outputs: int) -> None:
        self.outputs = outputs
        self.family = f"winograd-{outputs}x{outputs}"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return isinstance(operator, Conv2d) and winograd_applies(operator, cpu.lanes)

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        lanes, points = cpu.lanes, self._positions
        return conv_signature(
            operator, lanes, (blocks(operator.out_channels, lanes), points, operator.in_channels, lanes)
        )

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(self._candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        conv, knobs = operator, WinogradKnobs(**config)
        groups, tiles = self._extents(conv, knobs, cpu)
        into, out_of = (operations / PORTS for operations in transform_operations(self.outputs))
        in_blocks, positions = blocks(conv.in_channels, cpu.lanes), self._positions
        vector = 4 * cpu.lanes
        inputs = knobs.tiles * in_blocks * positions * vector  # transformed, of a block
        weights = knobs.out_blocks * positions * conv.in_channels * vector
        sums = knobs.tiles * knobs.out_blocks * positions * vector
        # Every position is written by one step and read by the next.
        transform = knobs.tiles * in_blocks * (max(into, positions) + positions + TILE_CYCLES)
        transform += exposed_traffic(cpu, inputs, inputs)
        finish = knobs.tiles * knobs.out_blocks * (out_of + positions + self.outputs**2 + TILE_CYCLES)
        finish += exposed_traffic(cpu, sums, sums)
        one = dense_cycles(
            cpu,
            knobs.tile,
            knobs.tiles,
            conv.in_channels,
            data_bytes=4 * knobs.tiles * conv.in_channels,
            weight_bytes=weights / positions,
        )
        # The weights of a position were last used a block of tiles ago, its input a group of output blocks ago.
        one += exposed_traffic(cpu, weights / positions, weights * groups.per_task + inputs + sums)
        one += exposed_traffic(cpu, inputs / positions, inputs + weights + sums)
        block = transform + groups.per_task * (positions * one + finish)
        return parallel_cycles(cpu, groups.tasks * tiles.tasks, tiles.per_task * block)

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,), lanes = parameters, cpu.lanes
        count = blocks(operator.out_channels, lanes)
        padded = np.zeros((count * lanes, operator.in_channels, self._positions), np.float32)
        padded[: operator.out_channels] = transformed_weight(layer.weight, self.outputs)
        packed = padded.reshape(count, lanes, operator.in_channels, self._positions).transpose(0, 3, 2, 1)
        return [np.ascontiguousarray(packed), pack_channel_constants(operator, layer, lanes)]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, WinogradKnobs(**config)
        groups, tiles = self._extents(conv, knobs, cpu)
        positions, in_blocks = self._positions, blocks(conv.in_channels, lanes)
        grid = WinogradTiles(conv, self.outputs)

        def body(data: Any, weight: Any, bias: Any, *rest: Any) -> None:
            residual, output = (rest[0], rest[1]) if conv.epilogue.residual else (None, rest[0])
            with emit.tasks(groups.tasks * tiles.tasks) as task:
                channel_task, tile_task = task_index(task, groups.tasks, tiles.tasks)
                # An odd number of lines between two positions: they fall into different sets of the cache.
                inputs = T.alloc_buffer((positions, in_blocks * knobs.tiles | 1, lanes), "float32")
                sums = T.alloc_buffer((knobs.out_blocks, knobs.tiles, positions | 1, lanes), "float32")
                border = T.alloc_buffer((max(grid.size, self.outputs) ** 2, lanes), "float32")
                with emit.loop(tiles.per_task) as block:
                    first = tiles.start(tile_task, block)
                    with emit.loop(in_blocks) as channel, emit.loop(knobs.tiles) as index:

                        def keep(position: int, value: Any) -> None:
                            emit.store(inputs, value, position, channel * knobs.tiles + index, lanes=lanes)

                        grid.read(data, border, channel, first + index, lanes, keep)
                    with emit.loop(groups.per_task) as group:
                        first_block = groups.start(channel_task, group)
                        with emit.loop(positions) as position:
                            _products(conv, knobs, lanes, inputs, weight, sums, position, first_block)
                        with emit.loop(knobs.out_blocks) as o, emit.loop(knobs.tiles) as index:
                            channel = first_block + o

                            def finish(at: tuple[Expr, ...], value: Any) -> None:
                                value = value + emit.load(bias, channel, lanes=lanes)
                                store_finished(output, value, at, conv.epilogue, lanes, residual, (bias, channel))

                            grid.write(
                                lambda position: emit.load(sums, o, index, position, lanes=lanes),
                                border, channel, first + index, lanes, finish,
                            )  # fmt: skip

        return emit.kernel("winograd_conv2d", self.signature(conv, cpu), body)

    def relative_rounding(self, config: Config) -> float:
        return relative_rounding(self.outputs)

    @property
    def _positions(self) -> int:
        return (self.outputs + TAPS - 1) ** 2

    def _extents(self, conv: Conv2d, knobs: WinogradKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
        """Output blocks and tiles, each dealt out to tasks."""
        return (
            TiledExtent(blocks(conv.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
            TiledExtent(WinogradTiles(conv, self.outputs).count, knobs.tiles, knobs.tile_tasks),
        )

    def _candidates(self, conv: Conv2d, cpu: CpuTarget) -> Iterator[Config]:
        count, total = blocks(conv.out_channels, cpu.lanes), WinogradTiles(conv, self.outputs).count
        bytes_of_tile = 4 * self._positions * blocks(conv.in_channels, cpu.lanes) * cpu.lanes
        fitting = max(1, int(_L2_SHARE * cpu.l2_bytes) // bytes_of_tile)
        for tiles in _block_sizes(total, fitting):
            for size, width in register_tiles(count, tiles, cpu):
                groups, tile_blocks = -(-count // size), -(-total // tiles)
                for channel_tasks, tile_tasks in task_splits(groups, tile_blocks, cpu, is_small(conv.flops)):
                    yield WinogradKnobs(self.outputs, size, width, tiles, channel_tasks, tile_tasks)._asdict()


def _block_sizes(total: int, fitting: int) -> list[int]:
    """Tiles of a block: what fits into L2, halves of it, and equal shares near them."""
    found = set()
    size = min(total, fitting)
    while size >= 1:
        found |= {size, -(-total // -(-total // size))}
        if size < 8:
            break
        size //= 2
    return sorted(found)


def _products(
    conv: Conv2d, knobs: WinogradKnobs, lanes: int, inputs: Any, weight: Any, sums: Any, position: Expr, first: Expr
) -> None:
    """The matrix product at one ``position`` for ``knobs.out_blocks`` output blocks from ``first``: ``sums``."""
    for segment in emit.segments(knobs.tiles, knobs.columns):
        with emit.column_tile(segment) as start:
            DenseTile(
                out_blocks=knobs.out_blocks,
                width=segment.width,
                lanes=lanes,
                unroll=knobs.tile.unroll,
                x=lambda block, lane, _ky, _kx, column, start=start: inputs[  # type: ignore[misc]
                    position, block * knobs.tiles + start + column, lane
                ],
                weight=lambda o, block, lane, _ky, _kx: emit.load_ahead(
                    weight, first + o, position, block * lanes + lane, lanes=lanes, ahead=PREFETCH_VECTORS
                ),
                initial=lambda _: emit.splat(0.0, lanes),
                finish=lambda o, column, value, start=start: emit.store(  # type: ignore[misc]
                    sums, value, o, start + column, position, lanes=lanes
                ),
            ).emit(conv.in_channels, (0, 1), 1, lanes)
