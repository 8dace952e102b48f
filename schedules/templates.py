"""Which template makes the kernel of an operator."""

from __future__ import annotations

from costmodel.operators import Conv2d, Dense, FusedConvs, Operator, Pool2d
from schedules.conv2d import DirectConv2d
from schedules.dense import DenseLayer
from schedules.depthwise_conv2d import DepthwiseConv2d
from schedules.depthwise_pointwise import DepthwisePointwise
from schedules.pointwise import Pointwise
from schedules.pointwise_depthwise import PointwiseDepthwise
from schedules.pool2d import Pool
from schedules.sliding_window import SlidingWindow
from schedules.target import CpuTarget
from schedules.template import Template

_FUSED: dict[str, Template] = {
    template.family: template
    for template in (
        DepthwisePointwise(),
        PointwiseDepthwise(),
        SlidingWindow("pointwise-depthwise-pointwise"),
        SlidingWindow("conv-depthwise-pointwise"),
    )
}


def template_for(operator: Operator, cpu: CpuTarget) -> Template | None:
    """The template of ``operator``, or ``None`` where none covers it."""
    if operator.dtype != "float32":
        return None
    if isinstance(operator, FusedConvs):
        return _FUSED.get(operator.kind)
    if isinstance(operator, Dense):
        return DenseLayer()
    if isinstance(operator, Pool2d):
        return Pool()
    return _conv_template(operator, cpu)


def _conv_template(conv: Conv2d, cpu: CpuTarget) -> Template:
    if conv.is_depthwise:
        return DepthwiseConv2d()
    # Few input channels are read as plain NCHW, which only the k x k template does.
    if conv.is_pointwise and conv.in_channels >= cpu.lanes // 2:
        return Pointwise()
    return DirectConv2d()
