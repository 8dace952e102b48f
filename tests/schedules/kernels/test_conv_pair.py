"""Pairs with a dense k x k convolution: numerics at every border and split, what stays in the ring, and the space."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.case_lists import one_in

pytest.importorskip("tvm")
from costmodel.cpu.core_work import OUTPUTS
from costmodel.operators.layers import Conv2d, Epilogue, FusedConvs
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.operator_reference import reference
from schedules.kernels.fused.conv_pair import ConvPair, ConvPairKnobs
from schedules.kernels.template_table import template_for
from schedules.loops.kernel_inputs import RowWindow
from tests.schedules.kernel_cases import CPU, conv, pytorch, random_case, run_kernel

RELU = Epilogue(bias=True, activation="relu")
ADDS = Epilogue(bias=True, activation="relu", residual="before_activation")
EVERYTHING = Epilogue(True, "silu", "after_activation", affine=True)
ONE_THREAD = replace(CPU, threads=1)
AVX2 = CpuTarget(8, 16, "haswell", ("avx2", "fma"), 2, 32 * 1024, 512 * 1024)


def behind(first: Conv2d, out_channels: int, kernel: int, stride=1, padding=None, epilogue=RELU, groups=1, **options):
    """``first`` and a second convolution of its output."""
    shape = (first.batch, first.out_channels, first.out_height, first.out_width)
    second = conv(*shape, out_channels, kernel, stride, padding, groups, epilogue=epilogue, **options)
    return FusedConvs((first, second))


PAIRS = {
    "3x3, 1x1": behind(conv(1, 24, 15, 13, 40, 3, epilogue=RELU), 72, 1, epilogue=ADDS),
    "3x3 stride 2, 1x1, batch 2": behind(conv(2, 40, 13, 12, 24, 3, 2, epilogue=RELU), 33, 1),
    "plain 7x7 stride 2, 1x1": behind(conv(1, 3, 21, 19, 24, 7, 2, epilogue=RELU), 16, 1),
    "1x1, 3x3": behind(conv(1, 24, 11, 9, 40, 1, epilogue=RELU), 24, 3, epilogue=ADDS),
    "1x1, 3x3 stride 2, batch 2": behind(conv(2, 33, 14, 15, 24, 1, epilogue=RELU), 40, 3, 2),
    "1x1 of 3 channels, 3x3": behind(conv(1, 3, 9, 8, 24, 1, epilogue=RELU), 16, 3),
    "1x1, 3x3 without padding": behind(conv(1, 16, 9, 10, 24, 1), 24, 3, padding=(0, 0, 0, 0)),
    "3x3, 3x3": behind(conv(1, 24, 12, 11, 16, 3, epilogue=RELU), 40, 3, epilogue=EVERYTHING),
    "3x3, 3x3, batch 2, both stride 2": behind(conv(2, 17, 19, 17, 24, 3, 2, epilogue=RELU), 24, 3, 2),
    "plain 3x3 stride 2, 3x3 stride 2": behind(conv(1, 3, 27, 25, 16, 3, 2, (0, 0, 1, 1), epilogue=RELU), 32, 3, 2),
    "3x3, 5x5 through 6 channels": behind(conv(1, 16, 10, 9, 6, 3, epilogue=RELU), 20, 5),
    "3x3, dilated 3x3": behind(conv(1, 16, 12, 12, 24, 3), 16, 3, padding=(2, 2, 2, 2), dilation=(2, 2)),
    "3x3, 1x1 stride 2": behind(conv(1, 16, 11, 11, 24, 3, epilogue=RELU), 40, 1, 2),
    "3x3, 1x1 stride 3, few rows": behind(conv(1, 16, 10, 10, 24, 3, epilogue=RELU), 24, 1, 3),
    "3x3, padding wider than the window": behind(conv(1, 16, 4, 5, 16, 3), 16, 3, padding=(7, 4, 6, 5)),
    "one-sided padding": behind(conv(1, 16, 7, 8, 24, 3, padding=(0, 1, 2, 0), epilogue=RELU), 24, 3, 2, (2, 0, 0, 1)),
    "one row": behind(conv(1, 24, 1, 30, 24, 3, epilogue=RELU), 24, 3, epilogue=ADDS),
    "plain 3x3 stride 2, 3x3": behind(conv(1, 3, 25, 21, 24, 3, 2, epilogue=RELU), 24, 3),
    "3x3, 3x3, as few rows as a tile": behind(conv(1, 24, 4, 9, 24, 3, epilogue=RELU), 16, 3, epilogue=ADDS),
    "plain 3x3 stride 2, depthwise": behind(conv(1, 3, 23, 21, 24, 3, 2, epilogue=RELU), 24, 3, groups=24),
    "3x3, depthwise 5x5 stride 2, batch 2": behind(
        conv(2, 24, 11, 12, 40, 3, epilogue=RELU), 40, 5, 2, groups=40, epilogue=ADDS
    ),
}


def check(operator, config, cpu=CPU, seed=0):
    data, parameters, residual = random_case(operator, seed)
    output = run_kernel(operator, config, data, parameters, residual, cpu)
    expected = pytorch(operator, data, parameters, residual)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4, err_msg=f"{operator} {config}")


CASES = {
    f"{name}, {template.family}": (operator, template)
    for name, operator in PAIRS.items()
    for template in (ConvPair(operator.kind, outputs) for outputs in (0, *OUTPUTS))
    if template.covers(operator, CPU)
}


@pytest.mark.parametrize(("operator", "template"), one_in(5, CASES.values()), ids=CASES.keys())
def test_kernel_equals_pytorch(operator, template):
    """The most tasks and rows of a step in the space; of direct sums also what is best on a single thread."""
    config = max(template.space(operator, CPU), key=lambda each: (each["row_tasks"], each["rows"]))
    assert template_for(operator, CPU).for_config(config).family == template.family
    check(operator, config)
    if not template.outputs:
        check(operator, template.space(operator, ONE_THREAD)[0], ONE_THREAD)


@pytest.mark.parametrize("operator", PAIRS.values(), ids=PAIRS.keys())
def test_reference_equals_pytorch(operator):
    data, parameters, residual = random_case(operator)
    np.testing.assert_allclose(
        reference(operator, data, parameters, residual), pytorch(operator, data, parameters, residual), atol=1e-4
    )


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    channels=st.sampled_from([3, 17, 24]),
    middle=st.sampled_from([5, 16, 40]),
    height=st.integers(5, 18),
    width=st.integers(5, 14),
    kernels=st.sampled_from([(3, 1), (1, 3), (3, 3), (5, 3)]),
    strides=st.tuples(st.integers(1, 2), st.integers(1, 3)),
    rows=st.integers(1, 4),
    tasks=st.integers(1, 3),
)
def test_any_rows_and_tasks(channels, middle, height, width, kernels, strides, rows, tasks):
    """Steps that wrap round the ring, tasks that overlap, register tiles that do not divide anything."""
    first = conv(1, channels, height, width, middle, kernels[0], 1 if kernels[0] == 1 else strides[0], epilogue=RELU)
    operator = behind(first, 40, kernels[1], 1 if kernels[1] == 1 else strides[1])
    last = operator.convs[1]
    if RowWindow(last, rows, tasks).steps * rows > last.out_height:
        rows = tasks = 1
    columns = min(3, first.out_width), min(2, last.out_width)
    check(operator, ConvPairKnobs(1, columns[0], 2, columns[1], 2, rows, tasks).config)


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    kernels=st.sampled_from([(3, 1), (1, 3), (3, 3)]),
    channels=st.sampled_from([17, 24]),
    middle=st.sampled_from([16, 40]),
    height=st.integers(4, 18),
    width=st.integers(3, 14),
    padding=st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(0, 2), st.integers(0, 2)),
    outputs=st.sampled_from(OUTPUTS),
    seed=st.integers(0, 99),
)
def test_any_shape_by_winograds_algorithm(kernels, channels, middle, height, width, padding, outputs, seed):
    pads = [padding if kernel == 3 else (0, 0, 0, 0) for kernel in kernels]
    first = conv(1, channels, height, width, middle, kernels[0], 1, pads[0], epilogue=RELU)
    if min(first.out_height, first.out_width) < 3:
        return
    operator = behind(first, 24, kernels[1], 1, pads[1])
    template = ConvPair(operator.kind, outputs)
    if template.covers(operator, CPU):
        check(operator, random.Random(seed).choice(list(template.space(operator, CPU))))


def test_a_step_in_blocks_of_tiles_that_overlap():
    """Bands of 3 tiles in blocks of 2, and of 6 in blocks of 2, of both layers."""
    operator = PAIRS["3x3, 3x3"]
    knobs = ConvPairKnobs(1, 2, 2, 2, 4, rows=8, row_tasks=2, winograd_outputs=4, block_tiles=2)
    check(operator, knobs.config)


def test_avx2_sized_kernels():
    if CPU.lanes < 8:
        pytest.skip("needs AVX2")
    for operator, template in list(CASES.values())[::17]:
        if template.covers(operator, AVX2):
            check(operator, template.space(operator, AVX2)[0], AVX2)


@pytest.mark.parametrize("cpu", [CPU, ONE_THREAD, AVX2, replace(AVX2, threads=48)], ids=["host", "one", "avx2", "many"])
def test_the_space_is_pruned(cpu):
    """Registers, half of L2 for the rows in between, at least a task for each thread that there are rows for."""
    large = behind(conv(1, 16, 160, 160, 64, 3, epilogue=RELU), 64, 3)
    for operator in (*PAIRS.values(), large):
        first, last = operator.convs
        templates = [ConvPair(operator.kind, outputs) for outputs in (0, *OUTPUTS)]
        for template in (each for each in templates if each.covers(operator, cpu)):
            space = template.space(operator, cpu)
            least = min(config["rows"] for config in space)
            for config in space:
                knobs = ConvPairKnobs(**config)
                assert all(tile.out_blocks * (tile.columns + 1) < cpu.registers for tile in knobs.tiles)
                window = RowWindow(last, knobs.rows, knobs.row_tasks)
                assert window.steps * knobs.rows <= last.out_height
                resident = 4 * window.ring * first.out_width * -(-first.out_channels // cpu.lanes) * cpu.lanes
                assert resident <= cpu.l2_bytes // 2 or knobs.rows == least
            most = max(config["row_tasks"] for config in space)
            assert most >= min(cpu.threads, last.out_height // least) // 2


def test_more_tasks_compute_more_of_the_halo_and_cost_it():
    """On one thread the rows between tasks are pure loss."""
    operator = behind(conv(1, 32, 56, 56, 32, 3, epilogue=RELU), 32, 3)
    template = template_for(operator, ONE_THREAD)
    knobs = [ConvPairKnobs(2, 12, 2, 12, 2, 2, tasks) for tasks in (1, 7, 28)]
    costs = [template.cost(operator, each.config, ONE_THREAD) for each in knobs]
    assert costs == sorted(costs) and costs[-1] > 1.3 * costs[0]


def test_grouped_and_gated_pairs_have_no_template():
    grouped = behind(conv(1, 32, 9, 9, 32, 3, groups=2), 32, 1)
    gated = behind(conv(1, 32, 9, 9, 32, 3), 32, 1, padding=(0, 0, 0, 0), gated=True)
    assert template_for(grouped, CPU) is None and template_for(gated, CPU) is None
