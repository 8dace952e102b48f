"""k x k convolution by direct sums.

In vector registers (``DirectConv2d``), dense or grouped; the first layer of a network reads plain NCHW. In the tile
registers of AMX (``TileConv2d``) rows of a tile are neighbouring columns of an output row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d, Operator, element_bytes
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template, blocks
from schedules.kernels.pointwise_kernel import TileConvolution, conv_buffers, conv_signature
from schedules.loops import emit
from schedules.loops.config_space import (
    PORTS,
    RegisterTile,
    TapRow,
    cheapest_first,
    dense_cycles,
    exposed_traffic,
    is_small,
    parallel_cycles,
    register_tiles,
    row_blocks,
    task_splits,
    window_unrolls,
)
from schedules.loops.dot_products import dot_product
from schedules.loops.kernel_inputs import PlainOperands, PreparedInput, preparing_operations, source_rows
from schedules.loops.loop_nests import TiledExtent, conv_phase, store_finished, task_index
from schedules.loops.requantised_sums import initial_sums
from schedules.loops.tile_products import (
    TileRows,
    TileShape,
    block_cycles,
    depths,
    has_tile_products,
    is_copied,
    laying_out_cycles,
    tile_product,
    tile_shapes,
)
from schedules.loops.weight_packing import (
    conv_weight_shape,
    group_window_blocks,
    pack_channel_constants,
    pack_conv,
    pack_plain_input,
    pack_prologue,
    plain_weight_shape,
)


def reads_plain_input(conv: Conv2d, lanes: int) -> bool:
    """True if the input is plain: few channels, where blocking would mostly move zeros, and no prologue."""
    return conv.groups == 1 and conv.in_channels < lanes // 2 and conv.prologue is None


class DirectConv2dKnobs(NamedTuple):
    """Knobs of the direct convolution."""

    # Register tile: ``out_blocks`` x ``columns``.
    out_blocks: int
    columns: int
    # Over input channels.
    unroll: int
    # Rows per pass over the weights.
    rows: int
    # Parallel tasks: ``channel_tasks`` x ``row_tasks``.
    channel_tasks: int
    row_tasks: int

    @property
    def tile(self) -> RegisterTile:
        return RegisterTile(self.out_blocks, self.columns, self.unroll)


class DirectConv2d(Template):
    """Tasks of output blocks x rows; each passes over its weights once per block of rows.

    With a prologue, the input rows of a block are first prepared in a buffer of the task.
    """

    family = "conv2d"

    def __init__(self, inside_chain: bool = False) -> None:
        """``inside_chain``: its input is blocked even with few channels."""
        self._inside_chain = inside_chain

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        if not isinstance(operator, Conv2d) or operator.gated:
            return False
        return operator.prologue is None or operator.groups == 1

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        conv, lanes = operator, cpu.lanes
        if self._reads_plain_input(conv, lanes):
            return conv_signature(conv, lanes, plain_weight_shape(conv, lanes), plain_input=True)
        return conv_signature(conv, lanes, conv_weight_shape(conv, lanes))

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        candidates = list(_candidates(operator, cpu))
        if operator.prologue is not None:
            half = cpu.l2_bytes // 2
            fitting = [each for each in candidates if _prepared_bytes(operator, each["rows"], cpu) <= half]
            candidates = fitting or candidates
        return cheapest_first(candidates, partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        conv, knobs = operator, DirectConv2dKnobs(**config)
        groups, bands = _extents(conv, knobs, cpu)
        steps = conv.in_channels // conv.groups * conv.kernel[0] * conv.kernel[1]
        if conv.groups > 1:
            steps = max(steps, cpu.lanes * conv.kernel[0] * conv.kernel[1])
        size = element_bytes(conv.dtype)
        row_bytes = size * conv.in_channels // conv.groups * conv.width * conv.stride[0]
        weight_bytes = size * knobs.out_blocks * cpu.lanes * steps
        row = dense_cycles(
            cpu, knobs.tile, conv.out_width, steps, data_bytes=row_bytes, weight_bytes=weight_bytes, dtype=conv.dtype,
            taps=TapRow.of(conv),
        )  # fmt: skip
        one = knobs.rows * row + exposed_traffic(cpu, knobs.rows * row_bytes, knobs.rows * row_bytes)
        band = groups.per_task * one
        if conv.prologue is not None:
            prepared_bytes = _prepared_bytes(conv, knobs.rows, cpu)
            vectors = prepared_bytes / (size * cpu.lanes)
            band += vectors * (1 + max(1, preparing_operations(conv))) / PORTS
            band += exposed_traffic(cpu, prepared_bytes, conv.input_bytes / cpu.threads)
        return parallel_cycles(cpu, conv.batch * groups.tasks * bands.tasks, bands.per_task * band)

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,) = parameters
        pack = pack_plain_input if self._reads_plain_input(operator, cpu.lanes) else pack_conv
        weight = pack(operator, layer.weight, cpu.lanes)
        return [weight, pack_channel_constants(operator, layer, cpu.lanes), *pack_prologue(operator, layer, cpu.lanes)]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, DirectConv2dKnobs(**config)
        groups, bands = _extents(conv, knobs, cpu)
        dot = dot_product(conv.dtype)
        channels = conv.in_channels if conv.groups == 1 else group_window_blocks(conv, lanes) * lanes

        def body(*buffers: Any) -> None:
            data, _, weight, bias, prologue, residual, output = conv_buffers(conv, buffers)
            with emit.tasks(conv.batch * groups.tasks * bands.tasks) as task:
                image, channel_task, row_task = task_index(task, conv.batch, groups.tasks, bands.tasks)
                rows = _PreparedRows(conv, knobs.rows, lanes) if conv.prologue is not None else None
                reads_plain = self._reads_plain_input(conv, lanes)
                plain = PlainOperands(conv, data, knobs.rows, lanes) if reads_plain else None
                with emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)
                    if rows is not None:
                        rows.fill(PreparedInput(conv, data, None, prologue, lanes), image, first_row)
                    if plain is not None:
                        plain.fill(image, first_row)
                    with emit.loop(groups.per_task) as group:
                        first_block = groups.start(channel_task, group)
                        window = emit.bind(_window(conv, first_block, lanes))

                        def source(block: Any, lane: Any, row: Any, column: Any) -> Any:
                            if rows is not None:
                                return rows.value(block, row, column, lane)
                            if plain is not None:
                                return plain.value(image, block, row, column)
                            return dot.operand(data, image, window + block, row, column, lane)

                        def weights(out_block: Any, block: Any, step: Any, ky: Any, kx: int) -> Any:
                            step_index = (step,) if plain is None else ()
                            return dot.weights(weight, out_block, block, ky, kx, *step_index, lanes=lanes)

                        def sink(block: Any, row: Any, column: Any, sums: Any) -> None:
                            at = (image, block, first_row + row, column)
                            store_finished(output, sums, at, conv, lanes, residual, channel=(bias, block))

                        conv_phase(
                            conv,
                            knobs.tile,
                            lanes,
                            rows=knobs.rows,
                            first_row=first_row,
                            first_block=first_block,
                            channels=channels if plain is None else plain.channels,
                            block_lanes=lanes if plain is None else 1,
                            source=source,
                            weight=weights,
                            bias=bias,
                            sink=sink,
                        )

        return emit.kernel("conv2d", self.signature(conv, cpu), body)

    def _reads_plain_input(self, conv: Conv2d, lanes: int) -> bool:
        return not self._inside_chain and reads_plain_input(conv, lanes)


class _PreparedRows:
    """Task buffer with the prepared input (after the prologue) of ``rows`` output rows, without padding."""

    def __init__(self, conv: Conv2d, rows: int, lanes: int) -> None:
        self._conv, self._count, self._lanes = conv, source_rows(conv, rows), lanes
        shape = (blocks(conv.in_channels, lanes), self._count, conv.width, lanes)
        self._buffer = T.alloc_buffer(shape, conv.dtype)
        self._begin: Any = 0

    def fill(self, source: PreparedInput, image: Any, first_row: Any) -> None:
        """Fill the buffer with the input of the output rows from ``first_row`` on."""
        conv, lanes = self._conv, self._lanes
        top = first_row * conv.stride[0] - conv.padding[0]
        self._begin = emit.bind(emit.clamp_rows(top, self._count, conv.height))
        with emit.loop(blocks(conv.in_channels, lanes)) as block:
            pixel = source.block(image, block)
            with emit.loop(self._count) as row, emit.loop(conv.width) as column:
                emit.store(self._buffer, pixel(self._begin + row, column), block, row, column, lanes=lanes)

    def value(self, block: Any, row: Any, column: Any, lane: Any) -> Any:
        """Operand of the input channels from ``lane`` on; ``row`` is relative to the image."""
        return dot_product(self._conv.dtype).operand(self._buffer, block, row - self._begin, column, lane)


def _prepared_bytes(conv: Conv2d, rows: int, cpu: CpuTarget) -> int:
    """Bytes of the prepared input of ``rows`` output rows."""
    pixels = source_rows(conv, rows) * conv.width
    return element_bytes(conv.dtype) * cpu.lanes * blocks(conv.in_channels, cpu.lanes) * pixels


def _window(conv: Conv2d, out_block: Any, lanes: int) -> Any:
    """First input block read by ``out_block``: ``packing.group_window`` as an expression."""
    if conv.groups == 1:
        return 0
    group = emit.quotient(out_block * lanes, conv.out_channels // conv.groups)
    first = emit.quotient(group * (conv.in_channels // conv.groups), lanes)
    return emit.smaller(first, blocks(conv.in_channels, lanes) - group_window_blocks(conv, lanes))


def _extents(conv: Conv2d, knobs: DirectConv2dKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Output blocks and rows, each distributed over tasks."""
    return (
        TiledExtent(blocks(conv.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(conv.out_height, knobs.rows, knobs.row_tasks),
    )


def _candidates(conv: Conv2d, cpu: CpuTarget) -> Iterator[Config]:
    count = blocks(conv.out_channels, cpu.lanes)
    sizes = [size for size in range(1, 9) if _shares_window(conv, size, cpu.lanes)]
    tiles = register_tiles(count, conv.out_width, cpu, sizes=sizes)
    for (size, width), unroll in product(tiles, window_unrolls(conv.kernel[1])):
        for rows in row_blocks(conv.out_height):
            groups, bands = -(-count // size), -(-conv.out_height // rows)
            for channel_tasks, row_tasks in task_splits(groups, bands, cpu, is_small(conv.flops)):
                yield DirectConv2dKnobs(size, width, unroll, rows, channel_tasks, row_tasks)._asdict()


def _shares_window(conv: Conv2d, size: int, lanes: int) -> bool:
    """True if ``size`` output blocks of a grouped convolution read the same input blocks."""
    per_group = conv.out_channels // conv.groups
    return conv.groups == 1 or size == 1 or per_group % (lanes * size) == 0


class TileConv2dKnobs(NamedTuple):
    """Knobs of the tile convolution."""

    # Tiles of sums: ``row_tiles`` x ``out_blocks``, of ``tile_rows`` columns each, side by side or, if an output row is
    # shorter, in consecutive rows.
    row_tiles: int
    out_blocks: int
    tile_rows: int
    # Blocks of input channels per step.
    depth_blocks: int
    # Rows per pass over the weights.
    rows: int
    # Parallel tasks: ``channel_tasks`` x ``row_tasks``.
    channel_tasks: int
    row_tasks: int


class TileConv2d(TileConvolution):
    """:class:`schedules.kernels.direct_conv2d.DirectConv2d` in tiles, on blocked data without groups.

    The input rows of a block of output rows are first copied with padding into a task buffer. Without padding and with
    one block of input channels per step, tiles are read directly from the image.
    """

    kind = "tile-conv2d"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        if not isinstance(operator, Conv2d) or not has_tile_products(operator.dtype, cpu):
            return False
        if operator.groups > 1 or operator.gated or reads_plain_input(operator, cpu.lanes):
            return False
        if operator.dtype == "int8" and operator.prologue is not None:
            return False
        return self._depth in depths(blocks(operator.in_channels, cpu.lanes), operator.dtype, cpu.lanes)

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        candidates = list(self._candidates(operator, cpu))
        half = cpu.l2_bytes // 2
        fitting = [each for each in candidates if self._buffer_bytes(operator, each["rows"], cpu) <= half]
        return cheapest_first(fitting or candidates, partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        conv, knobs = operator, TileConv2dKnobs(**config)
        groups, bands = _tile_extents(conv, knobs, cpu)
        shape = self._shape(conv, knobs, cpu)
        steps = -(-blocks(conv.in_channels, cpu.lanes) // self._depth) * conv.kernel[0] * conv.kernel[1]
        weight_bytes = knobs.out_blocks * cpu.lanes * steps * shape.depth_bytes
        blocks_of_sums = _parts(conv, knobs).count
        one = blocks_of_sums * block_cycles(shape, steps)
        one += blocks_of_sums * exposed_traffic(cpu, weight_bytes, weight_bytes + shape.all_rows * shape.depth_bytes)
        data_bytes = self._buffer_bytes(conv, knobs.rows, cpu)
        one += exposed_traffic(cpu, data_bytes, data_bytes + weight_bytes)
        band = groups.per_task * one
        if self._laid_out(conv):
            height, width = _padded_window(conv, knobs.rows)
            band += laying_out_cycles(conv, cpu, height * width, conv.input_bytes / cpu.threads)
        return parallel_cycles(cpu, conv.batch * groups.tasks * bands.tasks, bands.per_task * band)

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, TileConv2dKnobs(**config)
        groups, bands = _tile_extents(conv, knobs, cpu)
        shape, parts = self._shape(conv, knobs, cpu), _parts(conv, knobs)
        (stride_y, stride_x), (dilation_y, dilation_x) = conv.stride, conv.dilation

        def body(*buffers: Any) -> None:
            data, _, weight, bias, prologue, residual, output = conv_buffers(conv, buffers)
            with emit.tasks(conv.batch * groups.tasks * bands.tasks) as task:
                image, channel_task, row_task = task_index(task, conv.batch, groups.tasks, bands.tasks)
                laid_out = (
                    TileRows(conv, lanes, self._depth, *_padded_window(conv, knobs.rows))
                    if self._laid_out(conv)
                    else None
                )
                with tile_product(shape, conv.dtype) as product, emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)
                    top = emit.bind(first_row * stride_y - conv.padding[0])
                    if laid_out is not None:
                        source_image = PreparedInput(conv, data, None, prologue, lanes)
                        laid_out.fill(source_image, image, top, -conv.padding[1], conv.width)

                    def source(run: Any, row: Any, column: Any) -> Any:
                        if laid_out is not None:
                            return laid_out.first(run, row, column)
                        return data[image, run, top + row, column, 0]

                    with (
                        emit.loop(groups.per_task) as group,
                        emit.loop(parts.rows.per_task) as down,
                        emit.loop(parts.columns.per_task) as right,
                    ):
                        block = groups.start(channel_task, group)
                        row, column = parts.rows.start(0, down), parts.columns.start(0, right)
                        product.zero()
                        with (
                            emit.loop(int(weight.shape[1])) as run,
                            emit.loop(conv.kernel[0]) as ky,
                            emit.loop(conv.kernel[1]) as kx,
                        ):

                            def window(tile: int) -> Any:
                                below, beside = parts.place(tile)
                                at_row = (row + below) * stride_y + ky * dilation_y
                                return source(run, at_row, (column + beside) * stride_x + kx * dilation_x)

                            product.add(
                                window, lambda out: weight[block + out, run, ky, kx, 0, 0], stride_x * shape.depth_bytes
                            )

                        def sink(tile: int, index: Any, out: int, sums: Any) -> None:
                            below, beside = parts.place(tile)
                            at_row, at_column = emit.bind(first_row + row + below), emit.bind(column + beside + index)
                            total = sums + initial_sums(conv, bias, block + out, lanes, (at_row, at_column))
                            at, channel = (image, block + out, at_row, at_column), (bias, block + out)
                            store_finished(output, [total], at, conv, lanes, residual, channel=channel)

                        product.finish(sink)

        return emit.kernel("tile_conv2d", self.signature(conv, cpu), body, tiles=True)

    def _laid_out(self, conv: Conv2d) -> bool:
        return self._depth > 1 or not is_copied(conv) or any(conv.padding)

    def _shape(self, conv: Conv2d, knobs: TileConv2dKnobs, cpu: CpuTarget) -> TileShape:
        depth_bytes = self._depth * cpu.lanes * element_bytes(conv.dtype)
        return TileShape(knobs.row_tiles, knobs.out_blocks, knobs.tile_rows, depth_bytes)

    def _buffer_bytes(self, conv: Conv2d, rows: int, cpu: CpuTarget) -> int:
        """Bytes of the input of ``rows`` output rows, in a buffer or in the image."""
        height, width = _padded_window(conv, rows)
        runs = -(-blocks(conv.in_channels, cpu.lanes) // self._depth)
        return runs * self._depth * cpu.lanes * element_bytes(conv.dtype) * height * width

    def _candidates(self, conv: Conv2d, cpu: CpuTarget) -> Iterator[Config]:
        count, depth_bytes = blocks(conv.out_channels, cpu.lanes), self._depth * cpu.lanes * element_bytes(conv.dtype)
        for rows in row_blocks(conv.out_height):
            bands = -(-conv.out_height // rows)
            for shape in tile_shapes(count, conv.out_width, depth_bytes, rows):
                groups = -(-count // shape.out_blocks)
                for channel_tasks, row_tasks in task_splits(groups, bands, cpu, is_small(conv.flops)):
                    yield TileConv2dKnobs(
                        shape.row_tiles, shape.out_blocks, shape.rows, self._depth, rows, channel_tasks, row_tasks
                    )._asdict()


@dataclass(frozen=True)
class _Parts:
    """Division of a band of output rows into blocks of sums.

    Steps have one row with tiles side by side, or if a row is too short, as many rows as they have tiles.
    """

    rows: TiledExtent
    columns: TiledExtent
    beside: bool
    tile_rows: int

    @property
    def count(self) -> int:
        """Blocks of sums for each group of output blocks."""
        return self.rows.per_task * self.columns.per_task

    def place(self, tile: int) -> tuple[int, int]:
        """Row and column of a tile relative to the first one."""
        return (0, tile * self.tile_rows) if self.beside else (tile, 0)


def _parts(conv: Conv2d, knobs: TileConv2dKnobs) -> _Parts:
    beside = knobs.row_tiles * knobs.tile_rows <= conv.out_width
    down, right = (1, knobs.row_tiles) if beside else (knobs.row_tiles, 1)
    columns = TiledExtent(conv.out_width, right * knobs.tile_rows, 1)
    return _Parts(TiledExtent(knobs.rows, down, 1), columns, beside, knobs.tile_rows)


def _padded_window(conv: Conv2d, rows: int) -> tuple[int, int]:
    """Rows and columns of the padded input read by ``rows`` output rows."""
    counts = (rows, conv.out_width)
    height, width = (
        (count - 1) * stride + (kernel - 1) * dilation + 1
        for count, stride, kernel, dilation in zip(counts, conv.stride, conv.kernel, conv.dilation, strict=True)
    )
    return height, width


def _tile_extents(conv: Conv2d, knobs: TileConv2dKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Output blocks and rows, each distributed over tasks."""
    return (
        TiledExtent(blocks(conv.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(conv.out_height, knobs.rows, knobs.row_tasks),
    )
