"""Numerics of every template against PyTorch, over shapes that are not nice."""

from __future__ import annotations

import itertools
import math
import random
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.case_lists import one_in

pytest.importorskip("tvm")
from costmodel.operators.layers import ACTIVATIONS, Conv2d, Dense, Epilogue, FusedConvs, Pool2d
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.operator_reference import reference
from schedules.kernels.template_table import TEMPLATES, template_for
from schedules.loops.config_space import task_splits
from tests.schedules.awkward_operators import AWKWARD, RELU6, expanded, inverted, separable, stem
from tests.schedules.kernel_cases import CPU, conv, pytorch, random_case, random_gate, run_kernel

PROPERTY = settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))


def pick(operator, seed=0, cpu=CPU):
    """One configuration of the space, chosen at random but reproducibly."""
    return random.Random(seed).choice(list(template_for(operator, cpu).space(operator, cpu)))


def check(operator, config=None, cpu=CPU, seed=0):
    data, parameters, residual = random_case(operator, seed)
    config = config if config is not None else pick(operator, seed, cpu)
    gate = random_gate(operator, seed)
    output = run_kernel(operator, config, data, parameters, residual, cpu, gate)
    expected = pytorch(operator, data, parameters, residual, gate)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-4, err_msg=f"{operator} {config}")


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("operator", one_in(3, AWKWARD.values()), ids=AWKWARD.keys())
def test_kernel_equals_pytorch(operator, seed):
    check(operator, seed=seed)


@pytest.mark.parametrize("operator", AWKWARD.values(), ids=AWKWARD.keys())
def test_reference_equals_pytorch(operator):
    data, parameters, residual = random_case(operator)
    np.testing.assert_allclose(
        reference(operator, data, parameters, residual), pytorch(operator, data, parameters, residual), atol=1e-4
    )


def test_the_reference_of_a_large_image_takes_little_memory(monkeypatch):
    """All windows of the image at once would be 2.4 MB."""
    monkeypatch.setattr("schedules.contract.operator_reference._COLUMNS", 2**16)
    operator = conv(2, 16, 64, 32, 8, 3, groups=2)
    data, parameters, _ = random_case(operator)
    tracemalloc.start()
    result = reference(operator, data, parameters)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1.5e6
    np.testing.assert_allclose(result, pytorch(operator, data, parameters), atol=1e-4)


@pytest.mark.parametrize(
    ("activation", "residual"),
    [
        *((activation, None) for activation in (None, *ACTIVATIONS) if activation != "softplus"),
        pytest.param("softplus", None, marks=pytest.mark.thorough),  # takes TVM 20 s to simplify
        *itertools.product((None, "relu", "hard_swish"), ("before_activation", "after_activation")),
    ],
)
def test_epilogues(activation, residual):
    slope = 0.1 if activation == "leaky_relu" else 0.0
    check(conv(1, 16, 5, 5, 24, 1, epilogue=Epilogue(True, activation, residual, slope=slope)))


@pytest.mark.parametrize("activation", ["hard_sigmoid", "hard_swish", "elu"])
def test_activations_of_another_slope(activation):
    """ONNX's own default of a hard sigmoid is 0.2."""
    check(conv(1, 16, 5, 5, 24, 1, epilogue=Epilogue(True, activation, slope=0.2)))


AFFINE = Epilogue(bias=True, activation="hard_swish", affine=True)


def affine_everywhere(operator):
    """``operator`` with a scale and a shift after every activation."""
    if isinstance(operator, FusedConvs):
        return FusedConvs(tuple(affine_everywhere(layer) for layer in operator.convs))
    return replace(operator, epilogue=replace(AFFINE, residual=operator.epilogue.residual))


