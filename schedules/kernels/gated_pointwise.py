"""1x1 convolution of an image whose channels are scaled as it is read: what follows a squeeze-and-excite gate."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d, Operator
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config
from schedules.kernels.pointwise_kernel import (
    Pointwise,
    PointwiseKnobs,
    finished_pixels,
    pointwise_candidates,
    pointwise_extents,
)
from schedules.loops import emit
from schedules.loops.issue_slots import PORTS, exposed_traffic, parallel_cycles
from schedules.loops.loop_nests import task_index
from schedules.loops.space_pruning import cheapest_first


class GatedPointwise(Pointwise):
    """As :class:`Pointwise`; a block of pixels is scaled into a buffer of the task before the weights pass over it.

    The scaled image is never written: the buffer stays in L1 or L2, and serves all groups of output blocks.
    """

    family = "gated-pointwise"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return isinstance(operator, Conv2d) and operator.is_pointwise and operator.gated

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        pixel_bytes = 4 * blocks(operator.in_channels, cpu.lanes) * cpu.lanes
        candidates = list(pointwise_candidates(operator, cpu))
        fitting = [config for config in candidates if config["pixel_block"] * pixel_bytes <= cpu.l2_bytes // 2]
        return cheapest_first(fitting or candidates, partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        knobs = PointwiseKnobs(**config)
        groups, tiles = pointwise_extents(operator, knobs, cpu)
        scaled = knobs.pixel_block * blocks(operator.in_channels, cpu.lanes)
        scaling = 2 * scaled / PORTS + exposed_traffic(cpu, 4 * cpu.lanes * scaled, operator.input_bytes / cpu.threads)
        repeated = parallel_cycles(cpu, operator.batch * groups.tasks * tiles.tasks, tiles.per_task * scaling)
        return super().cost(operator, config, cpu) + repeated

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, PointwiseKnobs(**config)
        groups, tiles = pointwise_extents(conv, knobs, cpu)
        in_blocks = blocks(conv.in_channels, lanes)

        def body(data: Any, gate: Any, weight: Any, bias: Any, *rest: Any) -> None:
            residual, output = (rest[0], rest[1]) if conv.epilogue.residual else (None, rest[0])
            with emit.tasks(conv.batch * groups.tasks * tiles.tasks) as task:
                image, channel_task, pixel_task = task_index(task, conv.batch, groups.tasks, tiles.tasks)
                scaled = T.alloc_buffer((in_blocks, knobs.pixel_block, lanes), "float32")
                with emit.loop(tiles.per_task) as tile:
                    first = tiles.start(pixel_task, tile)
                    with emit.loop(in_blocks) as block:
                        factor = T.bind(emit.load(gate, image, block, 0, 0, lanes=lanes))
                        with emit.loop(knobs.pixel_block) as pixel:
                            value = emit.load(data, image, block, 0, first + pixel, lanes=lanes)
                            emit.store(scaled, value * factor, block, pixel, lanes=lanes)
                    finished_pixels(
                        conv,
                        knobs,
                        lanes,
                        groups=groups,
                        task=channel_task,
                        image=image,
                        first=first,
                        source=lambda block, pixel, lane: scaled[block, pixel, lane],
                        weight=weight,
                        bias=bias,
                        residual=residual,
                        output=output,
                    )

        return emit.kernel("gated_pointwise", self.signature(conv, cpu), body)
