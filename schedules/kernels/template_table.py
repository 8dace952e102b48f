"""Which template makes the kernel of an operator."""

from __future__ import annotations

from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Template
from schedules.kernels.channel_norm_kernel import ChannelNormKernel
from schedules.kernels.conv_algorithms import ConvAlgorithms
from schedules.kernels.dense_kernel import DenseLayer
from schedules.kernels.depthwise_conv2d import DepthwiseConv2d
from schedules.kernels.depthwise_pointwise import DepthwisePointwise
from schedules.kernels.gated_pointwise import GatedPointwise
from schedules.kernels.pointwise_depthwise import PointwiseDepthwise
from schedules.kernels.pointwise_kernel import Pointwise
from schedules.kernels.pointwise_pair import PointwisePair
from schedules.kernels.pool_kernel import Pool
from schedules.kernels.sliding_window import SlidingWindow

# The first that covers an operator makes its kernels.
TEMPLATES: tuple[Template, ...] = (
    DepthwisePointwise(),
    PointwiseDepthwise(),
    PointwisePair(),
    SlidingWindow("pointwise-depthwise-pointwise"),
    SlidingWindow("conv-depthwise-pointwise"),
    DenseLayer(),
    Pool(),
    ChannelNormKernel(),
    DepthwiseConv2d(),
    Pointwise(),
    GatedPointwise(),
    ConvAlgorithms(),  # any other convolution
)


def template_for(operator: Operator, cpu: CpuTarget) -> Template | None:
    """The template of ``operator``, or ``None`` where none covers it."""
    if operator.dtype != "float32":
        return None
    return next((template for template in TEMPLATES if template.covers(operator, cpu)), None)


def config_cost(operator: Operator, config: Config, cpu: CpuTarget) -> float:
    """The analytic cost of ``config`` by the template of ``operator``; ``ValueError`` where none covers it."""
    template = template_for(operator, cpu)
    if template is None:
        raise ValueError(f"no template covers {operator}")
    return template.cost(operator, config, cpu)
