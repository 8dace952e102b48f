"""Convolutions to few output channels whose vectors hold neighbouring columns."""

from __future__ import annotations

import random

import numpy as np
import pytest

from tests.case_lists import one_in

pytest.importorskip("tvm")
from costmodel.operators.layers import Conv2d, Epilogue
from schedules.contract.cpu_target import CpuTarget
from schedules.kernels.few_channels import COLUMNS_OF_A_VECTOR, LANE_COLUMNS, ColumnLanes, columns_as_channels
from schedules.kernels.template_table import template_for
from tests.schedules.kernel_cases import CPU, conv, pytorch, random_case, run_kernel

AVX2 = CpuTarget(8, 16, "haswell", ("avx2", "fma"), 2, 32 * 1024, 512 * 1024)
EVERYTHING = Epilogue(True, "prelu", "after_activation", affine=True)
LAYERS = {
    "one channel, the last vector not full": conv(2, 20, 9, 37, 1, 5, epilogue=Epilogue(True, "sigmoid")),
    "one channel from one, stride 3 along a row": Conv2d(1, 1, 9, 100, 1, (7, 5), (1, 3), (3, 1, 3, 1)),
    "three channels, everything, batch 2": conv(2, 18, 6, 19, 3, 3, epilogue=EVERYTHING),
    "two channels, tanh, rows dilated": Conv2d(
        1, 9, 12, 21, 2, (3, 5), (2, 1), (2, 2, 2, 0), (2, 1), epilogue=Epilogue(False, "tanh", "before_activation")
    ),
    "half a vector of channels, a long window": Conv2d(
        1, 17, 5, 43, CPU.lanes // 2, (3, 39), padding=(1, 19, 1, 19), epilogue=EVERYTHING
    ),
    "no padding, rows left over": Conv2d(1, 4, 9, 33, 1, (3, 4), (1, 2)),
    "a window wider than the image": Conv2d(1, 3, 4, 9, 1, (1, 31), padding=(0, 16, 0, 17)),
}


def configurations(operator, cpu):
    """For every number of columns the first configuration, for one of them a random one of this CPU too."""
    for columns in COLUMNS_OF_A_VECTOR:
        if ColumnLanes(columns).covers(operator, cpu):
            space = ColumnLanes(columns).space(operator, cpu)
            yield space[0]
            if cpu is CPU and columns == 4:
                yield random.Random(columns).choice(space)


def check(operator, config, cpu=CPU):
    data, parameters, residual = random_case(operator)
    output = run_kernel(operator, config, data, parameters, residual, cpu)
    np.testing.assert_allclose(output, pytorch(operator, data, parameters, residual), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize(
    ("name", "cpu"), [*((name, CPU) for name in LAYERS), *one_in(4, ((name, AVX2) for name in LAYERS))]
)
def test_kernel_equals_pytorch(name, cpu):
    if cpu.lanes > CPU.lanes:
        pytest.skip("needs AVX2")
    operator = LAYERS[name]
    configs = list(configurations(operator, cpu))
    assert configs or cpu.lanes < 16
    for config in configs:
        check(operator, config, cpu)


def test_columns_of_a_vector_are_an_algorithm_of_the_one_space():
    operator = LAYERS["one channel, the last vector not full"]
    template = template_for(operator, CPU)
    for columns in COLUMNS_OF_A_VECTOR:
        own = [each for each in template.space(operator, CPU) if each.get(LANE_COLUMNS) == columns]
        assert bool(own) == ColumnLanes(columns).covers(operator, CPU)
        assert all(template.for_config(each).family == f"column-lanes-{columns}" for each in own)


def test_where_lanes_are_full_or_columns_share_nothing_it_is_not_covered():
    others = [
        conv(1, 16, 9, 40, CPU.lanes, 5),
        conv(1, 16, 9, 40, 1, 1),
        conv(1, 16, 9, 40, 4, 3, groups=2),
        conv(1, 16, 9, 40, 1, 3, dilation=(2, 2)),
        conv(1, 16, 9, 40, 1, 3, dtype="bfloat16"),
        conv(1, 16, 9, 3, 1, 3),
        conv(1, 16, 9, 40, 1, 3, 3, (0, 0, 0, 0)),
    ]
    assert not any(ColumnLanes(columns).covers(each, CPU) for columns in COLUMNS_OF_A_VECTOR for each in others)


def test_the_wider_convolution_has_fewer_products():
    """For 8 columns of a 5-tap window 12 vectors instead of 40; of 39 taps of two columns 40 instead of 78."""
    assert columns_as_channels(conv(1, 8, 9, 264, 1, 5), 8).kernel == (5, 12)
    assert columns_as_channels(Conv2d(1, 32, 9, 264, 8, (3, 39), padding=(1, 19, 1, 19)), 2).kernel == (3, 40)
