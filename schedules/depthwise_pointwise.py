"""Fused depthwise -> 1x1: a tile of rows of all channels stays in the caches of one core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators import FusedConvs
from schedules import emit, space
from schedules.layout import blocked_shape, blocks
from schedules.packing import pack_bias, pack_conv, pack_depthwise
from schedules.phases import Groups, depthwise_phase, pointwise_phase, task_index
from schedules.target import CpuTarget
from schedules.template import Config, Parameters, Signature, TensorSpec


class DepthwisePointwise:
    """Knobs: register tile of the 1x1 (``out_blocks`` x ``columns``, ``unroll``), ``rows`` per tile,
    ``depthwise_columns``, ``channel_tasks`` (each computes the depthwise part again) x ``row_tasks``.
    """

    family = "depthwise-pointwise"

    def signature(self, operator: FusedConvs, cpu: CpuTarget) -> Signature:
        first, second = operator.convs
        lanes = cpu.lanes
        mid, out = blocks(first.out_channels, lanes), blocks(second.out_channels, lanes)
        output = TensorSpec(blocked_shape(second.output_shape, lanes), "blocked")
        return Signature(
            data=TensorSpec(blocked_shape(first.input_shape, lanes), "blocked"),
            constants=(
                TensorSpec((mid, *first.kernel, lanes)),
                TensorSpec((mid, lanes)),
                TensorSpec((out, mid, 1, 1, lanes, lanes)),
                TensorSpec((out, lanes)),
            ),
            residual=output if second.epilogue.residual else None,
            output=output,
        )

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        return space.depthwise_pointwise(operator, cpu)

    def pack(self, operator: FusedConvs, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (first, second), lanes = operator.convs, cpu.lanes
        depthwise, pointwise = parameters
        return [
            pack_depthwise(depthwise.weight, lanes),
            pack_bias(depthwise.bias, first.out_channels, lanes),
            pack_conv(second, pointwise.weight, lanes),
            pack_bias(pointwise.bias, second.out_channels, lanes),
        ]

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        (first, second), lanes = operator.convs, cpu.lanes
        mid_blocks = blocks(first.out_channels, lanes)
        rows, width = config["rows"], second.width
        groups = Groups(blocks(second.out_channels, lanes), config["out_blocks"], config["channel_tasks"])
        bands = Groups(second.height, rows, config["row_tasks"])

        def body(data: Any, weight_1: Any, bias_1: Any, weight_2: Any, bias_2: Any, *rest: Any) -> None:
            residual, output = (rest[0], rest[1]) if second.epilogue.residual else (None, rest[0])
            with emit.tasks(first.batch * groups.tasks * bands.tasks) as task:
                image, channel_task, row_task = task_index(task, first.batch, groups.tasks, bands.tasks)
                tile = T.alloc_buffer((mid_blocks, rows * width, lanes), "float32")
                with emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)
                    with emit.loop(mid_blocks) as block:

                        def keep(row: Any, column: Any, sums: Any) -> None:
                            value = emit.finish(sums, first.epilogue, None, lanes)
                            emit.store(tile, value, block, row * width + column, lanes=lanes)

                        depthwise_phase(
                            first,
                            config["depthwise_columns"],
                            lanes,
                            rows=rows,
                            first_row=first_row,
                            block=block,
                            source=lambda row, column: emit.load(data, image, block, row, column, lanes=lanes),
                            weight=weight_1,
                            bias=bias_1,
                            sink=keep,
                        )
                    with emit.loop(groups.per_task) as group:

                        def sink(block: Any, pixel: Any, sums: Any) -> None:
                            at = (image, block, 0, first_row * width + pixel)
                            read = None if residual is None else lambda: emit.load(residual, *at, lanes=lanes)
                            emit.store(output, emit.finish(sums, second.epilogue, read, lanes), *at, lanes=lanes)

                        pointwise_phase(
                            second,
                            config,
                            lanes,
                            pixels=rows * width,
                            first_block=groups.start(channel_task, group),
                            source=lambda block, pixel, lane: tile[block, pixel, lane],
                            weight=weight_2,
                            bias=bias_2,
                            sink=sink,
                        )

        return emit.kernel("depthwise_pointwise", self.signature(operator, cpu), body)
