"""Groups of few channels: the kernel at every border, where it applies, and what it saves."""

from __future__ import annotations

import numpy as np
import pytest

from tests.case_lists import one_in

pytest.importorskip("tvm")
from costmodel.operators.layers import Epilogue, Prologue
from schedules.contract.cpu_target import CpuTarget
from schedules.kernels.few_channels import GROUP_CHANNELS, GroupedConv2d
from schedules.kernels.template_table import template_for
from tests.schedules.kernel_cases import CPU, conv, pytorch, random_case, run_kernel

AVX2 = CpuTarget(8, 16, "haswell", ("avx2", "fma"), 2, 32 * 1024, 512 * 1024)
LAYERS = {
    "groups of 4, batch 2": conv(2, 32, 9, 11, 32, 3, groups=8, epilogue=Epilogue(True, "relu")),
    "groups of 2, partial block": conv(1, 22, 7, 6, 22, 3, groups=11),
    "groups of 4, stride 2": conv(1, 40, 15, 14, 40, 3, 2, groups=10),
    "groups of 4, dilated": conv(1, 16, 12, 9, 16, 3, padding=(2, 2, 2, 2), dilation=(2, 2), groups=4),
    "groups of 2, 5x5 on 3x3 pixels": conv(1, 16, 3, 3, 16, 5, groups=8),
    "groups of 4, 1x1": conv(1, 64, 5, 5, 64, 1, groups=16),
    "groups of 4, residual": conv(1, 24, 8, 9, 24, 3, groups=6, epilogue=Epilogue(True, "silu", "after_activation")),
}


@pytest.mark.parametrize(
    ("name", "cpu"), [*((name, CPU) for name in LAYERS), *one_in(4, ((name, AVX2) for name in LAYERS))]
)
def test_kernel_equals_pytorch(name, cpu):
    operator = LAYERS[name]
    if CPU.lanes < cpu.lanes:
        pytest.skip("needs AVX2")
    data, parameters, residual = random_case(operator)
    space = GroupedConv2d().space(operator, cpu)
    for config in (space[0], space[-1]):
        output = run_kernel(operator, config, data, parameters, residual, cpu)
        expected = pytorch(operator, data, parameters, residual)
        np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4, err_msg=str(config))


def test_it_is_one_of_the_algorithms_and_its_cost_puts_it_first_where_groups_are_small():
    """ResNeXt's second stage in groups of 4: a direct kernel computes with 16 inputs what 4 are enough for."""
    operator = conv(1, 128, 56, 56, 128, 3, groups=32)
    cpu = CpuTarget(16, 32, "skylake-avx512", (), 2, 32 * 1024, 1024 * 1024)
    space = template_for(operator, cpu).space(operator, cpu)
    assert GROUP_CHANNELS in space[0] and any(GROUP_CHANNELS not in config for config in space)


def test_other_groups_are_left_to_the_direct_kernel():
    template = GroupedConv2d()
    assert template.covers(conv(1, 32, 8, 8, 32, 3, groups=16), CPU)
    others = [
        conv(1, 32, 8, 8, 32, 3),
        conv(1, 32, 8, 8, 32, 3, groups=32),
        conv(1, 2 * CPU.lanes, 8, 8, 2 * CPU.lanes, 3, groups=2),
        conv(1, 33, 8, 8, 33, 3, groups=11),
        conv(1, 32, 8, 8, 64, 3, groups=16),
        conv(1, 32, 8, 8, 32, 1, prologue=Prologue(True)),
    ]
    assert not any(template.covers(each, CPU) for each in others)
