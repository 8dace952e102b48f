"""The clock of a GPU during a step of many kernels."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.cost_model import Estimate
from costmodel.gpu import gpu_cost_model
from costmodel.gpu.families.rates import benchmark_clock, long_load_share
from costmodel.gpu.power import BURST_CLOCK, LONG_LOAD, MEMORY_POWER, PRICED_CLOCK, STEP_CLOCK, memory_power, step_clock
from costmodel.machines.machine_file import load_machine
from costmodel.machines.power_law import VOLTAGE_FLOOR, clock_at, power_at, share_at_limit
from costmodel.operators.device_work import Elementwise, Gemm


def product(seconds: float, long_load: float = 0.8, burst: float = 1.0, priced: float = 1.0) -> Estimate:
    """A kernel of arithmetic that fills its units."""
    notes = {LONG_LOAD: long_load, BURST_CLOCK: burst, PRICED_CLOCK: priced, "compute_seconds": seconds}
    return Estimate(seconds, 0.8 * seconds, 1.2 * seconds, "compute", notes)


def copy(seconds: float) -> Estimate:
    """A kernel that waits for memory."""
    return Estimate(seconds, 0.8 * seconds, 1.2 * seconds, "memory:DRAM")


@settings(deadline=None)
@given(st.floats(0.01, 1.0))
def test_the_clock_is_the_inverse_of_the_power(clock):
    assert clock_at(power_at(clock)) == pytest.approx(clock)


def test_arithmetic_alone_runs_at_the_clock_of_a_long_load():
    assert step_clock([product(1.0)], [3]) == pytest.approx(0.8)


def test_memory_bound_time_lets_the_clock_rise():
    clock = step_clock([product(1.0), copy(0.5)], [1, 1])
    drawn = power_at(clock) / power_at(0.8)
    # The power meets the limit on average: what arithmetic draws above it is what the copies leave.
    assert (drawn - 1) / clock == pytest.approx(0.5 * (1 - MEMORY_POWER))
    assert 0.8 < clock < 1


def test_products_that_fill_their_units_less_draw_less():
    half = Estimate(1.0, 0.8, 1.2, "compute", {**product(1.0).breakdown, "compute_seconds": 0.7})
    assert step_clock([half], [1]) == pytest.approx(clock_at(power_at(0.8) / 0.7))


@settings(deadline=None)
@given(st.floats(0, 1e3), st.floats(1e-6, 1e3), st.floats(0.4, 1.0), st.floats(0.4, 1.0))
def test_the_clock_of_a_step_lies_between_a_long_load_and_a_burst(memory, arithmetic, long_load, burst):
    clock = step_clock([copy(memory), product(arithmetic, long_load, burst)], [1, 1])
    assert long_load - 1e-6 <= clock <= 1


def test_a_gpu_whose_clock_holds_changes_nothing():
    model = gpu_cost_model(load_machine("v100-pcie-32gb"))
    load = model.estimate([Gemm(1, 4096, 4096, 4096), Elementwise("add", 1 << 24, 2)])
    assert model.settle(load, [10, 10]) == load


@pytest.mark.parametrize("name", ["h100-sxm", "t4"])
def test_a_step_of_short_products_is_slower_than_the_sum_of_their_bursts(name):
    model = gpu_cost_model(load_machine(name))
    size, dtype = (2048, "bfloat16") if name == "h100-sxm" else (768, "float32")
    burst = model.estimate([Gemm(1, size, size, size, dtype)])
    settled = model.settle(burst, [1000])
    assert settled[0].seconds > burst[0].seconds
    assert settled[0].lower <= burst[0].lower and settled[0].upper >= settled[0].seconds
    assert 0 < float(settled[0].breakdown[STEP_CLOCK]) < 1


def test_memory_bound_kernels_keep_their_time():
    model = gpu_cost_model(load_machine("h100-sxm"))
    both = model.estimate([Gemm(1, 8192, 8192, 8192, "bfloat16"), Elementwise("add", 1 << 28, 2, dtype="bfloat16")])
    settled = model.settle(both, [1, 1])[1]
    assert (settled.seconds, settled.lower, settled.upper) == (both[1].seconds, both[1].lower, both[1].upper)


def test_a_benchmark_sinks_with_the_length_of_its_kernels():
    machine = load_machine("h200-sxm")
    share = long_load_share(machine, "bfloat16")
    clocks = benchmark_clock(np.array([1e-5, 1e-3, 1e-2, 1.0]), share, machine)
    assert (
        clocks[0] == 1 and clocks[1] == pytest.approx(1 / (1 + (1 / share - 1) / 2)) and clocks[2] == clocks[3] == share
    )


def test_less_power_leaves_less_of_the_rate():
    share = long_load_share(load_machine("h100-sxm"), "bfloat16")
    shares = [share_at_limit(share, 700, watts) for watts in (1500, 700, 500, 350, 200)]
    assert shares[0] == 1 and shares[1] == pytest.approx(share)
    assert all(a > b for a, b in zip(shares, shares[1:], strict=False))
    assert share_at_limit(VOLTAGE_FLOOR / 2, 100, 62) == pytest.approx(
        VOLTAGE_FLOOR / 4
    )  # half the power, half the clock
    with pytest.raises(ValueError, match="the clock does not move"):
        share_at_limit(share, 700, 100)


def test_two_h100_by_one_rule():
    # H100 PCIe (350 W, 1,755 MHz, 114 SMs) from H100 SXM: 504 TFLOP/s were measured, its burst would be 711.
    share = long_load_share(load_machine("h100-sxm"), "bfloat16")
    per_sm = share_at_limit(
        share * 1.0, 700 / 132, 350 / 114
    )  # both limits per multiprocessor: rest goes with the limit
    assert per_sm * 1980 / 1755 * 711 == pytest.approx(504, rel=0.05)


def test_memory_of_consumer_cards_leaves_arithmetic_no_power():
    load = [product(1.0), copy(1.0)]
    assert (
        memory_power(load_machine("l4"))
        > 0.9
        > memory_power(load_machine("h100-sxm"))
        == memory_power(load_machine("t4"))
    )
    assert 0.8 < step_clock(load, [1, 1], memory_power(load_machine("l4"))) < step_clock(load, [1, 1])
