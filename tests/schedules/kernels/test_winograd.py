"""Winograd's algorithm: its matrices, its kernels at every border, what it rounds, what it saves, and its place in the
space of convolutions.
"""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("tvm")
from costmodel.cpu.core_work import OUTPUTS
from costmodel.operators.layers import Epilogue, Prologue
from schedules.contract.cpu_target import CpuTarget
from schedules.kernels.direct_conv2d import DirectConv2d
from schedules.kernels.template_table import template_for
from schedules.kernels.winograd_conv2d import WINOGRAD_OUTPUTS, WinogradConv2d
from schedules.loops.winograd import relative_rounding, transformed_weight, winograd_matrices
from tests.schedules.kernel_cases import CPU, conv, pytorch, random_case, run_kernel

AVX2 = CpuTarget(8, 16, "haswell", ("avx2", "fma"), 2, 32 * 1024, 512 * 1024)
EVERYTHING = Epilogue(True, "silu", "after_activation", affine=True)
LAYERS = {
    "odd size, batch 2, partial blocks": conv(2, 24, 15, 13, 40, 3, epilogue=Epilogue(True, "relu6")),
    "no padding, whole tiles": conv(1, 16, 10, 14, 16, 3, padding=(0, 0, 0, 0)),
    "no padding, broken tiles": conv(1, 16, 7, 9, 24, 3, padding=(0, 0, 0, 0)),
    "one-sided padding, odd channels": conv(2, 19, 9, 7, 33, 3, padding=(0, 1, 2, 0)),
    "padding wider than the filter": conv(1, 16, 4, 5, 16, 3, padding=(5, 4, 3, 6)),
    "image smaller than a tile": conv(3, 16, 2, 1, 16, 3),
    "residual before the activation": conv(1, 40, 8, 8, 24, 3, epilogue=Epilogue(True, "relu", "before_activation")),
    "behind a batch norm and a ReLU": conv(2, 24, 9, 10, 40, 3, prologue=Prologue(True, "relu")),
    "activation, affine, residual": conv(1, 24, 9, 10, 40, 3, epilogue=EVERYTHING),
}


def check(operator, config, cpu=CPU, seed=0):
    data, parameters, residual = random_case(operator, seed)
    output = run_kernel(operator, config, data, parameters, residual, cpu)
    expected = pytorch(operator, data, parameters, residual)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4, err_msg=f"{operator} {config}")


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_the_matrices_filter(outputs):
    """A^T [(G g) * (B^T d)] is the filter, in both dimensions and exactly but for FP64's rounding."""
    matrices, generator = winograd_matrices(outputs), np.random.default_rng(0)
    data, weight = generator.standard_normal((outputs + 2, outputs + 2)), generator.standard_normal((1, 1, 3, 3))
    products = transformed_weight(weight, outputs).reshape(data.shape) * (matrices.input @ data @ matrices.input.T)
    expected = np.einsum("yxab,ab->yx", np.lib.stride_tricks.sliding_window_view(data, (3, 3)), weight[0, 0])
    np.testing.assert_allclose(matrices.output @ products @ matrices.output.T, expected, atol=1e-13)


@pytest.mark.parametrize(
    ("operator", "outputs"), [(layer, OUTPUTS[place % 2]) for place, layer in enumerate(LAYERS.values())], ids=LAYERS
)
def test_kernel_equals_pytorch(operator, outputs):
    """In one task and in as many as the space has."""
    space = WinogradConv2d(outputs).space(operator, CPU)
    tasks = [math.prod(count for knob, count in config.items() if knob.endswith("_tasks")) for config in space]
    for config in {tasks.index(min(tasks)), tasks.index(max(tasks))}:
        check(operator, space[config])


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_a_block_of_tiles_may_overlap_the_one_before(outputs):
    """11 tiles (of 5 x 5 or 9 x 9) do not divide them, 3 columns not 11, 2 output blocks not 3."""
    config = {"out_blocks": 2, "columns": 3, "tiles": 11, "channel_tasks": 2, "tile_tasks": 3}
    for cpu in (CPU, AVX2):
        if CPU.lanes >= cpu.lanes:
            operator = conv(1, 20, 18, 17, 3 * cpu.lanes - 2, 3, epilogue=EVERYTHING)
            check(operator, {WINOGRAD_OUTPUTS: outputs, **config}, cpu)


@pytest.mark.parametrize("outputs", OUTPUTS)
def test_avx2_sized_kernels(outputs):
    if CPU.lanes < AVX2.lanes:
        pytest.skip("needs AVX2")
    operator = LAYERS["activation, affine, residual"]
    check(operator, random.Random(0).choice(WinogradConv2d(outputs).space(operator, AVX2)), AVX2)


