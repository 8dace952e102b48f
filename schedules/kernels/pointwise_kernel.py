"""1x1 convolution, stride 1: a matrix product over the pixels of the image.

In vector registers (``Pointwise``); with an input that is prepared when read, by a squeeze-and-excite gate, or by batch
norm and activation before the convolution (``ProloguePointwise``); or in the tile registers of AMX
(``TilePointwise``), where rows of a tile are pixels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, ClassVar, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d, Operator, element_bytes
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template, TensorSpec, blocked_shape, blocks
from schedules.loops import emit
from schedules.loops.config_space import (
    PORTS,
    UNROLLS,
    RegisterTile,
    cheapest_first,
    dense_cycles,
    exposed_traffic,
    is_small,
    parallel_cycles,
    register_tiles,
    task_splits,
)
from schedules.loops.dot_products import dot_product
from schedules.loops.kernel_inputs import PreparedInput, preparing_operations
from schedules.loops.loop_nests import TiledExtent, pointwise_phase, store_finished, task_index
from schedules.loops.tile_products import (
    TileRows,
    TileShape,
    block_cycles,
    depths,
    has_tile_products,
    is_copied,
    laying_out_cycles,
    pixels_phase,
    tile_product,
    tile_shapes,
)
from schedules.loops.weight_packing import (
    channel_constants_shape,
    conv_weight_shape,
    pack_channel_constants,
    pack_conv,
    pack_prologue,
    pack_tiles,
    packed_dtype,
    prologue_shapes,
    tile_weight_shape,
)

# Cycles for restarting a prefetcher with every run of pixels of a channel block.
_STREAM_CYCLES = 40.0


def conv_signature(
    conv: Conv2d, lanes: int, weight_shape: tuple[int, ...], plain_input: bool = False, weight_dtype: str | None = None
) -> Signature:
    """Signature of a convolution: blocked in and out; packed weights, bias, constants of a prologue.

    The first layer reads plain NCHW. Per-channel constants are float32, all others have the dtype of ``conv``, weights
    optionally ``weight_dtype``.
    """
    output = TensorSpec(blocked_shape(conv.output_shape, lanes), "blocked", conv.dtype)
    data = (
        TensorSpec(conv.input_shape, "plain", conv.dtype)
        if plain_input
        else TensorSpec(blocked_shape(conv.input_shape, lanes), "blocked", conv.dtype)
    )
    weight = TensorSpec(weight_shape, dtype=weight_dtype or packed_dtype(conv))
    bias = TensorSpec(channel_constants_shape(conv, lanes))
    residual = output if conv.epilogue.residual else None
    gate = TensorSpec(blocked_shape(conv.gate_shape, lanes), "blocked", conv.dtype) if conv.gated else None
    before = (TensorSpec(shape) for shape in prologue_shapes(conv, lanes))
    return Signature(data, (weight, bias, *before), residual, output, gate)


class ConvBuffers(NamedTuple):
    """Buffers of a kernel with the arguments of :func:`conv_signature`; None for missing ones."""

    data: Any
    gate: Any | None
    weight: Any
    bias: Any
    prologue: Any | None
    residual: Any | None
    output: Any


def conv_buffers(conv: Conv2d, buffers: Sequence[Any]) -> ConvBuffers:
    """Assign ``buffers``, in the order of :func:`conv_signature`, to their names."""
    rest = list(buffers)
    data = rest.pop(0)
    gate = rest.pop(0) if conv.gated else None
    weight, bias = rest.pop(0), rest.pop(0)
    prologue = rest.pop(0) if conv.prologue is not None and conv.prologue.affine else None
    residual = rest.pop(0) if conv.epilogue.residual else None
    (output,) = rest
    return ConvBuffers(data, gate, weight, bias, prologue, residual, output)


def is_prepared(conv: Conv2d) -> bool:
    """True if the convolution has a gate or a prologue."""
    return conv.gated or conv.prologue is not None


class PointwiseKnobs(NamedTuple):
    """Knobs of a 1x1 convolution."""

    # Register tile: ``out_blocks`` x ``columns``.
    out_blocks: int
    columns: int
    # Of the reduction.
    unroll: int
    # Pixels per pass over the weights.
    pixel_block: int
    # Parallel tasks: ``channel_tasks`` x ``pixel_tasks``.
    channel_tasks: int
    pixel_tasks: int

    @property
    def tile(self) -> RegisterTile:
        return RegisterTile(self.out_blocks, self.columns, self.unroll)


class Pointwise(Template):
    """Tasks of output blocks x pixels; each passes over its weights once per block of pixels."""

    family = "pointwise"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        # Few input channels are read as plain NCHW, which only the k x k template supports.
        if not isinstance(operator, Conv2d) or is_prepared(operator) or not operator.is_pointwise:
            return False
        return operator.in_channels >= cpu.lanes // 2

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        return conv_signature(operator, cpu.lanes, conv_weight_shape(operator, cpu.lanes))

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(pointwise_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        conv, knobs = operator, PointwiseKnobs(**config)
        groups, tiles = pointwise_extents(conv, knobs, cpu)
        in_bytes = element_bytes(conv.dtype) * conv.in_channels
        one = dense_cycles(
            cpu,
            knobs.tile,
            knobs.pixel_block,
            conv.in_channels,
            data_bytes=knobs.pixel_block * in_bytes,
            weight_bytes=knobs.out_blocks * cpu.lanes * in_bytes,
            dtype=conv.dtype,
        )
        one += _STREAM_CYCLES * blocks(conv.in_channels, cpu.lanes)
        return parallel_cycles(cpu, conv.batch * groups.tasks * tiles.tasks, groups.per_task * tiles.per_task * one)

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,) = parameters
        weight = pack_conv(operator, layer.weight, cpu.lanes)
        return [weight, pack_channel_constants(operator, layer, cpu.lanes), *pack_prologue(operator, layer, cpu.lanes)]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, PointwiseKnobs(**config)
        groups, tiles = pointwise_extents(conv, knobs, cpu)
        operand = dot_product(conv.dtype).operand

        def body(*buffers: Any) -> None:
            data, _, weight, bias, _, residual, output = conv_buffers(conv, buffers)
            with emit.tasks(conv.batch * groups.tasks * tiles.tasks) as task:
                image, channel_task, pixel_task = task_index(task, conv.batch, groups.tasks, tiles.tasks)
                with emit.loop(tiles.per_task) as tile:
                    first = tiles.start(pixel_task, tile)
                    finished_pixels(
                        conv,
                        knobs,
                        lanes,
                        groups=groups,
                        task=channel_task,
                        image=image,
                        first=first,
                        source=lambda block, pixel, lane: operand(data, image, block, 0, first + pixel, lane),
                        weight=weight,
                        bias=bias,
                        residual=residual,
                        output=output,
                    )

        return emit.kernel("pointwise", self.signature(conv, cpu), body)


def finished_pixels(
    conv: Conv2d,
    knobs: PointwiseKnobs,
    lanes: int,
    *,
    groups: TiledExtent,
    task: Any,
    image: Any,
    first: Any,
    source: Callable[[Any, Any, Any], Any],
    weight: Any,
    bias: Any,
    residual: Any | None,
    output: Any,
) -> None:
    """Emit a block of pixels from ``first``, for the output blocks of ``task``, with the epilogue.

    ``source(block, pixel of the block, lane)``: see :func:`pointwise_phase`; ``residual`` and ``output`` are blocked.
    """

    def sink(block: Any, pixel: Any, sums: Any) -> None:
        at = (image, block, 0, first + pixel)
        store_finished(output, sums, at, conv, lanes, residual, channel=(bias, block))

    with emit.loop(groups.per_task) as group:
        pointwise_phase(
            conv,
            knobs.tile,
            lanes,
            pixels=knobs.pixel_block,
            first_block=groups.start(task, group),
            source=source,
            weight=weight,
            bias=bias,
            sink=sink,
        )


def pointwise_extents(conv: Conv2d, knobs: PointwiseKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Output blocks and pixels, each distributed over tasks."""
    return (
        TiledExtent(blocks(conv.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(conv.height * conv.width, knobs.pixel_block, knobs.pixel_tasks),
    )


def pointwise_candidates(conv: Conv2d, cpu: CpuTarget) -> Iterator[Config]:
    """Every legal configuration of a 1x1 convolution, unordered."""
    pixels, count = conv.height * conv.width, blocks(conv.out_channels, cpu.lanes)
    in_bytes = blocks(conv.in_channels, cpu.lanes) * cpu.lanes * element_bytes(conv.dtype)
    for (size, width), unroll in product(register_tiles(count, pixels, cpu), UNROLLS):
        for pixel_block in pixel_blocks(pixels, width, in_bytes, cpu):
            groups, tiles = -(-count // size), -(-pixels // pixel_block)
            for channel_tasks, pixel_tasks in task_splits(groups, tiles, cpu, is_small(conv.flops)):
                yield PointwiseKnobs(size, width, unroll, pixel_block, channel_tasks, pixel_tasks)._asdict()


def pixel_blocks(pixels: int, width: int, in_bytes: int, cpu: CpuTarget) -> list[int]:
    """Pixels per pass over the weights: all, one share per thread, and as many as fit into L1 and L2."""
    found = {pixels, -(-pixels // cpu.threads)}
    for capacity in (cpu.l1_bytes // 2, cpu.l2_bytes // 4):
        fitting = max(1, min(pixels, capacity // in_bytes) // width) * width
        # Equal blocks: the last one would overlap its neighbour otherwise.
        count = -(-pixels // min(fitting, pixels))
        share = -(-pixels // count)
        found.add(min(pixels, -(-share // width) * width))
    return sorted(found)


class ProloguePointwise(Pointwise):
    """As :class:`Pointwise`; a block of pixels is prepared in a task buffer before the pass over the weights.

    The prepared image is never written to memory: the buffer stays in L1 or L2, and is used by all groups of output
    blocks. It has the dtype of the image, so that narrow values are rounded again.
    """

    family = "prologue-pointwise"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return isinstance(operator, Conv2d) and operator.is_pointwise and is_prepared(operator)

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        pixel_bytes = element_bytes(operator.dtype) * blocks(operator.in_channels, cpu.lanes) * cpu.lanes
        candidates = list(pointwise_candidates(operator, cpu))
        fitting = [config for config in candidates if config["pixel_block"] * pixel_bytes <= cpu.l2_bytes // 2]
        return cheapest_first(fitting or candidates, partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        knobs = PointwiseKnobs(**config)
        groups, tiles = pointwise_extents(operator, knobs, cpu)
        vectors = knobs.pixel_block * blocks(operator.in_channels, cpu.lanes)
        # One store per vector, and a load in parallel with the arithmetic.
        preparing = vectors * (1 + max(1, preparing_operations(operator))) / PORTS
        preparing += exposed_traffic(
            cpu, element_bytes(operator.dtype) * cpu.lanes * vectors, operator.input_bytes / cpu.threads
        )
        repeated = parallel_cycles(cpu, operator.batch * groups.tasks * tiles.tasks, tiles.per_task * preparing)
        return super().cost(operator, config, cpu) + repeated

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, PointwiseKnobs(**config)
        groups, tiles = pointwise_extents(conv, knobs, cpu)
        in_blocks = blocks(conv.in_channels, lanes)
        operand = dot_product(conv.dtype).operand

        def body(*buffers: Any) -> None:
            data, gate, weight, bias, prologue, residual, output = conv_buffers(conv, buffers)
            source = PreparedInput(conv, data, gate, prologue, lanes)
            with emit.tasks(conv.batch * groups.tasks * tiles.tasks) as task:
                image, channel_task, pixel_task = task_index(task, conv.batch, groups.tasks, tiles.tasks)
                prepared = T.alloc_buffer((in_blocks, knobs.pixel_block, lanes), conv.dtype)
                with emit.loop(tiles.per_task) as tile:
                    first = tiles.start(pixel_task, tile)
                    with emit.loop(in_blocks) as block:
                        value = source.block(image, block)
                        with emit.loop(knobs.pixel_block) as pixel:
                            emit.store(prepared, value(0, first + pixel), block, pixel, lanes=lanes)
                    finished_pixels(
                        conv,
                        knobs,
                        lanes,
                        groups=groups,
                        task=channel_task,
                        image=image,
                        first=first,
                        source=lambda block, pixel, lane: operand(prepared, block, pixel, lane),
                        weight=weight,
                        bias=bias,
                        residual=residual,
                        output=output,
                    )

        return emit.kernel("prologue_pointwise", self.signature(conv, cpu), body)


class TilePointwiseKnobs(NamedTuple):
    """Knobs of the tile kernel."""

    # Tiles of sums: ``row_tiles`` x ``out_blocks``, of ``tile_rows`` pixels each.
    row_tiles: int
    out_blocks: int
    tile_rows: int
    # Blocks of input channels per step.
    depth_blocks: int
    # Pixels per pass over the weights.
    pixel_block: int
    # Parallel tasks: ``channel_tasks`` x ``pixel_tasks``.
    channel_tasks: int
    pixel_tasks: int


class TileConvolution(Template):
    """A convolution in tiles; the layout of its weights depends on ``depth``, the blocks of input channels per step."""

    kind: ClassVar[str]

    def __init__(self, depth: int) -> None:
        """``depth``: blocks of input channels per step."""
        self._depth = depth
        self.family = f"{self.kind}-{depth}"

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        return conv_signature(operator, cpu.lanes, tile_weight_shape(operator, cpu.lanes, self._depth))

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,) = parameters
        weight = pack_tiles(operator, layer.weight, cpu.lanes, self._depth)
        return [weight, pack_channel_constants(operator, layer, cpu.lanes), *pack_prologue(operator, layer, cpu.lanes)]


class TilePointwise(TileConvolution):
    """:class:`schedules.kernels.pointwise_kernel.Pointwise` in tiles, also with a gate or a prologue.

    With one block of input channels per step tiles are read directly from the image, although a row of them is then
    half full (a quarter for bytes). With more, or with a gate or prologue, a block of pixels is first copied into rows,
    in a task buffer that stays in the caches.
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
        groups, tiles = _tile_extents(conv, knobs, cpu)
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
        groups, pixels = _tile_extents(conv, knobs, cpu)
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


def _tile_extents(conv: Conv2d, knobs: TilePointwiseKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Output blocks and pixels, each distributed over tasks."""
    return (
        TiledExtent(blocks(conv.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(conv.height * conv.width, knobs.pixel_block, knobs.pixel_tasks),
    )
