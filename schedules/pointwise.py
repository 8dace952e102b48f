"""1x1 convolution, stride 1: a matrix product over the pixels of the image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tvm import tirx

from costmodel.operators import Conv2d
from schedules import emit, space
from schedules.layout import blocked_shape, blocks
from schedules.packing import pack_bias, pack_conv
from schedules.phases import Groups, pointwise_phase, task_index
from schedules.target import CpuTarget
from schedules.template import Config, Parameters, Signature, TensorSpec


def conv_signature(conv: Conv2d, lanes: int, weight_shape: tuple[int, ...], plain_input: bool = False) -> Signature:
    """Blocked in and out, packed weights and bias; the first layer reads plain NCHW."""
    output = TensorSpec(blocked_shape(conv.output_shape, lanes), "blocked")
    data = (
        TensorSpec(conv.input_shape, "plain")
        if plain_input
        else TensorSpec(blocked_shape(conv.input_shape, lanes), "blocked")
    )
    bias = TensorSpec((blocks(conv.out_channels, lanes), lanes))
    return Signature(data, (TensorSpec(weight_shape), bias), output if conv.epilogue.residual else None, output)


class Pointwise:
    """Knobs: ``out_blocks`` x ``columns`` register tile, ``unroll`` of the reduction, ``pixel_block`` pixels
    per pass over the weights, ``channel_tasks`` x ``pixel_tasks`` parallel tasks.
    """

    family = "pointwise"

    def signature(self, operator: Conv2d, cpu: CpuTarget) -> Signature:
        count = blocks(operator.in_channels, cpu.lanes)
        shape = (blocks(operator.out_channels, cpu.lanes), count, 1, 1, cpu.lanes, cpu.lanes)
        return conv_signature(operator, cpu.lanes, shape)

    def space(self, operator: Conv2d, cpu: CpuTarget) -> Sequence[Config]:
        return space.pointwise(operator, cpu)

    def pack(self, operator: Conv2d, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[Any]:
        (layer,) = parameters
        weight = pack_conv(operator, layer.weight, cpu.lanes)
        return [weight, pack_bias(layer.bias, operator.out_channels, cpu.lanes)]

    def build(self, operator: Conv2d, config: Config, cpu: CpuTarget) -> tirx.PrimFunc:
        conv, lanes = operator, cpu.lanes
        pixels = conv.height * conv.width
        groups = Groups(blocks(conv.out_channels, lanes), config["out_blocks"], config["channel_tasks"])
        tiles = Groups(pixels, config["pixel_block"], config["pixel_tasks"])

        def body(data: Any, weight: Any, bias: Any, *rest: Any) -> None:
            residual, output = (rest[0], rest[1]) if conv.epilogue.residual else (None, rest[0])
            with emit.tasks(conv.batch * groups.tasks * tiles.tasks) as task:
                image, channel_task, pixel_task = task_index(task, conv.batch, groups.tasks, tiles.tasks)
                with emit.loop(tiles.per_task) as tile:
                    first = tiles.start(pixel_task, tile)
                    with emit.loop(groups.per_task) as group:

                        def sink(block: Any, pixel: Any, sums: Any, first=first, image=image) -> None:
                            at = (image, block, 0, first + pixel)
                            read = None if residual is None else lambda: emit.load(residual, *at, lanes=lanes)
                            emit.store(output, emit.finish(sums, conv.epilogue, read, lanes), *at, lanes=lanes)

                        pointwise_phase(
                            conv,
                            config,
                            lanes,
                            pixels=config["pixel_block"],
                            first_block=groups.start(channel_task, group),
                            source=lambda block, pixel, lane: data[image, block, 0, first + pixel, lane],
                            weight=weight,
                            bias=bias,
                            sink=sink,
                        )

        return emit.kernel("pointwise", self.signature(conv, cpu), body)
