"""The interval of a step, from what is on its critical path."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from costmodel.machines.machine_file import load_machine
from costmodel.operators.device_work import Gemm
from e2e.explain.critical_path import CriticalPath, Segment, task_family
from e2e.explain.intervals import Deviations, path_deviations
from e2e.explain.predictor import Setting, predict_graph
from e2e.price.pricing import GATHERING_SHARE
from e2e.price.speed_band import CONVOLUTIONS, OF_CONVOLUTIONS, PROGRAMS, SpeedBand, StepErrors
from e2e.simulate.timeline import Edge
from e2e.step.execution_graph import Duration, Kernel
from tests.e2e.drawn_graphs import Drawing, together
from tests.e2e.toy_predictions import (
    GPU,
    Table,
    Toy,
    ToyCluster,
    ToyCollectives,
    predict_ranks,
    predict_step,
    reduced,
    setting,
    step,
    unpriced,
)

# Pieces of host work of a step on an unknown host: 4 operators of 4, one of them the gap before an optimizer without
# tensors to gather.
PIECES = 16 - GATHERING_SHARE


@pytest.mark.parametrize(
    ("host", "kernel", "nominal", "ends"),
    [
        # Seconds of a piece of host work and of a kernel. The device holds up a faster host.
        (0.3, 1.0, 0.3 * PIECES, (4.0, 0.6 * PIECES)),
        # Not on the critical path, but what the step waits for if it is slower.
        (0.2, 1.0, 4.0, (4.0, 0.4 * PIECES)),
        # Far from it either way.
        (0.05, 1.0, 4.0, (4.0, 4.0)),
    ],
)
def test_the_host_is_simulated_at_both_ends_of_its_times(
    host: float, kernel: float, nominal: float, ends: tuple[float, float]
):
    found = predict_step(step(), replace(setting(kernel, host), overheads=Table(host, factor=2.0)))
    assert found.prediction.iteration_seconds == pytest.approx(nominal)
    below, above = found.deviations.below["host"], found.deviations.above["host"]
    assert (nominal - below, nominal + above) == pytest.approx(ends)


def test_a_kernel_counts_as_far_as_it_is_on_the_path():
    """2.5 s of 10 s, which may be 9 s or 12 s."""
    drawing = Drawing()
    drawing.kernel("gemm", 10.0)
    drawing.tasks[0] = replace(drawing.tasks[0], duration=Duration(10.0, 9.0, 12.0))
    segment = Segment("compute", 0.0, 2.5, 0, "gemm", "gemm", Edge.NONE, "start", 0)
    deviations = path_deviations(together(drawing), CriticalPath((segment,), (0.0, 2.5)))
    assert deviations.around(2.5) == pytest.approx((2.25, 3.0))


def test_times_of_an_unknown_host_are_uncertain_as_a_whole():
    known, unknown = Table(1.0), Table(1.0, factor=1.5)
    low, high = predict_step(step(), Setting(GPU, known, Toy(1e-3))).prediction.interval_seconds
    assert high - low < 0.01
    low, high = predict_step(step(), Setting(GPU, unknown, Toy(1e-3))).prediction.interval_seconds
    assert (low, high) == pytest.approx((PIECES / 1.5, PIECES * 1.5), rel=0.01)


def test_the_interval_comes_from_what_is_on_the_critical_path():
    low, high = predict_ranks(reduced((10.0, 16.0))).prediction.interval_seconds
    # The kernels are measured; the transfer of 4 s is 10 % uncertain.
    assert (low, high) == pytest.approx((19.6, 20.4))


def test_host_time_on_the_path_is_as_uncertain_as_the_host_is_unknown():
    drawing = Drawing(0)
    for _ in range(4):
        drawing.host(1.0)
    graph = unpriced(together(drawing))
    chosen = Setting(load_machine("a100-pcie-40gb"), Table(1.0, factor=1.5), ToyCollectives())
    prediction = predict_graph(graph, chosen, ToyCluster(), collectives=ToyCollectives()).prediction
    low, high = prediction.interval_seconds
    seconds = prediction.iteration_seconds
    assert seconds > 0 and (low, high) == pytest.approx((seconds / 1.5, seconds * 1.5))


def replace_taken(deviations: Deviations, taken: dict[str, float]) -> Deviations:
    return Deviations(deviations.below, deviations.above, taken)


def test_what_did_not_teach_errs_as_by_itself():
    """Products in 8 bits, those of experts, and steps without products are none of what whole steps told of."""

    def family(name: str, dtype: str) -> str:
        return task_family(Kernel(name, "kernel", (Gemm(1, 64, 64, 64, dtype),)))

    assert family("aten::mm", "bfloat16") == family("aten::mm", "float16") == "Gemm"
    strange = {family("aten::mm", "float32"), family("moe::each_mm", "bfloat16"), family("float8::each_mm", "float8")}
    assert len(strange) == 3 and "Gemm" not in strange
    learned = StepErrors(0.05, 0.2, ("Gemm", "Softmax"))
    for taken in ({}, {"Softmax": 10.0}):
        assert learned.in_step(taken, 10.0) == StepErrors(0.0, 1.0, learned.families)
    assert learned.in_step({"Gemm": 5.0}, 10.0).kept == pytest.approx(0.6)
    dense, scaled, experts = (
        learned.in_step({"Gemm": 4.0, other: 4.0}, 10.0)
        for other in ("Softmax", family("aten::_scaled_mm", "float8").replace("Gemm", "ScaledGemm"), "all_to_all")
    )
    assert dense.residual < scaled.residual < experts.residual and dense.kept == scaled.kept == experts.kept


def test_steps_of_convolutions_are_known_less_well():
    """Convolutions widen a step by their fraction of its multiplications, whatever their kernels' own intervals."""
    learned = StepErrors(0.05, 0.2, ("Gemm", "Elementwise"))
    images, mixed, dense = (
        learned.in_step({"Gemm": gemm, "Conv2d": (8.0 - gemm) / 3, "ConvolutionBackward": (8.0 - gemm) * 2 / 3}, 10.0)
        for gemm in (0.0, 4.0, 8.0)
    )
    assert images.residual == pytest.approx(0.8 * CONVOLUTIONS) and dense.residual == pytest.approx(0.8 * 0.05)
    assert mixed.residual == pytest.approx((images.residual + dense.residual) / 2)
    others = {"Conv2d": 2.0, "Elementwise": 8.0}
    assert learned.in_step(others, 10.0).residual == pytest.approx(CONVOLUTIONS)
    low, high = Deviations({"Conv2d": 4.0}, {"Conv2d": 8.0}, {"Conv2d": 10.0}).around(10.0, StepErrors())
    part = math.expm1(CONVOLUTIONS) * 10
    assert high - 10 == pytest.approx(math.hypot(part, 8 * OF_CONVOLUTIONS)) and low > 10 - math.hypot(2.0, 4.0)


