"""Table of templates, how one is added to it, and lookup by operator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from costmodel.operators.layers import Operator
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Config, Template, load_extensions
from schedules.kernels.algorithms import ConvAlgorithms, ProductAlgorithms
from schedules.kernels.channel_norm_kernel import ChannelNormKernel
from schedules.kernels.dense_kernel import DenseLayer, TileDense
from schedules.kernels.depthwise_conv2d import DepthwiseConv2d
from schedules.kernels.direct_conv2d import TileConv2d
from schedules.kernels.fused.conv_pair import conv_pairs
from schedules.kernels.fused.depthwise_pairs import (
    DepthwisePointwise,
    PointwiseDepthwise,
    TileDepthwisePointwise,
    TilePointwiseDepthwise,
)
from schedules.kernels.fused.pointwise_pair import PointwisePair
from schedules.kernels.fused.sliding_window import SlidingWindow
from schedules.kernels.pointwise_kernel import Pointwise, ProloguePointwise, TilePointwise
from schedules.kernels.pool_kernel import Pool
from schedules.loops.tile_products import DEPTHS

TEMPLATES: list[Template] = []


def register(template: Template) -> Template:
    """Add a template; it is used for the operators that it covers, rather than those registered before it.

    For a template outside of this project, call it in a module that an entry point of the group ``fusion.extensions``
    names: measuring processes import that module too.
    """
    TEMPLATES.insert(0, template)
    return template


_TILE_POINTWISE = {depth: TilePointwise(depth) for depth in DEPTHS}
# The first that covers an operator is used.
_OWN: tuple[Template, ...] = (
    ProductAlgorithms(DepthwisePointwise(), {depth: TileDepthwisePointwise(depth) for depth in DEPTHS}),
    ProductAlgorithms(PointwiseDepthwise(), {depth: TilePointwiseDepthwise(depth) for depth in DEPTHS}),
    PointwisePair(),
    SlidingWindow("pointwise-depthwise-pointwise"),
    SlidingWindow("conv-depthwise-pointwise"),
    conv_pairs("conv-pointwise"),
    conv_pairs("pointwise-conv"),
    conv_pairs("conv-conv"),
    conv_pairs("conv-depthwise"),
    ProductAlgorithms(DenseLayer(), {0: TileDense(DenseLayer())}),
    Pool(),
    ChannelNormKernel(),
    DepthwiseConv2d(),
    ProductAlgorithms(Pointwise(), _TILE_POINTWISE),
    ProductAlgorithms(ProloguePointwise(), _TILE_POINTWISE),
    ProductAlgorithms(ConvAlgorithms(), {depth: TileConv2d(depth) for depth in DEPTHS}),  # any other convolution
)
for _template in reversed(_OWN):
    register(_template)


def template_for(operator: Operator, cpu: CpuTarget) -> Template | None:
    """Template of ``operator``, or None."""
    load_extensions()
    if operator.dtype != "float32" and operator.dtype not in cpu.dot_products:
        return None  # reason: `cpu.lacks(operator.dtype)`
    return next((template for template in TEMPLATES if template.covers(operator, cpu)), None)


# Unlimited caches: the remaining cost is that of the core.
_ENDLESS_BYTES = 2**50
_SPLITS = ("channels", "pixels", "both")


def config_terms(operator: Operator, configs: Sequence[Config], cpu: CpuTarget) -> np.ndarray:
    """Features of each configuration for a learned model, shape (len(configs), 8).

    The analytic cost; logarithms of its ratio to the cost with unlimited caches (traffic beyond L1), with an unlimited
    L2 (traffic beyond L2) and with one core (idle threads, task starts); the number of threads; the work split,
    one-hot. Raises ``ValueError`` if no template covers the operator.
    """
    template = template_for(operator, cpu)
    if template is None:
        raise ValueError(f"no template covers {operator}")
    others = (
        replace(cpu, l1_bytes=_ENDLESS_BYTES, l2_bytes=_ENDLESS_BYTES),
        replace(cpu, l2_bytes=_ENDLESS_BYTES),
        replace(cpu, threads=1),
    )
    rows = []
    for config in configs:
        cost = template.cost(operator, config, cpu)
        relative = [math.log(cost / template.cost(operator, config, other)) for other in others]
        split = template.work_split(config, cpu)
        rows.append([cost, *relative, cpu.threads, *(float(split == each) for each in _SPLITS)])
    return np.array(rows, dtype=np.float64).reshape(len(rows), 5 + len(_SPLITS))
