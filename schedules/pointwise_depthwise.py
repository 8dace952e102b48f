"""Fused 1x1 -> depthwise: a few channel blocks of a tile of rows stay in the caches of one core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators import FusedConvs
from schedules import emit, ordering, space
from schedules.layout import blocked_shape, blocks
from schedules.packing import pack_bias, pack_conv, pack_depthwise
from schedules.phases import Groups, depthwise_phase, pointwise_phase, task_index
from schedules.target import CpuTarget
from schedules.template import Config, Parameters, Signature, TensorSpec


class PointwiseDepthwise:
    """Knobs: register tile of the 1x1 (``out_blocks`` x ``columns``, ``unroll``), output ``rows`` per tile (their
    halo is computed again), ``depthwise_columns``, ``channel_tasks`` x ``row_tasks``. A depthwise filter needs
    only its own channels, so tasks along the channels repeat nothing.
    """

    family = "pointwise-depthwise"

    def signature(self, operator: FusedConvs, cpu: CpuTarget) -> Signature:
        first, second = operator.convs
        lanes = cpu.lanes
        ins, mid = blocks(first.in_channels, lanes), blocks(first.out_channels, lanes)
        output = TensorSpec(blocked_shape(second.output_shape, lanes), "blocked")
        return Signature(
            data=TensorSpec(blocked_shape(first.input_shape, lanes), "blocked"),
            constants=(
                TensorSpec((mid, ins, 1, 1, lanes, lanes)),
                TensorSpec((mid, lanes)),
                TensorSpec((mid, *second.kernel, lanes)),
                TensorSpec((mid, lanes)),
            ),
            residual=output if second.epilogue.residual else None,
            output=output,
        )

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        return space.pointwise_depthwise(operator, cpu)

    def pack(self, operator: FusedConvs, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (first, second), lanes = operator.convs, cpu.lanes
        pointwise, depthwise = parameters
        return [
            pack_conv(first, pointwise.weight, lanes),
            pack_bias(pointwise.bias, first.out_channels, lanes),
            pack_depthwise(depthwise.weight, lanes),
            pack_bias(depthwise.bias, second.out_channels, lanes),
        ]

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        (first, second), lanes = operator.convs, cpu.lanes
        size, rows, width = config["out_blocks"], config["rows"], first.width
        in_rows = ordering.source_rows(second, rows)
        groups = Groups(blocks(first.out_channels, lanes), size, config["channel_tasks"])
        bands = Groups(second.out_height, rows, config["row_tasks"])

        def body(data: Any, weight_1: Any, bias_1: Any, weight_2: Any, bias_2: Any, *rest: Any) -> None:
            residual, output = (rest[0], rest[1]) if second.epilogue.residual else (None, rest[0])
            with emit.tasks(first.batch * groups.tasks * bands.tasks) as task:
                image, channel_task, row_task = task_index(task, first.batch, groups.tasks, bands.tasks)
                tile = T.alloc_buffer((size, in_rows * width, lanes), "float32")
                with emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)
                    wanted = emit.larger(0, first_row * second.stride[0] - second.padding[0])
                    first_source = emit.clamp_start(wanted, in_rows, first.height)
                    with emit.loop(groups.per_task) as group:
                        first_block = groups.start(channel_task, group)

                        def keep(block: Any, pixel: Any, sums: Any) -> None:
                            value = emit.finish(sums, first.epilogue, None, lanes)
                            emit.store(tile, value, block - first_block, pixel, lanes=lanes)

                        pointwise_phase(
                            first,
                            config,
                            lanes,
                            pixels=in_rows * width,
                            first_block=first_block,
                            source=lambda block, pixel, lane: data[image, block, 0, first_source * width + pixel, lane],
                            weight=weight_1,
                            bias=bias_1,
                            sink=keep,
                        )
                        with emit.loop(size) as index:

                            def sink(row: Any, column: Any, sums: Any) -> None:
                                at = (image, first_block + index, first_row + row, column)
                                read = None if residual is None else lambda: emit.load(residual, *at, lanes=lanes)
                                emit.store(output, emit.finish(sums, second.epilogue, read, lanes), *at, lanes=lanes)

                            depthwise_phase(
                                second,
                                config["depthwise_columns"],
                                lanes,
                                rows=rows,
                                first_row=first_row,
                                block=first_block + index,
                                source=lambda row, column: emit.load(
                                    tile, index, (row - first_source) * width + column, lanes=lanes
                                ),
                                weight=weight_2,
                                bias=bias_2,
                                sink=sink,
                            )

        return emit.kernel("pointwise_depthwise", self.signature(operator, cpu), body)
