"""The clock of power-limited cards under a mixed load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.gpu import gpu_cost_model
from costmodel.gpu.power import clock_factor
from costmodel.machines.machine_catalog import load_machine
from costmodel.model.cost_model import Estimate


def kernel(seconds: float, bound: str) -> Estimate:
    return Estimate(seconds, 0.8 * seconds, 1.2 * seconds, bound)


def test_arithmetic_alone_keeps_its_clock():
    assert clock_factor([kernel(1.0, "compute"), kernel(5.0, "launch")], [3, 1]) == 1


def test_memory_bound_time_lets_the_clock_rise():
    # 2 s of memory beside 8 s of arithmetic alone: 8 / (8 - 0.55 * 2), which is 1 + 0.55 * 2 / C with C = 8 / factor
    factor = clock_factor([kernel(1.0, "memory:DRAM"), kernel(4.0, "compute")], [2, 2])
    assert factor == pytest.approx(8 / 6.9)
    assert factor == pytest.approx(1 + 0.55 * 2 / (8 / factor))


@given(st.floats(0, 1e3), st.floats(1e-6, 1e3))
def test_the_clock_rises_no_further_than_was_measured(memory, arithmetic):
    assert 1 <= clock_factor([kernel(memory, "memory:DRAM"), kernel(arithmetic, "compute")], [1, 1]) <= 1.32


def test_only_power_limited_cards_move_and_only_their_arithmetic():
    load = [kernel(2.0, "memory:DRAM"), kernel(8.0, "compute")]
    assert gpu_cost_model(load_machine("a100-pcie-40gb")).settle(load, [1, 1]) == load
    memory, arithmetic = gpu_cost_model(load_machine("t4")).settle(load, [1, 1])
    assert memory == load[0]
    assert arithmetic.seconds == pytest.approx(6.9) and arithmetic.upper == load[1].upper
    assert arithmetic.breakdown["mixed_load_clock"] == pytest.approx(8 / 6.9)
