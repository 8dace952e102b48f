"""3x3 convolution, stride 1, by Winograd's minimal filtering: a matrix product over the channels at each of the n * n
positions of a transformed tile, for m * m outputs with n = m + 2.

A block of tiles goes through all three steps on one core, so that the transformed data never leave its caches (Jia et
al., PPoPP 2018). Lanes are channels in every step, so that the transforms are additions of vectors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from tvm import tirx

from costmodel.cpu.winograd_work import TAPS, winograd_applies
from costmodel.operators.layers import Conv2d, Operator
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.operator_reference import rounded_to
from schedules.contract.template import Config, Parameters, Signature, Template
from schedules.kernels.pointwise_kernel import conv_buffers, conv_signature
from schedules.loops import emit
from schedules.loops.emit import Expr
from schedules.loops.issue_slots import parallel_cycles
from schedules.loops.loop_nests import TiledExtent, store_finished, task_index
from schedules.loops.prepared_input import PreparedInput
from schedules.loops.register_tiling import RegisterTile, register_tiles
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits
from schedules.loops.weight_packing import pack_channel_constants, pack_prologue
from schedules.loops.winograd_block import WinogradBlock
from schedules.loops.winograd_tiles import WinogradTiles
from schedules.loops.winograd_transforms import relative_rounding, transformed_weight

# Knob of this algorithm only.
WINOGRAD_OUTPUTS = "winograd_outputs"
_UNROLL = 4
# Share of L2 for the transformed input of a block of tiles: the weights stream through the rest.
_L2_SHARE = 0.6


class WinogradKnobs(NamedTuple):
    """Knobs: ``winograd_outputs`` along each side of a tile, ``out_blocks`` x ``columns`` register tile of the
    products, ``tiles`` of a block, ``channel_tasks`` x ``tile_tasks`` parallel tasks.
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
    """Convolution with tasks of output blocks x tiles, in tiles of ``outputs`` x ``outputs``.

    Tensors stored as bfloat16 are converted as they are read; transformed weights and tiles are float32.
    """

    def __init__(self, outputs: int) -> None:
        self.outputs = outputs
        self.family = f"winograd-{outputs}x{outputs}"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return isinstance(operator, Conv2d) and winograd_applies(operator, cpu.lanes)

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        lanes, points = cpu.lanes, self._positions
        weight_shape = (blocks(operator.out_channels, lanes), points, operator.in_channels, lanes)
        return conv_signature(operator, lanes, weight_shape, weight_dtype="float32")

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(self._candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        conv, knobs = operator, WinogradKnobs(**config)
        groups, tiles = self._extents(conv, knobs, cpu)
        block = self._block(conv, knobs, cpu).cycles(cpu, groups.per_task)
        return parallel_cycles(cpu, groups.tasks * tiles.tasks, tiles.per_task * block)

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,), lanes = parameters, cpu.lanes
        count = blocks(operator.out_channels, lanes)
        padded = np.zeros((count * lanes, operator.in_channels, self._positions), np.float32)
        padded[: operator.out_channels] = transformed_weight(rounded_to(layer.weight, operator.dtype), self.outputs)
        packed = padded.reshape(count, lanes, operator.in_channels, self._positions).transpose(0, 3, 2, 1)
        constants = [pack_channel_constants(operator, layer, lanes), *pack_prologue(operator, layer, lanes)]
        return [np.ascontiguousarray(packed), *constants]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, WinogradKnobs(**config)
        groups, tiles = self._extents(conv, knobs, cpu)
        block = self._block(conv, knobs, cpu)

        def body(*arguments: Any) -> None:
            data, _, weight, bias, prologue, residual, output = conv_buffers(conv, arguments)
            source = PreparedInput(conv, data, None, prologue, lanes)
            with emit.tasks(groups.tasks * tiles.tasks) as task:
                channel_task, tile_task = task_index(task, groups.tasks, tiles.tasks)
                buffers = block.allocate()
                with emit.loop(tiles.per_task) as index:
                    first = tiles.start(tile_task, index)

                    def finish(at: tuple[Expr, ...], value: Any) -> None:
                        store_finished(output, value, at, conv, lanes, residual, (bias, at[1]))

                    block.emit(
                        buffers,
                        groups=groups,
                        channel_task=channel_task,
                        place=lambda tile: block.grid.place(first + tile),
                        source=source.block,
                        weight=weight,
                        bias=bias,
                        finish=finish,
                    )

        return emit.kernel("winograd_conv2d", self.signature(conv, cpu), body)

    def relative_rounding(self, config: Config) -> float:
        return relative_rounding(self.outputs)

    @property
    def _positions(self) -> int:
        return (self.outputs + TAPS - 1) ** 2

    def _block(self, conv: Conv2d, knobs: WinogradKnobs, cpu: CpuTarget) -> WinogradBlock:
        return WinogradBlock(WinogradTiles(conv, self.outputs), knobs.tile, knobs.tiles, cpu.lanes)

    def _extents(self, conv: Conv2d, knobs: WinogradKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
        """Return output blocks and tiles, each divided among tasks."""
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
    """Return choices of tiles per block: as many as fit into L2, halves of that, and equal shares close to them."""
    found = set()
    size = min(total, fitting)
    while size >= 1:
        found |= {size, -(-total // -(-total // size))}
        if size < 8:
            break
        size //= 2
    return sorted(found)
