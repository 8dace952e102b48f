"""No estimate falls when a rate of the machine does."""

from __future__ import annotations

import dataclasses

from hypothesis import example, given, settings
from hypothesis import strategies as st

from costmodel.gpu import gpu_cost_model
from costmodel.gpu.families.rates import kernel_floor
from costmodel.machines.machine_file import load_machine
from costmodel.machines.machine_records import Machine, PerThreads
from costmodel.operators.device_work import (
    Attention,
    ConvolutionBackward,
    Elementwise,
    Gemm,
    Normalization,
    OptimizerStep,
    Rearrangement,
    Reduction,
    Softmax,
)
from costmodel.operators.layers import Conv2d

# Measured, relatives of a measured one, and without either.
MACHINES = ("h100-sxm", "h100-pcie", "a100-pcie-40gb", "a100-sxm-40gb", "v100-sxm2-16gb", "t4", "l4", "b200-sxm")
DTYPES = st.sampled_from(["float32", "float16", "bfloat16", "tf32"])
SIZES = st.integers(1, 6000)
ROWS = st.integers(1, 1 << 17)

CONVOLUTIONS = st.builds(
    lambda batch, channels, size, filters, kernel, dtype: Conv2d(
        batch, channels, size, size, filters, (kernel, kernel), padding=(kernel // 2,) * 4, dtype=dtype
    ),
    st.integers(1, 64),
    st.integers(1, 512),
    st.integers(7, 60),
    st.integers(1, 512),
    st.sampled_from([1, 3]),
    DTYPES,
)
OPERATORS = st.one_of(
    st.builds(Gemm, st.just(1), SIZES, SIZES, SIZES, DTYPES, transpose_b=st.booleans()),
    st.builds(Gemm, st.integers(2, 200), SIZES, SIZES, st.integers(1, 500), DTYPES),
    st.builds(Elementwise, st.sampled_from(["add", "gelu", "unknown"]), st.integers(1, 1 << 28), st.integers(1, 3)),
    st.builds(Softmax, ROWS, SIZES, st.sampled_from(["float32", "float16"])),
    st.builds(Normalization, st.sampled_from(["layer_norm", "rms_norm"]), ROWS, SIZES),
    st.builds(Reduction, st.just("sum"), st.integers(1, 1 << 28), SIZES),
    st.builds(Rearrangement, st.just("transpose"), st.integers(1, 1 << 28)),
    st.builds(OptimizerStep, st.just("adamw"), st.integers(1, 1 << 28), SIZES, st.just(4), st.just(3)),
    st.builds(
        Attention,
        st.integers(1, 8),
        st.just(16),
        st.integers(64, 4096),
        st.integers(64, 4096),
        st.just(64),
        st.just(16),
    ),
    CONVOLUTIONS,
    st.builds(ConvolutionBackward, CONVOLUTIONS, st.sampled_from(["data", "weight"])),
)


def slower(machine: Machine, compute: float, l2: float, dram: float) -> Machine:
    """``machine`` at these shares of its rates."""
    rates = {
        name: dataclasses.replace(
            each,
            sustained=PerThreads(((1, each.sustained.at(1) * compute),)),
            burst=None if each.burst is None else each.burst * compute,
        )
        for name, each in machine.compute.items()
    }
    levels = tuple(
        dataclasses.replace(level, bandwidth=PerThreads(((1, level.bandwidth.at(1) * share),)))
        for level, share in zip(machine.memory, (l2, dram), strict=True)
    )
    return dataclasses.replace(machine, compute=rates, memory=levels)


SHARES = st.floats(0.2, 1.0)


# A sum that is split at half the rate: the kernel that adds the parts once cost nothing.
SPLIT_SUM = ConvolutionBackward(Conv2d(3, 1, 21, 21, 1, (1, 1), dtype="float16"), "weight")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(MACHINES), OPERATORS, SHARES, SHARES, SHARES)
@example("h100-sxm", SPLIT_SUM, 0.5, 1.0, 1.0)
def test_no_estimate_falls_with_a_rate(name, operator, compute, l2, dram):
    machine = load_machine(name)
    before, after = (
        gpu_cost_model(each).estimate([operator])[0] for each in (machine, slower(machine, compute, l2, dram))
    )
    assert after.seconds >= before.seconds * (1 - 1e-8)


def test_the_parts_of_a_split_sum_are_added_by_a_kernel():
    machine = slower(load_machine("h100-sxm"), 0.5, 1.0, 1.0)
    (found,) = gpu_cost_model(machine).estimate([SPLIT_SUM])
    assert found.seconds > 2 * kernel_floor(machine)
