"""Fused 1x1 -> depthwise -> 1x1, the whole inverted residual: the widened tensor never leaves one core's caches."""

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


class InvertedResidual:
    """Per tile of ``rows`` output rows: ``expand_blocks`` channel blocks at a time are widened (with their halo)
    and filtered, then all of them are projected.

    Knobs: register tiles of both 1x1 convolutions (``expand_blocks`` x ``expand_columns``, ``out_blocks`` x
    ``columns``), ``unroll``, ``rows``, ``depthwise_columns``, ``row_tasks``.
    """

    family = "pointwise-depthwise-pointwise"

    def signature(self, operator: FusedConvs, cpu: CpuTarget) -> Signature:
        expand, depthwise, project = operator.convs
        lanes = cpu.lanes
        ins, mid, out = (blocks(n, lanes) for n in (expand.in_channels, expand.out_channels, project.out_channels))
        output = TensorSpec(blocked_shape(project.output_shape, lanes), "blocked")
        return Signature(
            data=TensorSpec(blocked_shape(expand.input_shape, lanes), "blocked"),
            constants=(
                TensorSpec((mid, ins, 1, 1, lanes, lanes)),
                TensorSpec((mid, lanes)),
                TensorSpec((mid, *depthwise.kernel, lanes)),
                TensorSpec((mid, lanes)),
                TensorSpec((out, mid, 1, 1, lanes, lanes)),
                TensorSpec((out, lanes)),
            ),
            residual=output if project.epilogue.residual else None,
            output=output,
        )

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        return space.inverted_residual(operator, cpu)

    def pack(self, operator: FusedConvs, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (expand, depthwise, project), lanes = operator.convs, cpu.lanes
        first, second, third = parameters
        return [
            pack_conv(expand, first.weight, lanes),
            pack_bias(first.bias, expand.out_channels, lanes),
            pack_depthwise(second.weight, lanes),
            pack_bias(second.bias, depthwise.out_channels, lanes),
            pack_conv(project, third.weight, lanes),
            pack_bias(third.bias, project.out_channels, lanes),
        ]

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        (expand, depthwise, project), lanes = operator.convs, cpu.lanes
        size, rows = config["expand_blocks"], config["rows"]
        in_width, out_width = expand.width, project.width
        in_rows = ordering.source_rows(depthwise, rows)
        mid_blocks = blocks(expand.out_channels, lanes)
        wide = Groups(mid_blocks, size, 1)
        outs = Groups(blocks(project.out_channels, lanes), config["out_blocks"], 1)
        bands = Groups(depthwise.out_height, rows, config["row_tasks"])
        expand_config = {**config, "out_blocks": size, "columns": config["expand_columns"]}

        def body(data: Any, *rest: Any) -> None:
            weight_1, bias_1, weight_2, bias_2, weight_3, bias_3 = rest[:6]
            residual, output = (rest[6], rest[7]) if project.epilogue.residual else (None, rest[6])
            with emit.tasks(expand.batch * bands.tasks) as task:
                image, row_task = task_index(task, expand.batch, bands.tasks)
                widened = T.alloc_buffer((size, in_rows * in_width, lanes), "float32")
                filtered = T.alloc_buffer((mid_blocks, rows * out_width, lanes), "float32")
                with emit.loop(bands.per_task) as band:
                    first_row = bands.start(row_task, band)
                    wanted = emit.larger(0, first_row * depthwise.stride[0] - depthwise.padding[0])
                    first_source = emit.clamp_start(wanted, in_rows, expand.height)
                    with emit.loop(wide.per_task) as group:
                        first_block = wide.start(0, group)

                        def widen(block: Any, pixel: Any, sums: Any) -> None:
                            value = emit.finish(sums, expand.epilogue, None, lanes)
                            emit.store(widened, value, block - first_block, pixel, lanes=lanes)

                        pointwise_phase(
                            expand,
                            expand_config,
                            lanes,
                            pixels=in_rows * in_width,
                            first_block=first_block,
                            source=lambda block, pixel, lane: data[
                                image, block, 0, first_source * in_width + pixel, lane
                            ],
                            weight=weight_1,
                            bias=bias_1,
                            sink=widen,
                        )
                        with emit.loop(size) as index:

                            def keep(row: Any, column: Any, sums: Any) -> None:
                                value = emit.finish(sums, depthwise.epilogue, None, lanes)
                                at = (first_block + index, row * out_width + column)
                                emit.store(filtered, value, *at, lanes=lanes)

                            depthwise_phase(
                                depthwise,
                                config["depthwise_columns"],
                                lanes,
                                rows=rows,
                                first_row=first_row,
                                block=first_block + index,
                                source=lambda row, column: emit.load(
                                    widened, index, (row - first_source) * in_width + column, lanes=lanes
                                ),
                                weight=weight_2,
                                bias=bias_2,
                                sink=keep,
                            )
                    with emit.loop(outs.per_task) as group:

                        def sink(block: Any, pixel: Any, sums: Any) -> None:
                            at = (image, block, 0, first_row * out_width + pixel)
                            read = None if residual is None else lambda: emit.load(residual, *at, lanes=lanes)
                            emit.store(output, emit.finish(sums, project.epilogue, read, lanes), *at, lanes=lanes)

                        pointwise_phase(
                            project,
                            config,
                            lanes,
                            pixels=rows * out_width,
                            first_block=outs.start(0, group),
                            source=lambda block, pixel, lane: filtered[block, pixel, lane],
                            weight=weight_3,
                            bias=bias_3,
                            sink=sink,
                        )

        return emit.kernel("inverted_residual", self.signature(operator, cpu), body)
