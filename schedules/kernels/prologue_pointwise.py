"""1x1 convolution with operators applied to its input as it is read: a squeeze-and-excite gate, or a batch norm and an
activation before the convolution (pre-activation).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d, Operator, element_bytes
from schedules.contract.blocked_layout import blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config
from schedules.kernels.pointwise_kernel import (
    Pointwise,
    PointwiseKnobs,
    conv_buffers,
    finished_pixels,
    is_prepared,
    pointwise_candidates,
    pointwise_extents,
)
from schedules.loops import emit
from schedules.loops.dot_products import dot_product
from schedules.loops.issue_slots import PORTS, exposed_traffic, parallel_cycles
from schedules.loops.loop_nests import task_index
from schedules.loops.prepared_input import PreparedInput, preparing_operations
from schedules.loops.space_pruning import cheapest_first


class ProloguePointwise(Pointwise):
    """1x1 convolution as :class:`Pointwise`, with a block of pixels prepared in a buffer of the task before the weights
    pass over it.

    The prepared image is never written to memory: the buffer stays in L1 or L2, and serves all groups of output blocks.
    It has the dtype of the image, so that a narrow one is rounded once more.
    """

    family = "prologue-pointwise"

    def covers(self, operator: Operator, cpu: CpuTarget) -> bool:
        return isinstance(operator, Conv2d) and operator.is_pointwise and is_prepared(operator)

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        pixel_bytes = element_bytes(operator.dtype) * blocks(operator.in_channels, cpu.lanes) * cpu.lanes
        candidates = list(pointwise_candidates(operator, cpu))
        fitting = [config for config in candidates if config["pixel_block"] * pixel_bytes <= cpu.l2_bytes // 2]
        return cheapest_first(fitting or candidates, partial(self.cost, operator, cpu=cpu))

    def cost(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> float:
        knobs = PointwiseKnobs(**config)
        groups, tiles = pointwise_extents(operator, knobs, cpu)
        vectors = knobs.pixel_block * blocks(operator.in_channels, cpu.lanes)
        # A store for each vector, and a load, which is executed in parallel with the arithmetic.
        preparing = vectors * (1 + max(1, preparing_operations(operator))) / PORTS
        preparing += exposed_traffic(
            cpu, element_bytes(operator.dtype) * cpu.lanes * vectors, operator.input_bytes / cpu.threads
        )
        repeated = parallel_cycles(cpu, operator.batch * groups.tasks * tiles.tasks, tiles.per_task * preparing)
        return super().cost(operator, config, cpu) + repeated

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes, knobs = operator, cpu.lanes, PointwiseKnobs(**config)
        groups, tiles = pointwise_extents(conv, knobs, cpu)
        in_blocks = blocks(conv.in_channels, lanes)
        operand = dot_product(conv.dtype).operand

        def body(*buffers: Any) -> None:
            data, gate, weight, bias, prologue, residual, output = conv_buffers(conv, buffers)
            source = PreparedInput(conv, data, gate, prologue, lanes)
            with emit.tasks(conv.batch * groups.tasks * tiles.tasks) as task:
                image, channel_task, pixel_task = task_index(task, conv.batch, groups.tasks, tiles.tasks)
                prepared = T.alloc_buffer((in_blocks, knobs.pixel_block, lanes), conv.dtype)
                with emit.loop(tiles.per_task) as tile:
                    first = tiles.start(pixel_task, tile)
                    with emit.loop(in_blocks) as block:
                        value = source.block(image, block)
                        with emit.loop(knobs.pixel_block) as pixel:
                            emit.store(prepared, value(0, first + pixel), block, pixel, lanes=lanes)
                    finished_pixels(
                        conv,
                        knobs,
                        lanes,
                        groups=groups,
                        task=channel_task,
                        image=image,
                        first=first,
                        source=lambda block, pixel, lane: operand(prepared, block, pixel, lane),
                        weight=weight,
                        bias=bias,
                        residual=residual,
                        output=output,
                    )

        return emit.kernel("prologue_pointwise", self.signature(conv, cpu), body)
