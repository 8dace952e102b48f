"""Fused 1x1 -> depthwise: a few channel blocks of a tile of rows stay in the caches of one core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators import FusedConvs
from schedules import emit, space
from schedules.fused import FusedTemplate, split_arguments
from schedules.layout import blocks
from schedules.ordering import source_rows
from schedules.phases import Groups, depthwise_phase, pointwise_phase, store_finished, task_index
from schedules.target import CpuTarget
from schedules.template import Config


class PointwiseDepthwise(FusedTemplate):
    """Knobs: register tile of the 1x1 (``out_blocks`` x ``columns``, ``unroll``), output ``rows`` per tile (their
    halo is computed again), ``depthwise_columns``, ``channel_tasks`` x ``row_tasks``. A depthwise filter needs
    only its own channels, so tasks along the channels repeat nothing.
    """

    family = "pointwise-depthwise"

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        return space.pointwise_depthwise(operator, cpu)

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        (first, second), lanes = operator.convs, cpu.lanes
        size, rows, width = config["out_blocks"], config["rows"], first.width
        in_rows = source_rows(second, rows)
        groups = Groups(blocks(first.out_channels, lanes), size, config["channel_tasks"])
        bands = Groups(second.out_height, rows, config["row_tasks"])

        def body(*buffers: Any) -> None:
            data, (pointwise, depthwise), residual, output = split_arguments(operator, buffers)
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
                            store_finished(tile, sums, (block - first_block, pixel), first.epilogue, lanes)

                        pointwise_phase(
                            first,
                            config,
                            lanes,
                            pixels=in_rows * width,
                            first_block=first_block,
                            source=lambda block, pixel, lane: data[image, block, 0, first_source * width + pixel, lane],
                            weight=pointwise.weight,
                            bias=pointwise.bias,
                            sink=keep,
                        )
                        with emit.loop(size) as index:

                            def sink(row: Any, column: Any, sums: Any) -> None:
                                at = (image, first_block + index, first_row + row, column)
                                store_finished(output, sums, at, second.epilogue, lanes, residual)

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
                                weight=depthwise.weight,
                                bias=depthwise.bias,
                                sink=sink,
                            )

        return emit.kernel("pointwise_depthwise", self.signature(operator, cpu), body)
