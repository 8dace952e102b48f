"""What boards draw, and what steps cost."""

from __future__ import annotations

from dataclasses import replace

import pytest

from costmodel.gpu import gpu_cost_model
from costmodel.gpu.power import MEMORY_POWER, board_watts, drawn_power
from costmodel.machines.machine_file import load_machine
from costmodel.machines.power_law import REST_SHARE
from costmodel.operators.device_work import Elementwise, Gemm
from e2e.explain.utilisation import GpuPrice, cost_of, energy_of
from e2e.step.execution_graph import Duration, ExecutionGraph, GpuLoad
from tests.e2e.drawn_graphs import Drawing

H100, V100 = load_machine("h100-sxm"), load_machine("v100-pcie-32gb")
REST = REST_SHARE * 700


def drawing_power(*kernels: tuple[float, float | None]) -> ExecutionGraph:
    """One kernel after another, of so many seconds and so much power."""
    drawing = Drawing()
    for seconds, _ in kernels:
        drawing.kernel("gemm", seconds)
    rank = drawing.graph()
    tasks = tuple(
        replace(task, duration=Duration(seconds, seconds, seconds, power=power))
        for task, (seconds, power) in zip(rank.tasks, kernels, strict=True)
    )
    return ExecutionGraph((replace(rank, tasks=tasks),))


def test_energy_is_rest_and_what_kernels_draw_above_it():
    found = energy_of(drawing_power((1.0, 1.0), (1.0, 0.5)), H100, 4.0)
    assert found.joules == pytest.approx(4 * REST + 1.5 * (700 - REST))
    assert found.mean_watts == pytest.approx(found.joules / 4) and found.limit_watts == 700
    # Ranks that are alike draw alike; a board draws no more than its limit.
    many = replace(drawing_power((1.0, 1.0), (1.0, 0.5)), multiplicity={0: 8})
    assert energy_of(many, H100, 4.0).joules == pytest.approx(8 * found.joules)
    assert energy_of(drawing_power((9.0, 1.0)), H100, 1.0).mean_watts == pytest.approx(700)


def test_a_transfer_draws_by_what_it_takes_of_the_memory():
    drawing = Drawing()
    drawing.kernel("gemm", 1.0)
    drawing.collective("nccl", 2.0, 0, ranks=(0,))
    rank = drawing.graph()
    gemm, transfer = rank.tasks
    tasks = (replace(gemm, duration=Duration(1.0, 1.0, 1.0, power=1.0)), replace(transfer, load=GpuLoad(0.25)))
    found = energy_of(ExecutionGraph((replace(rank, tasks=tasks),)), H100, 4.0)
    assert found.joules == pytest.approx(4 * REST + (1.0 + 2.0 * 0.25 * MEMORY_POWER) * (700 - REST))


def test_nothing_is_said_of_kernels_whose_power_no_model_knows():
    assert energy_of(drawing_power((1.0, None)), H100, 4.0) is None
    assert energy_of(drawing_power((1.0, 0.5), (1.0, None)), H100, 4.0) is None


def test_a_long_load_of_products_draws_the_limit_and_copies_less():
    model = gpu_cost_model(H100)
    product, copy = Gemm(1, 8192, 8192, 8192, "bfloat16"), Elementwise("add", 1 << 28, 2)
    (estimate,) = model.settle(model.estimate([product]), [100])
    assert 0.85 < drawn_power(estimate) <= 1.0 + 1e-6 and board_watts(H100, drawn_power(estimate)) <= 700
    mixed = model.settle(model.estimate([product, copy]), [1, 10])
    assert drawn_power(mixed[1]) == MEMORY_POWER
    assert drawn_power(mixed[0]) > drawn_power(estimate)  # the clock is higher: copies leave power
    # Of a card whose clock holds it is not known.
    assert all(
        drawn_power(each) is None for each in gpu_cost_model(V100).settle(gpu_cost_model(V100).estimate([copy]), [1])
    )


def test_cost_goes_with_gpus_and_hours():
    assert cost_of(GpuPrice(2.0), 3600.0, 8).per_step == pytest.approx(16.0)
