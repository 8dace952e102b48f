"""Fused convolution -> depthwise -> 1x1 on a sliding window of rows.

The first convolution is a 1x1 (an inverted residual) or any dense k x k (the stem of a network). A task walks down its
rows of the output; the widened rows that the depthwise filter still needs stay in a ring buffer, so each is computed
once, but for the halo between two tasks, and never leaves the core's caches. (Storage folding and sliding windows:
Ragan-Kelley et al., PLDI 2013.)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators import Conv2d, FusedConvs
from schedules import emit, space
from schedules.conv2d import DirectConv2d, reads_plain_input
from schedules.emit import Expr
from schedules.fused import FusedTemplate, Layer, pointwise_output_phase, split_arguments
from schedules.layout import blocks
from schedules.phases import Groups, conv_phase, depthwise_phase, pointwise_phase, store_finished, task_index
from schedules.target import CpuTarget
from schedules.template import Config, Template
from schedules.window import Window


class SlidingWindow(FusedTemplate):
    """Per step of ``rows`` output rows: the new source rows are widened (all channel blocks), filtered, projected.

    Knobs: register tiles of the first and the last convolution (``expand_blocks`` x ``expand_columns``,
    ``out_blocks`` x ``columns``), ``unroll``, ``rows``, ``depthwise_columns``, ``row_tasks``.
    """

    def __init__(self, family: str) -> None:
        self.family = family

    def layer_templates(self, operator: FusedConvs, cpu: CpuTarget) -> list[Template]:
        first, *others = super().layer_templates(operator, cpu)
        return [first if _is_matrix(operator.convs[0], cpu.lanes) else DirectConv2d(), *others]

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        return space.sliding_window(operator, cpu)

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        (expand, depthwise, project), lanes = operator.convs, cpu.lanes
        window = Window(depthwise, config["rows"], config["row_tasks"])
        width, out_width, mid = expand.out_width, project.width, blocks(expand.out_channels, lanes)
        wide = Groups(mid, config["expand_blocks"], 1)
        outs = Groups(blocks(project.out_channels, lanes), config["out_blocks"], 1)

        def body(*buffers: Any) -> None:
            data, layers, residual, output = split_arguments(operator, buffers)
            with emit.tasks(expand.batch * window.tasks) as task:
                image, row_task = task_index(task, expand.batch, window.tasks)
                widened = T.alloc_buffer((mid, window.ring * width + 1, lanes), "float32")
                filtered = T.alloc_buffer((mid, window.rows * out_width + 1, lanes), "float32")
                with emit.loop(window.steps) as step:
                    first_row = window.first_row(row_task, step)
                    with emit.span(*window.new_sources(first_row, step)) as row:
                        start = emit.bind(window.slot(row) * width)

                        def widen(block: Expr, column: Expr, sums: Any) -> None:
                            store_finished(widened, sums, (block, start + column), expand.epilogue, lanes)

                        with emit.loop(wide.per_task) as group:
                            _widen(layers[0], config, lanes, data, image, row, wide.start(0, group), widen)
                    with emit.loop(mid) as block:

                        def keep(row: Expr, column: Expr, sums: Any) -> None:
                            store_finished(filtered, sums, (block, row * out_width + column), depthwise.epilogue, lanes)

                        depthwise_phase(
                            depthwise,
                            config["depthwise_columns"],
                            lanes,
                            rows=window.rows,
                            first_row=first_row,
                            block=block,
                            source=lambda row, column: emit.load(
                                widened, block, window.slot(row) * width + column, lanes=lanes
                            ),
                            weight=layers[1].weight,
                            bias=layers[1].bias,
                            sink=keep,
                        )
                    pointwise_output_phase(
                        layers[2],
                        config,
                        lanes,
                        groups=outs,
                        task=0,
                        image=image,
                        first_row=first_row,
                        tile=filtered,
                        residual=residual,
                        output=output,
                    )

        return emit.kernel("sliding_window", self.signature(operator, cpu), body)


def _is_matrix(conv: Conv2d, lanes: int) -> bool:
    """A 1x1 on blocked data."""
    return conv.is_pointwise and not reads_plain_input(conv, lanes)


def _widen(
    layer: Layer,
    config: Config,
    lanes: int,
    data: Any,
    image: Expr,
    row: Expr,
    first_block: Expr,
    sink: Callable[[Expr, Expr, Any], None],
) -> None:
    """Output blocks from ``first_block`` of one ``row`` of the first convolution; ``sink(block, column, sums)``."""
    conv, weight = layer.conv, layer.weight
    tile = {**config, "out_blocks": config["expand_blocks"], "columns": config["expand_columns"]}
    if _is_matrix(conv, lanes):
        pointwise_phase(
            conv,
            tile,
            lanes,
            pixels=conv.width,
            first_block=first_block,
            source=lambda block, column, lane: data[image, block, row, column, lane],
            weight=weight,
            bias=layer.bias,
            sink=sink,
        )
        return
    plain = reads_plain_input(conv, lanes)
    conv_phase(
        conv,
        tile,
        lanes,
        rows=1,
        first_row=row,
        first_block=first_block,
        channels=conv.in_channels if plain else blocks(conv.in_channels, lanes) * lanes,
        block_lanes=1 if plain else lanes,
        source=lambda block, lane, y, x: data[image, block, y, x] if plain else data[image, block, y, x, lane],
        weight=lambda o, block, lane, ky, kx: emit.load(
            weight, o, block, ky, kx, *(() if plain else (lane,)), lanes=lanes
        ),
        bias=layer.bias,
        sink=lambda block, _row, column, sums: sink(block, column, sums),
    )
