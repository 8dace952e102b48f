"""Depthwise convolution, any window, stride and dilation, on blocked tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from costmodel.operators import Conv2d
from schedules import emit, space
from schedules.layout import blocks
from schedules.packing import pack_bias, pack_depthwise
from schedules.phases import Groups, depthwise_phase, task_index
from schedules.pointwise import conv_signature
from schedules.target import CpuTarget
from schedules.template import Config, Parameters, Signature


class DepthwiseConv2d:
    """Knobs: ``columns`` of the register tile, ``channel_tasks`` x ``row_tasks`` parallel tasks."""

    family = "depthwise"

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        shape = (blocks(operator.in_channels, cpu.lanes), *operator.kernel, cpu.lanes)
        return conv_signature(operator, cpu.lanes, shape)

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        return space.depthwise(operator, cpu)

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,) = parameters
        return [pack_depthwise(layer.weight, cpu.lanes), pack_bias(layer.bias, operator.out_channels, cpu.lanes)]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes = operator, cpu.lanes
        channels = Groups(blocks(conv.in_channels, lanes), 1, config["channel_tasks"])
        rows = -(-conv.out_height // config["row_tasks"])
        bands = Groups(conv.out_height, rows, config["row_tasks"])

        def body(data: Any, weight: Any, bias: Any, *rest: Any) -> None:
            residual, output = (rest[0], rest[1]) if conv.epilogue.residual else (None, rest[0])
            with emit.tasks(conv.batch * channels.tasks * bands.tasks) as task:
                image, channel_task, band = task_index(task, conv.batch, channels.tasks, bands.tasks)
                first = bands.start(band, 0)
                with emit.loop(channels.per_task) as index:
                    block = channels.start(channel_task, index)

                    def sink(row: Any, column: Any, sums: Any) -> None:
                        at = (image, block, first + row, column)
                        read = None if residual is None else lambda: emit.load(residual, *at, lanes=lanes)
                        emit.store(output, emit.finish(sums, conv.epilogue, read, lanes), *at, lanes=lanes)

                    depthwise_phase(
                        conv,
                        config["columns"],
                        lanes,
                        rows=rows,
                        first_row=first,
                        block=block,
                        source=lambda row, column: emit.load(data, image, block, row, column, lanes=lanes),
                        weight=weight,
                        bias=bias,
                        sink=sink,
                    )

        return emit.kernel("depthwise", self.signature(conv, cpu), body)