def test_a_program_is_known_less_well_than_its_kernels():
    learned = StepErrors(0.15, 0.0, ("Gemm",))
    of_program = SpeedBand(0.1, learned).of_program().errors
    for taken in ({"Gemm": 10.0}, {"Elementwise": 10.0}, {}):
        plain, program = (errors.in_step(taken, 10.0) for errors in (learned, of_program))
        assert program.residual == pytest.approx(math.hypot(plain.residual, PROGRAMS)) and program.kept == plain.kept


def test_an_interval_is_never_narrower_for_knowing_less():
    """What whole steps told narrows the kernels of their families alone, and comes on top of all that is not known."""
    deviations = Deviations({"Gemm": 1.0, "Strange": 0.5}, {"Gemm": 2.0, "Strange": 1.5}, {"Gemm": 10.0})
    learned = StepErrors(0.05, 0.2, ("Gemm",))

    def width(errors: StepErrors | None, known: Deviations = deviations) -> tuple[float, float]:
        low, high = known.around(10.0, errors)
        return 10.0 - low, high - 10.0

    assert width(StepErrors()) == width(None)
    assert width(learned) == pytest.approx(
        (math.hypot(0.2, 0.5, 10 * (1 - math.exp(-0.05))), math.hypot(0.4, 1.5, 10 * (math.exp(0.05) - 1)))
    )
    worse = Deviations({"Gemm": 1.2, "Strange": 0.5}, {"Gemm": 2.4, "Strange": 1.5}, {"Gemm": 10.0})
    stranger = Deviations({"Strange": 1.5}, {"Strange": 3.5})
    mixed = replace_taken(deviations, {"Gemm": 5.0, "Strange": 5.0})
    for less in (
        width(replace(learned, residual=0.06)),
        width(replace(learned, kept=0.3)),
        width(replace(learned, families=())),
        width(learned, worse),
        width(learned, stranger),
        width(learned, mixed),
        width(
            learned, Deviations({**deviations.below, "host": 0.1}, {**deviations.above, "host": 0.1}, deviations.taken)
        ),
    ):
        assert all(wide > narrow for wide, narrow in zip(less, width(learned), strict=True))
