"""Fused 1x1 -> 1x1: a tile of pixels with all intermediate channels stays in the caches of one core.

Used in the blocks of ConvNeXt, whose intermediate is four times as wide as input and output.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.cpu.roofline import middle_dtype
from costmodel.operators.layers import Conv2d, FusedConvs, element_bytes
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, blocks, tensor_dtype
from schedules.kernels.fused.fused_chain import ChainLayer, FusedTemplate, split_arguments
from schedules.loops import emit
from schedules.loops.config_space import (
    RegisterTile,
    cheapest_first,
    dense_cycles,
    exposed_traffic,
    parallel_cycles,
    register_tiles,
)
from schedules.loops.dot_products import dot_product
from schedules.loops.loop_nests import TiledExtent, pointwise_phase, store_finished, task_index

_UNROLL = 4


class PointwisePairKnobs(NamedTuple):
    """Knobs of a fused pair of 1x1 convolutions."""

    # Pixels of a tile.
    pixels: int
    # Register tile of the first convolution.
    middle_blocks: int
    middle_columns: int
    # Register tile of the last convolution.
    out_blocks: int
    columns: int
    # Number of parallel tasks.
    pixel_tasks: int

    @property
    def tiles(self) -> tuple[RegisterTile, RegisterTile]:
        """Register tiles of the first and of the last convolution."""
        return (
            RegisterTile(self.middle_blocks, self.middle_columns, _UNROLL),
            RegisterTile(self.out_blocks, self.columns, _UNROLL),
        )


class PointwisePair(FusedTemplate):
    """Tasks of pixel tiles; each tile passes over the weights of both layers."""

    family = "pointwise-pointwise"

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> float:
        knobs = PointwisePairKnobs(**config)
        tiles = _pixel_tiles(operator, knobs)
        size = element_bytes(operator.dtype)
        middle_bytes = size * knobs.pixels * operator.convs[0].out_channels
        cycles = 2 * exposed_traffic(cpu, middle_bytes, middle_bytes + operator.weight_bytes)
        for conv, tile, groups in zip(operator.convs, knobs.tiles, _groups(operator, knobs, cpu), strict=True):
            weight_bytes = size * tile.out_blocks * cpu.lanes * conv.in_channels
            data_bytes = size * knobs.pixels * conv.in_channels
            one = dense_cycles(
                cpu, tile, knobs.pixels, conv.in_channels,
                data_bytes=data_bytes, weight_bytes=weight_bytes, dtype=conv.dtype,
            )  # fmt: skip
            cycles += groups.per_task * one
        cycles += exposed_traffic(cpu, operator.weight_bytes, operator.weight_bytes + middle_bytes)
        return parallel_cycles(cpu, operator.batch * tiles.tasks, tiles.per_task * cycles)

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        lanes, knobs = cpu.lanes, PointwisePairKnobs(**config)
        tiles = _pixel_tiles(operator, knobs)
        middle_groups, out_groups = _groups(operator, knobs, cpu)
        first_tile, last_tile = knobs.tiles
        operand = dot_product(operator.dtype).operand

        def body(*buffers: Any) -> None:
            data, (expand, project), residual, output = split_arguments(operator, buffers)
            with emit.tasks(operator.batch * tiles.tasks) as task:
                image, pixel_task = task_index(task, operator.batch, tiles.tasks)
                middle = T.alloc_buffer(
                    (middle_groups.extent, knobs.pixels, lanes), tensor_dtype(middle_dtype(operator.convs[1]))
                )
                with emit.loop(tiles.per_task) as index:
                    first = tiles.start(pixel_task, index)

                    def keep(block: Any, pixel: Any, sums: Any) -> None:
                        channel = (expand.bias, block)
                        store_finished(middle, sums, (block, pixel), expand.conv, lanes, channel=channel)

                    def finish(block: Any, pixel: Any, sums: Any) -> None:
                        at, channel = (image, block, 0, first + pixel), (project.bias, block)
                        store_finished(output, sums, at, project.conv, lanes, residual, channel=channel)

                    def phase(
                        layer: ChainLayer, tile: RegisterTile, groups: TiledExtent, source: Any, sink: Any
                    ) -> None:
                        with emit.loop(groups.per_task) as group:
                            pointwise_phase(
                                layer.conv,
                                tile,
                                lanes,
                                pixels=knobs.pixels,
                                first_block=groups.start(0, group),
                                source=source,
                                weight=layer.weight,
                                bias=layer.bias,
                                sink=sink,
                            )

                    phase(
                        expand,
                        first_tile,
                        middle_groups,
                        lambda block, pixel, lane: operand(data, image, block, 0, first + pixel, lane),
                        keep,
                    )
                    phase(
                        project,
                        last_tile,
                        out_groups,
                        lambda block, pixel, lane: operand(middle, block, pixel, lane),
                        finish,
                    )

        return emit.kernel("pointwise_pair", self.signature(operator, cpu), body)


def _pixel_tiles(fused: FusedConvs, knobs: PointwisePairKnobs) -> TiledExtent:
    conv = fused.convs[1]
    return TiledExtent(conv.height * conv.width, knobs.pixels, knobs.pixel_tasks)


def _groups(fused: FusedConvs, knobs: PointwisePairKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Output blocks of both convolutions in register tiles; a task computes all of them."""
    first, last = (blocks(conv.out_channels, cpu.lanes) for conv in fused.convs)
    return TiledExtent(first, knobs.middle_blocks, 1), TiledExtent(last, knobs.out_blocks, 1)


def _candidates(fused: FusedConvs, cpu: CpuTarget) -> Iterator[Config]:
    first, last = fused.convs
    pixels = last.height * last.width
    for tile in _tile_pixels(fused, pixels, cpu):
        tiles = -(-pixels // tile)
        counts = {factor * cpu.threads for factor in (1, 2, 4)} | {min(tiles, cpu.threads)}
        tasks = sorted({count for count in counts if count <= tiles})
        first_shapes, last_shapes = (_dividing_tiles(conv, tile, cpu) for conv in (first, last))
        for (middle, middle_columns), (out, columns), count in product(first_shapes, last_shapes, tasks):
            yield PointwisePairKnobs(tile, middle, middle_columns, out, columns, count)._asdict()


def _dividing_tiles(conv: Conv2d, pixels: int, cpu: CpuTarget) -> list[tuple[int, int]]:
    """Register tiles that divide the output blocks evenly, or all fitting ones if there are none."""
    count = blocks(conv.out_channels, cpu.lanes)
    tiles = register_tiles(count, pixels, cpu)
    return [tile for tile in tiles if count % tile[0] == 0] or tiles


def _tile_pixels(fused: FusedConvs, pixels: int, cpu: CpuTarget) -> list[int]:
    """Pixels of a tile: intermediate channels fill a fraction of L2, from a thirty-second to a half.

    Tiles have at least as many pixels as two register tiles, if the image has them.
    """
    middle_bytes = element_bytes(fused.dtype) * blocks(fused.convs[0].out_channels, cpu.lanes) * cpu.lanes
    share = -(-pixels // cpu.threads)
    found = set()
    for part in (32, 8, 4, 2):
        fitting = min(share, max(24, cpu.l2_bytes // part // middle_bytes))
        count = -(-share // fitting)
        found.add(-(-share // count))  # equal tiles: the last one would overlap its neighbour otherwise
    return sorted(found)
