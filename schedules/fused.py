"""What the fused templates share: the arguments of a chain of convolutions, and its last 1x1.

V is the number of lanes of a vector.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from costmodel.operators import Conv2d, FusedConvs
from schedules import emit
from schedules.depthwise_conv2d import DepthwiseConv2d
from schedules.emit import Expr
from schedules.phases import Groups, pointwise_phase, store_finished
from schedules.pointwise import Pointwise
from schedules.target import CpuTarget
from schedules.template import Config, Parameters, Signature, Template


class FusedTemplate(Template):
    """A chain of convolutions whose constants are those that each of them has in a kernel of its own."""

    def layer_templates(self, operator: FusedConvs, cpu: CpuTarget) -> list[Template]:
        """The template of each convolution alone, which says how its weights are packed."""
        # Not that of `template_for`: a 1x1 of a chain reads blocked data, however few channels it has.
        return [DepthwiseConv2d() if conv.is_depthwise else Pointwise() for conv in operator.convs]

    def signature(self, operator: FusedConvs, cpu: CpuTarget) -> Signature:
        """Data of the first convolution, weight and bias of each in order, residual (if any) and output of the last."""
        templates = self.layer_templates(operator, cpu)
        layers = [template.signature(conv, cpu) for template, conv in zip(templates, operator.convs, strict=True)]
        return Signature(
            data=layers[0].data,
            constants=tuple(spec for layer in layers for spec in layer.constants),
            residual=layers[-1].residual,
            output=layers[-1].output,
        )

    def pack(self, operator: FusedConvs, parameters: Sequence[Parameters], cpu: CpuTarget) -> list[np.ndarray]:
        """The constants of :meth:`signature`; ``ValueError`` unless ``parameters`` has one entry per convolution."""
        layers = zip(self.layer_templates(operator, cpu), operator.convs, parameters, strict=True)
        return [array for template, conv, own in layers for array in template.pack(conv, [own], cpu)]


@dataclass(frozen=True)
class Layer:
    """A convolution of the chain and the kernel's buffers of its packed weight and bias."""

    conv: Conv2d
    weight: Any
    bias: Any


def split_arguments(operator: FusedConvs, buffers: Sequence[Any]) -> tuple[Any, list[Layer], Any | None, Any]:
    """(data, layers, residual or ``None``, output) of a kernel's ``buffers``, which have the signature's order.

    ``ValueError`` where their number is not that of the signature.
    """
    data, *constants, output = buffers
    residual = constants.pop() if operator.epilogue.residual else None
    layers = zip(operator.convs, constants[::2], constants[1::2], strict=True)
    return data, [Layer(conv, weight, bias) for conv, weight, bias in layers], residual, output


def pointwise_output_phase(
    layer: Layer,
    config: Config,
    lanes: int,
    *,
    groups: Groups,
    task: Expr,
    image: Expr,
    first_row: Expr,
    tile: Any,
    residual: Any | None,
    output: Any,
) -> None:
    """The last 1x1 of a chain: ``config["rows"]`` rows from ``first_row``, for the output blocks of ``task``.

    ``tile``, (input blocks, rows x width, V), holds its input; ``residual`` and ``output`` are blocked.
    """
    conv = layer.conv

    def sink(block: Expr, pixel: Expr, sums: Any) -> None:
        at = (image, block, 0, first_row * conv.width + pixel)
        store_finished(output, sums, at, conv.epilogue, lanes, residual)

    with emit.loop(groups.per_task) as group:
        pointwise_phase(
            conv,
            config,
            lanes,
            pixels=config["rows"] * conv.width,
            first_block=groups.start(task, group),
            source=lambda block, pixel, lane: tile[block, pixel, lane],
            weight=layer.weight,
            bias=layer.bias,
            sink=sink,
        )
