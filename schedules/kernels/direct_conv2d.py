"""k x k convolution, dense or grouped; the first layer of a network reads plain NCHW."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any, NamedTuple

from tvm import tirx

from costmodel.operators.layers import Conv2d, Operator
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Parameters, Signature, Template
from schedules.kernels.pointwise_kernel import conv_signature
from schedules.loops import emit
from schedules.loops.issue_slots import dense_cycles, exposed_traffic, parallel_cycles
from schedules.loops.loop_nests import TiledExtent, conv_phase, store_finished, task_index
from schedules.loops.register_tiling import UNROLLS, RegisterTile, register_tiles, row_blocks
from schedules.loops.space_pruning import cheapest_first
from schedules.loops.task_splits import is_small, task_splits
from schedules.loops.weight_packing import group_window_blocks, pack_channel_constants, pack_conv, pack_plain_input


def reads_plain_input(conv: Conv2d, lanes: int) -> bool:
    """Few channels: blocking them would mostly move zeros."""
    return conv.groups == 1 and conv.in_channels < lanes // 2


class DirectConv2dKnobs(NamedTuple):
    """``out_blocks`` x ``columns`` register tile, ``unroll`` over input channels, ``rows`` per pass over the weights,
    ``channel_tasks`` x ``row_tasks`` parallel tasks.
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
    """Tasks of output blocks x rows; each passes over its weights once for every block of rows."""

    family = "conv2d"

    def __init__(self, inside_chain: bool = False) -> None:
        """``inside_chain``: its input is blocked, however few channels it has."""
        self._inside_chain = inside_chain

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return isinstance(operator, Conv2d) and not operator.gated

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        conv, lanes = operator, cpu.lanes
        count = blocks(conv.out_channels, lanes)
        if self._reads_plain_input(conv, lanes):
            return conv_signature(conv, lanes, (count, conv.in_channels, *conv.kernel, lanes), plain_input=True)
        return conv_signature(conv, lanes, (count, group_window_blocks(conv, lanes), *conv.kernel, lanes, lanes))

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        return cheapest_first(_candidates(operator, cpu), partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        conv, knobs = operator, DirectConv2dKnobs(**config)
        groups, bands = _extents(conv, knobs, cpu)
        steps = conv.in_channels // conv.groups * conv.kernel[0] * conv.kernel[1]
        if conv.groups > 1:
            steps = max(steps, cpu.lanes * conv.kernel[0] * conv.kernel[1])
        row_bytes = 4 * conv.in_channels // conv.groups * conv.width * conv.stride[0]
        weight_bytes = 4 * knobs.out_blocks * cpu.lanes * steps
        row = dense_cycles(cpu, knobs.tile, conv.out_width, steps, data_bytes=row_bytes, weight_bytes=weight_bytes)
        one = knobs.rows * row + exposed_traffic(cpu, knobs.rows * row_bytes, knobs.rows * row_bytes)
        return parallel_cycles(cpu, conv.batch * groups.tasks * bands.tasks, groups.per_task * bands.per_task * one)

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,) = parameters
        pack = pack_plain_input if self._reads_plain_input(operator, cpu.lanes) else None
        weight = pack(layer.weight, cpu.lanes) if pack is not None else pack_conv(operator, layer.weight, cpu.lanes)
        return [weight, pack_channel_constants(operator, layer, cpu.lanes)]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, DirectConv2dKnobs(**config)
        plain = self._reads_plain_input(conv, lanes)
        groups, bands = _extents(conv, knobs, cpu)
        channels = conv.in_channels if conv.groups == 1 else group_window_blocks(conv, lanes) * lanes

        def body(data: Any, weight: Any, bias: Any, *rest: Any) -> None:
            residual, output = (rest[0], rest[1]) if conv.epilogue.residual else (None, rest[0])
            with emit.tasks(conv.batch * groups.tasks * bands.tasks) as task:
                image, channel_task, row_task = task_index(task, conv.batch, groups.tasks, bands.tasks)
                with emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)
                    with emit.loop(groups.per_task) as group:
                        first_block = groups.start(channel_task, group)
                        window = emit.bind(_window(conv, first_block, lanes))

                        def source(block: Any, lane: Any, row: Any, column: Any) -> Any:
                            if plain:
                                return data[image, block, row, column]
                            return data[image, window + block, row, column, lane]

                        def weights(out_block: Any, block: Any, lane: Any, ky: Any, kx: int) -> Any:
                            lane_index = () if plain else (lane,)
                            return emit.load(weight, out_block, block, ky, kx, *lane_index, lanes=lanes)

                        def sink(block: Any, row: Any, column: Any, sums: Any) -> None:
                            at = (image, block, first_row + row, column)
                            store_finished(output, sums, at, conv.epilogue, lanes, residual, channel=(bias, block))

                        conv_phase(
                            conv,
                            knobs.tile,
                            lanes,
                            rows=knobs.rows,
                            first_row=first_row,
                            first_block=first_block,
                            channels=channels,
                            block_lanes=1 if plain else lanes,
                            source=source,
                            weight=weights,
                            bias=bias,
                            sink=sink,
                        )

        return emit.kernel("conv2d", self.signature(conv, cpu), body)

    def _reads_plain_input(self, conv: Conv2d, lanes: int) -> bool:
        return not self._inside_chain and reads_plain_input(conv, lanes)


def _window(conv: Conv2d, out_block: Any, lanes: int) -> Any:
    """First input block that ``out_block`` reads: ``packing.group_window`` as an expression."""
    if conv.groups == 1:
        return 0
    group = emit.quotient(out_block * lanes, conv.out_channels // conv.groups)
    first = emit.quotient(group * (conv.in_channels // conv.groups), lanes)
    return emit.smaller(first, blocks(conv.in_channels, lanes) - group_window_blocks(conv, lanes))


def _extents(conv: Conv2d, knobs: DirectConv2dKnobs, cpu: CpuTarget) -> tuple[TiledExtent, TiledExtent]:
    """Output blocks and rows, each dealt out to tasks."""
    return (
        TiledExtent(blocks(conv.out_channels, cpu.lanes), knobs.out_blocks, knobs.channel_tasks),
        TiledExtent(conv.out_height, knobs.rows, knobs.row_tasks),
    )


def _candidates(conv: Conv2d, cpu: CpuTarget) -> Iterator[Config]:
    count = blocks(conv.out_channels, cpu.lanes)
    sizes = [size for size in range(1, 9) if _shares_window(conv, size, cpu.lanes)]
    for (size, width), unroll in product(register_tiles(count, conv.out_width, cpu, sizes=sizes), UNROLLS):
        for rows in row_blocks(conv.out_height):
            groups, bands = -(-count // size), -(-conv.out_height // rows)
            for channel_tasks, row_tasks in task_splits(groups, bands, cpu, is_small(conv.flops)):
                yield DirectConv2dKnobs(size, width, unroll, rows, channel_tasks, row_tasks)._asdict()


def _shares_window(conv: Conv2d, size: int, lanes: int) -> bool:
    """Whether ``size`` output blocks of a grouped convolution read the same input blocks."""
    per_group = conv.out_channels // conv.groups
    return conv.groups == 1 or size == 1 or per_group % (lanes * size) == 0