def test_other_convolutions_are_not_covered():
    covered = conv(1, 32, 8, 8, 32, 3)
    others = [
        conv(1, 32, 8, 8, 32, 3, 2),
        conv(1, 32, 8, 8, 32, 5),
        conv(1, 32, 8, 8, 32, 3, groups=2),
        conv(1, 32, 8, 8, 32, 3, dilation=(2, 2)),
        conv(1, 3, 8, 8, 32, 3),
        replace(conv(1, 32, 8, 8, 32, 1), gated=True),
    ]
    template = WinogradConv2d(4)
    assert template.covers(covered, CPU) and not any(template.covers(each, CPU) for each in others)
    assert {template_for(each, CPU).for_config({}).family for each in others[:3]} == {"conv2d"}
    assert all(
        WINOGRAD_OUTPUTS not in each for other in others[:5] for each in template_for(other, CPU).space(other, CPU)
    )


def test_rounding_is_what_the_norms_of_the_matrices_predict():
    """RMS error against FP64, relative to the direct kernel's: 1.6 times as predicted, less for small tiles."""
    operator = conv(1, 128, 16, 16, 32, 3)
    data, parameters, _ = random_case(operator)
    doubles = [replace(each, weight=each.weight.astype(np.float64)) for each in parameters]
    expected = pytorch(operator, data.astype(np.float64), doubles)

    def error(template):
        output = run_kernel(operator, template.space(operator, CPU)[0], data, parameters)
        return float(np.sqrt(np.mean((output - expected) ** 2)))

    direct = error(DirectConv2d())
    assert relative_rounding(2) == pytest.approx(5 / 9) and 1.5 < relative_rounding(4) < 1.7
    for outputs in OUTPUTS:
        measured = error(WinogradConv2d(outputs)) / direct
        assert relative_rounding(outputs) < measured < 1.5 * relative_rounding(outputs)


def vector_products(function):
    """Multiplications of vectors that a kernel with constant loop bounds executes."""
    from tvm import tirx

    def count(node):
        if isinstance(node, tirx.For):
            return int(node.extent) * count(node.body)
        if isinstance(node, tirx.SeqStmt):
            return sum(count(child) for child in node.seq)
        assert not isinstance(node, tirx.IfThenElse)
        inside = sum(count(getattr(node, name)) for name in ("value", "a", "b") if hasattr(node, name))
        return inside + (isinstance(node, tirx.Mul) and str(node.ty) == f"float32x{CPU.lanes}")

    return count(function.body)


def test_a_quarter_of_the_multiplications():
    """2.25 products for an output instead of 9 with tiles of 4 x 4, 4 with 2 x 2; and those of the transforms."""
    operator = conv(1, 64, 14, 14, 64, 3, padding=(0, 0, 0, 0))
    outputs = 12 * 12 * 64 // CPU.lanes
    direct = vector_products(DirectConv2d().build(operator, DirectConv2d().space(operator, CPU)[0], CPU))
    assert direct == outputs * 9 * 64
    for tile, most in ((2, 4.0), (4, 2.25)):
        template = WinogradConv2d(tile)
        config = {
            WINOGRAD_OUTPUTS: tile,
            "out_blocks": 1,
            "columns": 9,
            "tiles": 9,
            "channel_tasks": 1,
            "tile_tasks": 1,
        }
        products = vector_products(template.build(operator, config, CPU))
        assert outputs * most * 64 <= products < 1.1 * outputs * most * 64


def test_algorithms_share_one_space_in_the_order_of_their_cost():
    """None is pruned for being twice as dear as another; a configuration says which algorithm it is of."""
    operator = conv(1, 64, 28, 28, 64, 3)
    template = template_for(operator, CPU)
    space = template.space(operator, CPU)
    parts = [DirectConv2d(), *map(WinogradConv2d, OUTPUTS)]
    for part in parts:
        own = [config for config in space if template.for_config(config).family == part.family]
        assert own == list(part.space(operator, CPU))
        assert template.relative_rounding(own[0]) == part.relative_rounding(own[0])
    assert len(space) == sum(len(part.space(operator, CPU)) for part in parts)
    assert template.for_config(space[0]).family == "winograd-4x4"
    for ask in (lambda: template.signature(operator, CPU), lambda: template.pack(operator, [], CPU)):
        with pytest.raises(TypeError, match="for_config"):
            ask()


def test_weights_of_other_channels_are_zero():
    """Lanes beyond the last output channel: what the transform makes of them must not reach the output's padding."""
    operator = conv(1, 20, 6, 6, CPU.lanes + 1, 3, epilogue=Epilogue(True))
    _, parameters, _ = random_case(operator)
    weight, bias = WinogradConv2d(4).pack(operator, parameters, CPU)
    assert weight.shape == WinogradConv2d(4).signature(operator, CPU).constants[0].shape
    assert not weight[1, ..., 1:].any() and weight[1, ..., 0].any() and not bias[1, 1:].any()
