"""A template to copy: two 1x1 convolutions in one kernel, simpler than the project's own, with knobs of its own."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import FusedConvs
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, blocks
from schedules.kernels.fused.fused_chain import FusedTemplate, pointwise_output_phase, split_arguments
from schedules.loops import emit
from schedules.loops.config_space import RegisterTile, cheapest_first, dense_cycles, parallel_cycles
from schedules.loops.loop_nests import TiledExtent, pointwise_phase, store_finished, task_index


class TwoPointwiseKnobs(NamedTuple):
    """``strip``: rows of a task; ``width`` columns of both register tiles."""

    strip: int
    width: int

    @property
    def tile(self) -> RegisterTile:
        return RegisterTile(1, self.width, 2)


class TwoPointwise(FusedTemplate):
    family = "pointwise-pointwise"

    def space(self, operator: FusedConvs, cpu: CpuTarget) -> Sequence[Config]:
        last = operator.convs[1]
        candidates = (
            TwoPointwiseKnobs(rows, width)._asdict() for rows in (1, 2, last.height) for width in range(1, last.width)
        )
        return cheapest_first(candidates, partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> float:
        knobs, last = TwoPointwiseKnobs(**config), operator.convs[1]
        strips = _strips(operator, knobs)
        cycles = sum(
            blocks(conv.out_channels, cpu.lanes)
            * dense_cycles(cpu, knobs.tile, knobs.strip * last.width, conv.in_channels, data_bytes=0, weight_bytes=0)
            for conv in operator.convs
        )
        return parallel_cycles(cpu, operator.batch * strips.tasks, cycles)

    def build(self, operator: FusedConvs, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        (first, second), lanes, knobs = operator.convs, cpu.lanes, TwoPointwiseKnobs(**config)
        strips, pixels = _strips(operator, knobs), knobs.strip * second.width
        middle = TiledExtent(blocks(first.out_channels, lanes), 1, 1)

        def body(*buffers: Any) -> None:
            data, (expand, project), residual, output = split_arguments(operator, buffers)
            with emit.tasks(operator.batch * strips.tasks) as task:
                image, strip = task_index(task, operator.batch, strips.tasks)
                row = strips.start(strip, 0)
                tile = T.alloc_buffer((middle.extent, pixels, lanes), "float32")
                with emit.loop(middle.per_task) as block:
                    pointwise_phase(
                        first,
                        knobs.tile,
                        lanes,
                        pixels=pixels,
                        first_block=block,
                        source=lambda b, pixel, lane: data[image, b, 0, row * first.width + pixel, lane],
                        weight=expand.weight,
                        bias=expand.bias,
                        sink=lambda b, pixel, sums: store_finished(tile, sums, (b, pixel), first, lanes),
                    )
                pointwise_output_phase(
                    project,
                    knobs.tile,
                    lanes,
                    rows=knobs.strip,
                    groups=TiledExtent(blocks(second.out_channels, lanes), 1, 1),
                    task=0,
                    image=image,
                    first_row=row,
                    tile=tile,
                    residual=residual,
                    output=output,
                )

        return emit.kernel("two_pointwise", self.signature(operator, cpu), body)


def _strips(fused: FusedConvs, knobs: TwoPointwiseKnobs) -> TiledExtent:
    height = fused.convs[1].height
    return TiledExtent(height, knobs.strip, -(-height // knobs.strip))
