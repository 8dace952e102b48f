"""Long windows by Winograd's filtering along one axis: every border, what it saves, how much it rounds."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.case_lists import one_in

pytest.importorskip("tvm")
from costmodel.cpu.core_work import PIECES, Lines
from costmodel.operators.layers import Conv2d, Epilogue
from schedules.contract.cpu_target import CpuTarget
from schedules.kernels.direct_conv2d import DirectConv2d
from schedules.kernels.template_table import template_for
from schedules.kernels.winograd_conv2d import PIECE_TAPS, LineWinograd, piece_matrices
from tests.schedules.kernel_cases import CPU, conv, pytorch, random_case, run_kernel

AVX2 = CpuTarget(8, 16, "haswell", ("avx2", "fma"), 2, 32 * 1024, 512 * 1024)
EVERYTHING = Epilogue(True, "prelu", "after_activation", affine=True)
LAYERS = {
    "39 columns to half a vector": Conv2d(1, 24, 6, 43, CPU.lanes // 2, (3, 39), padding=(1, 19, 1, 19)),
    "5x5, batch 2": conv(2, 20, 9, 11, 40, 5, epilogue=EVERYTHING),
    "one column, a window of 64": Conv2d(1, 16, 61, 1, 16, (64, 1), padding=(31, 0, 32, 0), epilogue=Epilogue(True)),
    "one channel, one column, 40 by 4": Conv2d(1, 1, 200, 1, 24, (40, 1), (4, 1), (18, 0, 18, 0)),
    "two channels, 20x8, no padding": Conv2d(1, 2, 50, 22, 17, (20, 8), epilogue=Epilogue(True, "tanh")),
    "one row, stride 3": Conv2d(1, 9, 1, 90, 16, (1, 20), (1, 3), (0, 7, 0, 2), epilogue=Epilogue(True, "relu")),
    "1x3, one row": Conv2d(1, 40, 1, 50, 24, (1, 3), padding=(0, 1, 0, 1), epilogue=EVERYTHING),
    "9x9, one channel, rows dilated, stride 2": Conv2d(2, 1, 24, 21, 12, (9, 9), (2, 1), (8, 4, 8, 4), (2, 1)),
}


def check(operator, config, cpu=CPU):
    data, parameters, residual = random_case(operator)
    output = run_kernel(operator, config, data, parameters, residual, cpu)
    np.testing.assert_allclose(output, pytorch(operator, data, parameters, residual), atol=1e-4, rtol=1e-4)


def algorithms(operator, cpu):
    """Those of the templates that cover ``operator``."""
    templates = [LineWinograd(taps, axis) for taps in PIECES for axis in (0, 1)]
    return [template for template in templates if template.covers(operator, cpu)]


@pytest.mark.parametrize(
    ("name", "cpu"), [*((name, CPU) for name in LAYERS), *one_in(4, ((name, AVX2) for name in LAYERS))]
)
def test_kernel_equals_pytorch(name, cpu):
    """One configuration of each algorithm that covers the layer, and the one of most tasks."""
    if cpu.lanes > CPU.lanes:
        pytest.skip("needs AVX2")
    operator = LAYERS[name]
    found = algorithms(operator, cpu)
    assert found
    for index, template in enumerate(found):
        space = template.space(operator, cpu)
        many = max(space, key=lambda each: each["line_tasks"] * each["tile_tasks"])
        check(operator, many if index else random.Random(index).choice(space), cpu)


@pytest.mark.parametrize("taps", PIECES)
def test_matrices_compute_sums_of_products(taps):
    matrices, generator = piece_matrices(taps), np.random.default_rng(0)
    data, weight = generator.standard_normal(2 * taps - 1), generator.standard_normal(taps)
    products = (matrices.weight @ weight) * (matrices.input @ data)
    expected = np.lib.stride_tricks.sliding_window_view(data, taps) @ weight
    np.testing.assert_allclose(matrices.output @ products, expected, atol=1e-12)


def test_a_configuration_says_which_algorithm_it_is_of():
    operator = LAYERS["39 columns to half a vector"]
    template = template_for(operator, CPU)
    own = [each for each in template.space(operator, CPU) if PIECE_TAPS in each]
    assert {template.for_config(each).family for each in own} == {"line-winograd-3-columns", "line-winograd-4-columns"}


def test_short_windows_and_those_that_pieces_do_not_fill_are_not_covered():
    others = [
        conv(1, 16, 30, 30, 16, 3),
        conv(1, 16, 30, 30, 16, 5, dilation=(2, 2)),
        conv(1, 16, 30, 30, 16, 5, groups=2),
        conv(1, 16, 30, 30, 16, 5, dtype="bfloat16"),
        conv(1, 16, 3, 3, 16, 5),
        conv(1, 3, 30, 30, 16, 7, 2),
    ]
    assert not any(algorithms(each, CPU) for each in others)


def test_products_of_a_line():
    """39 taps: 13 pieces of 3, each 5 products for 3 outputs instead of 9."""
    lines = Lines(LAYERS["39 columns to half a vector"], 3, 1)
    assert (lines.pieces, lines.positions, lines.tiles) == (13, 5, 15)


def test_rounding_is_what_the_norms_of_the_matrices_predict():
    operator = Conv2d(1, 64, 8, 32, 16, (1, 39), padding=(0, 19, 0, 19))
    data, parameters, _ = random_case(operator)
    exact = pytorch(operator, data.astype(np.float64), [type(parameters[0])(parameters[0].weight.astype(np.float64))])

    def error(template):
        output = run_kernel(operator, template.space(operator, CPU)[0], data, parameters)
        return float(np.sqrt(np.mean((output - exact) ** 2)))

    direct = error(DirectConv2d())
    for taps, most in zip(PIECES, (1.2, 2.0), strict=True):
        template = LineWinograd(taps, 1)
        predicted = template.relative_rounding({})
        assert predicted < most
        assert 0.5 * predicted < error(template) / direct < 2 * predicted
