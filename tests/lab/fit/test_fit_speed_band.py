"""The band of speeds fitted to whole steps: it finds what steps were made with, and never sees what it is judged by."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest

from e2e.price.speed_band import SpeedBand, StepErrors, release_spread
from lab.fit.speed_band import UNSEEN, fit_speed_band, left_out_bands
from lab.steps.training import AskedStep, TrainingRow, asked_step
from lab.steps.training_runs import BareStep, PredictedStep
from lab.validate.training import TrainingCase, training_figures

CHIP, HOPPER = "ampere of 108 multiprocessors", "hopper of 132 multiprocessors"
SOURCES = ("llm-foundry", "torchtitan", "dgxc-benchmarking")


def made(source: str, gpus: int, measured: float, precision: str = "bf16") -> BareStep:
    """Predicted as 10 s, of which kernels are 8 s that may err by a fifth."""
    row = TrainingRow(
        place=1, source=source, task="pretrain", model="mpt-125m" if source == "llm-foundry" else "llama3-8b",
        gpu="dgx-a100", gpus=gpus, global_batch=gpus, micro_batch=1, sequence_length=2048, tp=0, pp=0, cp=0, ep=0,
        virtual_stages=0, fsdp="FULL_SHARD", checkpointing="no" if source == "torchtitan" else "False",
        precision=precision, compiled=False, seconds=measured, memory_gib=0.0, note="",
    )  # fmt: skip
    asked = asked_step(row)
    assert isinstance(asked, AskedStep)
    parts = {"compute": 6.0, "memory": 2.0, "collective transfer": 2.0}
    predicted = PredictedStep(
        10.0, (8.4, 11.6), parts=parts, below={"Gemm": 1.6}, above={"Gemm": 1.6}, taken={"Gemm": 10.0}, chip=CHIP
    )
    return BareStep(asked, predicted)


def steps(width: float, noise: float = 0.0) -> list[BareStep]:
    drawn, band = random.Random(1), SpeedBand(width, StepErrors())
    return [
        made(source, gpus, 10 * (1 + 0.8 * band.slowdown(gpus)) * math.exp(drawn.gauss(0, noise)))
        for source in SOURCES
        for gpus in (8, 64, 512) * 20
    ]


def test_the_width_that_steps_were_made_with_is_found():
    band = fit_speed_band(steps(0.08))
    assert band is not None and band.width == pytest.approx(0.08) and band.chips == (CHIP,)
    assert band.errors.families == ("Gemm",) and band.errors.residual == pytest.approx(UNSEEN, abs=1e-4)


def test_each_architecture_has_the_width_of_its_own_steps():
    of_hopper = [BareStep(step.asked, replace(step.predicted, chip=HOPPER)) for step in steps(0.16)]
    band = fit_speed_band([*steps(0.06), *of_hopper])
    assert band is not None and band.widths == pytest.approx({"ampere": 0.06, "hopper": 0.16})
    assert 0.06 <= band.width <= 0.16 and band.on(CHIP).width == pytest.approx(0.06)
    assert band.on(HOPPER).width == pytest.approx(0.16) and band.on("volta of 80 multiprocessors") is band


def test_the_interval_holds_four_fifths_of_steps_that_err_as_unseen_ones_do():
    found = steps(0.08, noise=0.03)
    band = fit_speed_band(found)
    assert band is not None and band.width == pytest.approx(0.08, abs=0.01)
    for noise, low, high in ((0.03, 0.95, 1.0), (UNSEEN / 1.2816, 0.7, 0.95)):
        cases = [TrainingCase(step.asked, step.predicted, band) for step in steps(0.08, noise)]
        new = [case for case in cases if case.asked.stack != "llm-foundry"]  # whose libraries widen it once more
        assert low < sum(case.inside for case in new) / len(new) <= high


def test_what_a_step_is_judged_by_has_not_seen_its_source():
    honest = steps(0.08)
    lies = [step for step in steps(0.29) if step.asked.row.family == "torchtitan"]
    others = [step for step in honest if step.asked.row.family != "torchtitan"]
    bands = left_out_bands([*others, *lies])
    assert bands["torchtitan"] == fit_speed_band(others) and bands["torchtitan"] != bands["llm-foundry"]
    assert bands["torchtitan"] is not None and "torchtitan" not in bands["torchtitan"].provenance["rows"]


def test_steps_in_8_bits_mixtures_and_single_gpus_teach_nothing():
    for step in (made("llm-foundry", 8, 11.0, "amp_fp8"), made("llm-foundry", 1, 11.0)):
        assert not step.teaches
    mixture = made("dgxc-benchmarking", 8, 11.0)
    row = replace(mixture.asked.row, ep=8)
    assert mixture.teaches and not BareStep(replace(mixture.asked, row=row), mixture.predicted).teaches
    assert fit_speed_band([made("llm-foundry", 8, 11.0, "amp_fp8"), made("dgxc-benchmarking", 8, 11.0, "fp8")]) is None
    assert fit_speed_band([made("llm-foundry", 8, 11.0)]) is None  # a single source judges nobody


def test_figures_are_of_the_source_left_out_and_of_nothing_fitted():
    step = made("torchtitan", 3, 10.4)
    band = SpeedBand(0.1, StepErrors(0.01, 0.0, ("Gemm",)), (CHIP,))
    case = TrainingCase(step.asked, step.predicted, band)
    assert case.left_out.seconds == pytest.approx(10.4) and case.error == pytest.approx(0.0)
    assert case.interval_seconds == pytest.approx((10.4 * math.exp(-0.01), 10.4 * math.exp(0.01)))
    figures = training_figures("all", "all", [case])
    assert figures.mape == pytest.approx(0.0) and figures.bare_bias == pytest.approx(-0.4 / 10.4)
    unknown = TrainingCase(step.asked, replace(step.predicted, chip="of another kind"), band)
    assert (
        unknown.interval_seconds[0] < case.interval_seconds[0] < case.interval_seconds[1] < unknown.interval_seconds[1]
    )


def test_steps_of_libraries_older_than_the_tables_have_wider_intervals_and_the_same_middle():
    band = SpeedBand(0.1, StepErrors(0.01, 0.0, ("Gemm",)), (CHIP,))
    new, old = (TrainingCase(*made(source, 3, 10.4), band) for source in ("torchtitan", "llm-foundry"))
    assert old.left_out.seconds == new.left_out.seconds
    half = math.hypot(0.01, release_spread())
    assert old.interval_seconds == pytest.approx((10.4 * math.exp(-half), 10.4 * math.exp(half)), rel=2e-3)
    assert old.interval_seconds[1] > new.interval_seconds[1] == pytest.approx(10.4 * math.exp(0.01))
