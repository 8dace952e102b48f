"""1x1 convolution in the tile registers of AMX: rows of a tile are pixels of the image."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

from tvm import tirx

from costmodel.operators.layers import Conv2d, Operator, element_bytes
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template
from schedules.kernels.pointwise_kernel import conv_buffers, conv_signature, is_prepared, pixel_blocks
from schedules.loops import emit
from schedules.loops.issue_slots import exposed_traffic, parallel_cycles
from schedules.loops.loop_nests import TiledExtent, store_finished, task_index
from schedules.loops.prepared_input import PreparedInput
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits
from schedules.loops.tile_phases import pixels_phase
from schedules.loops.tile_products import (
    TileShape,
    block_cycles,
    depths,
    has_tile_products,
    tile_product,
    tile_shapes,
)
from schedules.loops.tile_rows import TileRows, is_copied, laying_out_cycles
from schedules.loops.weight_packing import pack_channel_constants, pack_prologue, pack_tiles, tile_weight_shape


class TilePointwiseKnobs(NamedTuple):
    """Knobs: ``row_tiles`` x ``out_blocks`` tiles of sums of ``tile_rows`` pixels each; ``depth_blocks`` blocks of
    input channels per step, ``pixel_block`` pixels per pass over the weights, ``channel_tasks`` x ``pixel_tasks``
    parallel tasks.
    """

    row_tiles: int
    out_blocks: int
    tile_rows: int
    depth_blocks: int
    pixel_block: int
    channel_tasks: int
    pixel_tasks: int


class TileConvolution(Template):
    """Base of convolutions in tiles, whose weight layout depends on ``depth``, the blocks of input channels
    per step.
    """

    kind: ClassVar[str]

    def __init__(self, depth: int) -> None:
        """Create the template; ``depth``: blocks of input channels per step, which determines the layout of weights."""
        self._depth = depth
        self.family = f"{self.kind}-{depth}"

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        return conv_signature(operator, cpu.lanes, tile_weight_shape(operator, cpu.lanes, self._depth))

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,) = parameters
        weight = pack_tiles(operator, layer.weight, cpu.lanes, self._depth)
        return [weight, pack_channel_constants(operator, layer, cpu.lanes), *pack_prologue(operator, layer, cpu.lanes)]


class TilePointwise(TileConvolution):
    """1x1 convolution as :class:`schedules.kernels.pointwise_kernel.Pointwise`, in tiles, optionally with a gate or a
    prologue.

    With one block of input channels per step tiles are read directly from the image, though their rows are only half
    full (a quarter for bytes). With more, or with a gate or prologue, a block of pixels is first laid out in rows, in a
    buffer of the task that stays in its caches.
    """

    kind = "tile-pointwise"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        if not isinstance(operator, Conv2d) or not operator.is_pointwise or not has_tile_products(operator.dtype, cpu):
            return False
        if operator.in_channels < cpu.lanes // 2 or (operator.dtype == "int8" and is_prepared(operator)):
            return False
        return self._depth in depths(blocks(operator.in_channels, cpu.lanes), operator.dtype, cpu.lanes)

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(self._candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        conv, knobs = operator, TilePointwiseKnobs(**config)
        groups, tiles = _extents(conv, knobs, cpu)
        shape = self._shape(conv, knobs, cpu)
        runs = -(-blocks(conv.in_channels, cpu.lanes) // self._depth)
        row_bytes = runs * shape.depth_bytes
        data_bytes, weight_bytes = knobs.pixel_block * row_bytes, knobs.out_blocks * cpu.lanes * row_bytes
        passes = -(-knobs.pixel_block // shape.all_rows)
        one = passes * block_cycles(shape, runs)
        one += passes * exposed_traffic(cpu, weight_bytes, weight_bytes + shape.all_rows * row_bytes)
        one += exposed_traffic(cpu, data_bytes, data_bytes + weight_bytes)
        block = groups.per_task * one
        if self._laid_out(conv):
            block += laying_out_cycles(conv, cpu, knobs.pixel_block, conv.input_bytes / cpu.threads)
        return parallel_cycles(cpu, conv.batch * groups.tasks * tiles.tasks, tiles.per_task * block)

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, TilePointwiseKnobs(**config)
        groups, pixels = _extents(conv, knobs, cpu)
        shape, image_pixels = self._shape(conv, knobs, cpu), conv.height * conv.width

        def body(*buffers: Any) -> None:
            data, gate, weight, bias, prologue, residual, output = conv_buffers(conv, buffers)
            with emit.tasks(conv.batch * groups.tasks * pixels.tasks) as task:
                image, channel_task, pixel_task = task_index(task, conv.batch, groups.tasks, pixels.tasks)
                rows = TileRows(conv, lanes, self._depth, 1, knobs.pixel_block) if self._laid_out(conv) else None
                with tile_product(shape, conv.dtype) as product, emit.loop(pixels.per_task) as index:
                    first = pixels.start(pixel_task, index)
                    if rows is not None:
                        rows.fill(PreparedInput(conv, data, gate, prologue, lanes), image, 0, first, image_pixels)

                    def source(run: Any, pixel: Any) -> Any:
                        return data[image, run, 0, first + pixel, 0] if rows is None else rows.first(run, 0, pixel)

                    def sink(block: Any, pixel: Any, sums: Any) -> None:
                        at = (image, block, 0, first + pixel)
                        store_finished(output, [sums], at, conv, lanes, residual, channel=(bias, block))

                    with emit.loop(groups.per_task) as group:
                        pixels_phase(
                            conv,
                            product,
                            pixels=knobs.pixel_block,
                            first_block=groups.start(channel_task, group),
                            source=source,
                            weight=weight,
                            bias=bias,
                            sink=sink,
                        )

        return emit.kernel("tile_pointwise", self.signature(conv, cpu), body, tiles=True)

    def _laid_out(self, conv: Conv2d) -> bool:
        return self._depth > 1 or not is_copied(conv)

    def _shape(self, conv: Conv2d, knobs: TilePointwiseKnobs, cpu: CpuTarget) -> TileShape:
        depth_bytes = self._depth * cpu.lanes * element_bytes(conv.dtype)
        return TileShape(knobs.row_tiles, knobs.out_blocks, knobs.tile_rows, depth_bytes)

    def _candidates(self, conv: Conv2d, cpu: CpuTarget) -> Iterator[Config]:
        count, pixels = blocks(conv.out_channels, cpu.lanes), conv.height * conv.width
        in_bytes = blocks(conv.in_channels, cpu.lanes) * cpu.lanes * element_bytes(conv.dtype)
        for shape in tile_shapes(count, pixels, self._depth * cpu.lanes * element_bytes(conv.dtype)):
            sizes = [size for size in pixel_blocks(pixels, shape.all_rows, in_bytes, cpu) if size >= shape.all_rows]
            fitting = [size for size in sizes if size * in_bytes <= cpu.l2_bytes // 2]
            for pixel_block in fitting or sizes[:1]:
                groups, tiles = -(-count // shape.out_blocks), -(-pixels // pixel_block)
                for channel_tasks, pixel_tasks in task_splits(groups, tiles, cpu, is_small(conv.flops)):
                    yield TilePointwiseKnobs(
                        shape.row_tiles,
                        shape.out_blocks,
                        shape.rows,
                        self._depth,
                        pixel_block,
                        channel_tasks,
                        pixel_tasks,
                    )._asdict()


def _extents(conv: Conv2d, knobs: TilePointwiseKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Return output blocks and pixels, each divided among tasks."""
    return (
        TiledExtent(blocks(conv.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(conv.height * conv.width, knobs.pixel_block, knobs.pixel_tasks),
    )
