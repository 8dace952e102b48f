"""Fused depthwise -> 1x1: a tile of rows of all channels stays in the caches of one core."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators import FusedConvs
from schedules import emit, space
from schedules.fused import FusedTemplate, pointwise_output_phase, split_arguments
from schedules.layout import blocks
from schedules.phases import Groups, depthwise_phase, store_finished, task_index
from schedules.target import CpuTarget
from schedules.template import Config


class DepthwisePointwise(FusedTemplate):
    """Knobs: register tile of the 1x1 (``out_blocks`` x ``columns``, ``unroll``), ``rows`` per tile,
    ``depthwise_columns``, ``channel_tasks`` (each computes the depthwise part again) x ``row_tasks``.
    """

    family = "depthwise-pointwise"

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        return space.depthwise_pointwise(operator, cpu)

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        (first, second), lanes = operator.convs, cpu.lanes
        mid_blocks = blocks(first.out_channels, lanes)
        rows, width = config["rows"], second.width
        groups = Groups(blocks(second.out_channels, lanes), config["out_blocks"], config["channel_tasks"])
        bands = Groups(second.height, rows, config["row_tasks"])

        def body(*buffers: Any) -> None:
            data, (depthwise, pointwise), residual, output = split_arguments(operator, buffers)
            with emit.tasks(first.batch * groups.tasks * bands.tasks) as task:
                image, channel_task, row_task = task_index(task, first.batch, groups.tasks, bands.tasks)
                tile = T.alloc_buffer((mid_blocks, rows * width, lanes), "float32")
                with emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)
                    with emit.loop(mid_blocks) as block:

                        def keep(row: Any, column: Any, sums: Any) -> None:
                            store_finished(tile, sums, (block, row * width + column), first.epilogue, lanes)

                        depthwise_phase(
                            first,
                            config["depthwise_columns"],
                            lanes,
                            rows=rows,
                            first_row=first_row,
                            block=block,
                            source=lambda row, column: emit.load(data, image, block, row, column, lanes=lanes),
                            weight=depthwise.weight,
                            bias=depthwise.bias,
                            sink=keep,
                        )
                    pointwise_output_phase(
                        pointwise,
                        config,
                        lanes,
                        groups=groups,
                        task=channel_task,
                        image=image,
                        first_row=first_row,
                        tile=tile,
                        residual=residual,
                        output=output,
                    )

        return emit.kernel("depthwise_pointwise", self.signature(operator, cpu), body)
