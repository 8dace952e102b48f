"""k x k convolution, dense or grouped; the first layer of a network reads plain NCHW."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from costmodel.operators import Conv2d
from schedules import emit, space
from schedules.layout import blocks
from schedules.packing import group_window_blocks, pack_bias, pack_conv, pack_plain_input
from schedules.phases import Groups, conv_phase, task_index
from schedules.pointwise import conv_signature
from schedules.target import CpuTarget
from schedules.template import Config, Parameters, Signature


def reads_plain_input(conv: Conv2d, lanes: int) -> bool:
    """Few channels: blocking them would mostly move zeros."""
    return conv.groups == 1 and conv.in_channels < lanes // 2


class DirectConv2d:
    """Knobs: ``out_blocks`` x ``columns`` register tile, ``unroll`` over input channels, ``rows`` per pass over
    the weights, ``channel_tasks`` x ``row_tasks`` parallel tasks.
    """

    family = "conv2d"

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        conv, lanes = operator, cpu.lanes
        count = blocks(conv.out_channels, lanes)
        if reads_plain_input(conv, lanes):
            return conv_signature(conv, lanes, (count, conv.in_channels, *conv.kernel, lanes), plain_input=True)
        return conv_signature(conv, lanes, (count, group_window_blocks(conv, lanes), *conv.kernel, lanes, lanes))

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        return space.conv2d(operator, cpu)

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,) = parameters
        pack = pack_plain_input if reads_plain_input(operator, cpu.lanes) else None
        weight = pack(layer.weight, cpu.lanes) if pack is not None else pack_conv(operator, layer.weight, cpu.lanes)
        return [weight, pack_bias(layer.bias, operator.out_channels, cpu.lanes)]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes = operator, cpu.lanes
        plain = reads_plain_input(conv, lanes)
        groups = Groups(blocks(conv.out_channels, lanes), config["out_blocks"], config["channel_tasks"])
        bands = Groups(conv.out_height, config["rows"], config["row_tasks"])
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
                            read = None if residual is None else lambda: emit.load(residual, *at, lanes=lanes)
                            emit.store(output, emit.finish(sums, conv.epilogue, read, lanes), *at, lanes=lanes)

                        conv_phase(
                            conv,
                            config,
                            lanes,
                            rows=config["rows"],
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


def _window(conv: Conv2d, out_block: Any, lanes: int) -> Any:
    """First input block that ``out_block`` reads: ``packing.group_window`` as an expression."""
    if conv.groups == 1:
        return 0
    group = emit.quotient(out_block * lanes, conv.out_channels // conv.groups)
    first = emit.quotient(group * (conv.in_channels // conv.groups), lanes)
    return emit.smaller(first, blocks(conv.in_channels, lanes) - group_window_blocks(conv, lanes))
