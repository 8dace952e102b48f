"""k x k convolution, dense or grouped; the first layer of a network reads plain NCHW."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d, Operator, element_bytes
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template
from schedules.kernels.pointwise_kernel import conv_buffers, conv_signature
from schedules.loops import emit
from schedules.loops.dot_products import dot_product
from schedules.loops.issue_slots import PORTS, TapRow, dense_cycles, exposed_traffic, parallel_cycles
from schedules.loops.loop_nests import TiledExtent, conv_phase, store_finished, task_index
from schedules.loops.plain_operands import PlainOperands
from schedules.loops.prepared_input import PreparedInput, preparing_operations
from schedules.loops.register_tiling import RegisterTile, register_tiles, row_blocks, window_unrolls
from schedules.loops.row_window import source_rows
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits
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
    """True if the input has few channels: blocking them would mostly move zeros. A prologue needs a blocked input."""
    return conv.groups == 1 and conv.in_channels < lanes // 2 and conv.prologue is None


class DirectConv2dKnobs(NamedTuple):
    """Knobs: ``out_blocks`` x ``columns`` register tile, ``unroll`` over input channels, ``rows`` per pass over the
    weights, ``channel_tasks`` x ``row_tasks`` parallel tasks.
    """

    out_blocks: int
    columns: int
    unroll: int
    rows: int
    channel_tasks: int
    row_tasks: int

    @property
    def tile(self) -> RegisterTile:
        return RegisterTile(self.out_blocks, self.columns, self.unroll)


class DirectConv2d(Template):
    """Direct convolution with tasks of output blocks x rows; each passes over its weights once per block of rows.

    With a prologue, the input rows of a block are prepared in a buffer of the task first.
    """

    family = "conv2d"

    def __init__(self, inside_chain: bool = False) -> None:
        """Create the template; ``inside_chain``: its input is blocked even if it has few channels."""
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
    """Buffer of a task: the input of ``rows`` output rows with the prologue applied, without the padding."""

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
        """Return the operand of the input channels from ``lane`` on; ``row`` of the image."""
        return dot_product(self._conv.dtype).operand(self._buffer, block, row - self._begin, column, lane)


def _prepared_bytes(conv: Conv2d, rows: int, cpu: CpuTarget) -> int:
    """Return the bytes of the prepared input of ``rows`` output rows."""
    pixels = source_rows(conv, rows) * conv.width
    return element_bytes(conv.dtype) * cpu.lanes * blocks(conv.in_channels, cpu.lanes) * pixels


def _window(conv: Conv2d, out_block: Any, lanes: int) -> Any:
    """Return the first input block that ``out_block`` reads: ``packing.group_window`` as an expression."""
    if conv.groups == 1:
        return 0
    group = emit.quotient(out_block * lanes, conv.out_channels // conv.groups)
    first = emit.quotient(group * (conv.in_channels // conv.groups), lanes)
    return emit.smaller(first, blocks(conv.in_channels, lanes) - group_window_blocks(conv, lanes))


def _extents(conv: Conv2d, knobs: DirectConv2dKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Return output blocks and rows, each divided among tasks."""
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
