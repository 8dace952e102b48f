"""Levels of a GPU from whole steps: what was made slower is found again, and kept where predictions look."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.fitted import DIRECTORY, adaptations_for
from costmodel.gpu.own_gpu import CountedStep, fit_to_steps, read_inventory, step_levels, write_inventory
from costmodel.machines.machine_file import load_machine
from costmodel.operators.device_work import Elementwise, Normalization
from costmodel.operators.layers import Conv2d

MACHINE = "rtx-4090"
CONV = Conv2d(64, 64, 56, 56, 64, (3, 3), padding=(1, 1, 1, 1), dtype="float16", channels_last=True)
NORM = Normalization("batch_norm", 64 * 56 * 56, 64, "float16", training=False, channels_last=True)
RELU = Elementwise("relu", 64 * 64 * 56 * 56, dtype="float16")
KINDS = (CONV, NORM, RELU)


def steps_file(folder: Path, slower: float, count: int = 20, own: float = 0.0, whole: float = 0.0) -> Path:
    """Steps of mixtures of three kernels, of which convolutions take ``slower`` times what is predicted, each step off
    by ``own`` (log units) up or down, and all of them by ``whole``.
    """
    one = dict(zip(KINDS, gpu_cost_model(load_machine(MACHINE)).estimate(KINDS), strict=True))
    steps = []
    for place in range(count):
        counts = {CONV: 1 + place, NORM: 1 + place % 3, RELU: 1 + 7 * place % 11}
        seconds = sum(n * one[each].seconds * (slower if each is CONV else 1.0) for each, n in counts.items())
        sign = 1 if place % 4 in (0, 3) else -1
        steps.append(CountedStep(f"step {place}", "toy", counts, seconds * math.exp(whole + own * sign)))
    return write_inventory(steps, folder / "steps.json.gz")


def test_kernels_that_are_slower_on_the_gpu_become_so_and_others_move_less(tmp_path):
    written = fit_to_steps(steps_file(tmp_path, 1.2), MACHINE, tmp_path, lambda line: None)
    assert written == tmp_path / f"{MACHINE}.json"
    levels = json.loads(written.read_text(encoding="utf-8"))["adaptations"]
    assert levels["convolution-tensor:float16"]["weights"][0] == pytest.approx(0.18, abs=0.03)
    assert abs(levels["elementwise:float16"]["weights"][0]) < 0.1  # GPUs are off as a whole more often than by family
    before = gpu_cost_model(load_machine(MACHINE)).estimate([CONV])[0]
    after = gpu_cost_model(load_machine(MACHINE), tmp_path).estimate([CONV])[0]
    assert after.source == "fitted" and before.source == "analytic"
    assert after.seconds == pytest.approx(1.2 * before.seconds, rel=0.04)


def test_what_was_known_of_single_kernels_stays(tmp_path):
    written = fit_to_steps(steps_file(tmp_path, 1.0), MACHINE, tmp_path, lambda line: None)
    record = json.loads(written.read_text(encoding="utf-8"))
    assert "gemm-tensor" in record["families"]
    assert record["provenance"]["steps"]["steps.json.gz"]["rows"] == 20


def test_steps_without_times_or_too_few_are_refused(tmp_path):
    unmeasured = write_inventory([CountedStep(f"{n}", "toy", {RELU: 1}) for n in range(9)], tmp_path / "a.json.gz")
    for file in (unmeasured, steps_file(tmp_path, 1.0, count=2)):
        with pytest.raises(InputError, match="measured `seconds`"):
            fit_to_steps(file, MACHINE, tmp_path, lambda line: None)


def test_errors_of_single_steps_move_nothing_and_one_of_the_whole_gpu_moves_all(tmp_path):
    machine = load_machine(MACHINE)
    assert not step_levels(read_inventory(steps_file(tmp_path, 1.0, own=0.1)), machine)
    said: list[str] = []
    written = fit_to_steps(steps_file(tmp_path, 1.0, own=0.1), MACHINE, tmp_path, said.append)
    before = json.loads((DIRECTORY / f"{MACHINE}.json").read_text(encoding="utf-8"))
    assert json.loads(written.read_text(encoding="utf-8"))["adaptations"] == before["adaptations"]
    assert "no level" in said[0]
    levels = step_levels(read_inventory(steps_file(tmp_path, 1.0, own=0.1, whole=0.2)), machine)
    moved = [each.weights[0] - _known(name) for name, each in levels.items()]
    assert moved == pytest.approx([0.18] * len(moved), abs=0.06)


def _known(name: str) -> float:
    """Level of the family that the shipped model of the GPU has already."""
    known = adaptations_for(load_machine(MACHINE)).get(name)
    return 0.0 if known is None else float(known.weights[0])


def test_cards_with_more_memory_are_as_those_that_were_measured():
    measured, larger = (load_machine(f"v100-sxm2-{size}gb") for size in (16, 32))
    assert adaptations_for(larger) == adaptations_for(measured) != {}
    assert not adaptations_for(load_machine("v100-pcie-32gb"))