@pytest.mark.parametrize(
    "operator",
    [
        conv(1, 16, 5, 5, 40, 1),
        conv(2, 3, 9, 9, 24, 3, stride=2),
        conv(1, 24, 7, 6, 24, 5, groups=24),
        conv(1, 24, 7, 6, 24, 3, epilogue=Epilogue(residual="after_activation")),
        conv(1, 24, 7, 6, 24, 1, epilogue=Epilogue(residual="before_activation")),
        separable(24, 40),
        expanded(24, 40),
        inverted(24, 40, 24),
        stem(3, 24, 40),
    ],
)
def test_a_scale_and_a_shift_after_the_activation(operator):
    operator = affine_everywhere(operator)
    check(operator)
    data, parameters, residual = random_case(operator)
    expected = pytorch(operator, data, parameters, residual)
    np.testing.assert_allclose(reference(operator, data, parameters, residual), expected, rtol=1e-4, atol=1e-4)


def test_a_scale_and_a_shift_are_read_from_memory_once_for_each_channel():
    affine = conv(1, 16, 5, 5, 40, 1, epilogue=AFFINE)
    plain = replace(affine, epilogue=replace(AFFINE, affine=False))
    assert affine.weight_bytes - plain.weight_bytes == 4 * 2 * 40
    dense = Dense(3, 5, 7, Epilogue(bias=True))
    assert dense.weight_bytes == 4 * (5 * 7 + 7)


@PROPERTY
@given(
    channels=st.sampled_from([3, 8, 17, 24, 40]),
    out_channels=st.sampled_from([8, 24, 33]),
    height=st.integers(5, 18),
    width=st.integers(5, 18),
    kernel=st.sampled_from([1, 2, 3, 5]),
    stride=st.integers(1, 3),
    batch=st.integers(1, 2),
    seed=st.integers(0, 99),
)
def test_convolution_property(channels, out_channels, height, width, kernel, stride, batch, seed):
    check(conv(batch, channels, height, width, out_channels, kernel, stride, epilogue=RELU6), seed=seed)


@PROPERTY
@given(
    channels=st.sampled_from([16, 24, 40]),
    other=st.sampled_from([8, 24, 33]),
    size=st.integers(5, 17),
    kernel=st.sampled_from([3, 5, 7]),
    stride=st.integers(1, 2),
    seed=st.integers(0, 99),
    order=st.sampled_from([separable, expanded]),
)
def test_fused_property(channels, other, size, kernel, stride, seed, order):
    check(order(channels, other, size, kernel, stride), seed=seed)


def test_avx2_sized_kernels():
    """8 lanes and 16 registers run on any wider CPU too: the code asks for features, it does not assume them."""
    if CPU.lanes < 8:
        pytest.skip("needs AVX2")
    avx2 = CpuTarget(8, 16, "haswell", ("avx2", "fma"), 2, 32 * 1024, 512 * 1024)
    for operator in (separable(24, 40), expanded(24, 40), conv(1, 3, 17, 17, 24, 3, 2), conv(1, 24, 9, 9, 40, 3)):
        check(operator, cpu=avx2)


def test_spaces_are_deterministic_and_fit_the_registers():
    for operator in AWKWARD.values():
        template = template_for(operator, CPU)
        configs = template.space(operator, CPU)
        assert configs and configs == template.space(operator, CPU)
        for config in configs:
            for size, columns in (("out_blocks", "columns"), ("middle_blocks", "middle_columns")):
                if size in config and columns in config:
                    assert config[size] * (config[columns] + 1) < CPU.registers


def test_every_space_stands_in_the_order_of_its_cost():
    """Of every template in the table; what is twice as dear as the best of its algorithm is left out."""
    seen = set()
    for operator in AWKWARD.values():
        template = template_for(operator, CPU)
        costs = [template.cost(operator, config, CPU) for config in template.space(operator, CPU)]
        assert costs == sorted(costs) and costs[0] > 0, operator
        best: dict[str, float] = {}
        for config, cost in zip(template.space(operator, CPU), costs, strict=True):
            assert cost <= 2 * best.setdefault(template.for_config(config).family, cost), (operator, config)
        seen.add(template.family)
    assert seen == {template.family for template in TEMPLATES}


def test_no_template_covers_doubles():
    assert template_for(replace(Dense(1, 8, 8), dtype="float64"), CPU) is None


AVX512 = CpuTarget(16, 32, "skylake-avx512", (), 2, 32 * 1024, 1024 * 1024)
AVX2 = CpuTarget(8, 16, "haswell", ("avx2", "fma"), 2, 32 * 1024, 512 * 1024)
SSE = CpuTarget(4, 16, "nehalem", (), 2, 32 * 1024, 256 * 1024)


@pytest.mark.parametrize("cpu", [AVX512, AVX2, SSE], ids=lambda cpu: cpu.mcpu)
def test_no_space_is_empty(cpu):
    """Groups of 7 vectors on small images (RegNetY with AVX2), images of one row, one pixel, filters like images."""
    operators = [
        Conv2d(1, 2 * width, 7, columns, 2 * width, (3, 3), padding=(1, 1, 1, 1), groups=2)
        for width in (3, 7 * cpu.lanes, 7 * cpu.lanes + 8, 9 * cpu.lanes, 14 * cpu.lanes)
        for columns in (1, 2, 5, 7)
    ]
    for kernel in (3, 31):
        row = Conv2d(1, 64, 1, 1000, 64, (1, kernel), padding=(0, kernel // 2, 0, kernel // 2), groups=64)
        wide, narrow = (Conv2d(1, 64, 1, 1000, outputs, (1, 1)) for outputs in (512, 80))
        operators += [
            FusedConvs((row, wide)),
            FusedConvs((row, narrow)),
            FusedConvs((Conv2d(1, 8, 1, 1000, 64, (1, 1)), row)),
        ]
        operators.append(FusedConvs((Conv2d(1, 8, 1, 1000, 64, (1, 1)), row, narrow)))
    operators += [Conv2d(1, 64, 1, 1, 1024, (1, 1)), conv(1, 32, 9, 9, 32, 9, padding=(4, 4, 4, 4), groups=32)]
    operators += [Dense(1, 7, 1), Pool2d("max", 1, 3, 1, 300, (1, 2), (1, 2))]
    for operator in operators:
        configs = template_for(operator, cpu).space(operator, cpu)
        assert configs, operator


def test_more_threads_than_there_is_work_for_share_what_there_is():
    """A classifier (8 tiles) on 16 threads, 7 rows on 8 threads, 5 x 5 units on 13."""

    def most(operator, threads):
        cpu = replace(AVX512, threads=threads)
        return max(math.prod(task_counts(each)) for each in template_for(operator, cpu).space(operator, cpu))

    def task_counts(config):
        return [count for knob, count in config.items() if knob.endswith("_tasks")]

    assert most(Dense(1, 1280, 1000), 16) == 8
    block = inverted(160, 960, 160, size=7)
    assert most(block, 8) == 7 and most(block, 2) <= 4
    few = replace(AVX512, threads=8)
    tail = separable(960, 320, size=7)
    assert (1, 7) in [(each["channel_tasks"], each["row_tasks"]) for each in template_for(tail, few).space(tail, few)]
    assert list(task_splits(5, 5, replace(AVX512, threads=13))) == [(3, 4)]


def test_kernels_of_spaces_that_offer_no_choice():
    """Groups of 7 vectors, and a row whose depthwise part is most of the work."""
    cpu = AVX2 if CPU.lanes >= 8 else SSE
    channels = 2 * 7 * cpu.lanes
    check(Conv2d(2, channels, 4, 7, channels, (3, 3), padding=(1, 1, 1, 1), groups=2, epilogue=RELU6), cpu=cpu)
    row = Conv2d(1, 64, 1, 1000, 64, (1, 31), padding=(0, 15, 0, 15), groups=64, epilogue=RELU6)
    check(FusedConvs((row, Conv2d(1, 64, 1, 1000, 80, (1, 1), epilogue=RELU6))), cpu=cpu)


def test_no_template_outside_float32():
    assert template_for(Conv2d(1, 16, 4, 4, 16, (1, 1), dtype="float16"), CPU) is None
