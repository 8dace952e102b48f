"""Levels of a GPU from whole steps: what was made slower is found again, and kept where predictions look."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.fit_levels import fit_to_steps
from costmodel.gpu.step_inventory import CountedStep, write_inventory
from costmodel.machines.machine_catalog import load_machine
from costmodel.operators.device_work import Elementwise, Normalization
from costmodel.operators.layers import Conv2d

MACHINE = "rtx-4090"
CONV = Conv2d(64, 64, 56, 56, 64, (3, 3), padding=(1, 1, 1, 1), dtype="float16", channels_last=True)
NORM = Normalization("batch_norm", 64 * 56 * 56, 64, "float16", training=False, channels_last=True)
RELU = Elementwise("relu", 64 * 64 * 56 * 56, dtype="float16")
KINDS = (CONV, NORM, RELU)


def steps_file(folder: Path, slower: float, count: int = 20) -> Path:
    """Steps of mixtures of three kernels, of which convolutions take ``slower`` times what is predicted."""
    one = dict(zip(KINDS, gpu_cost_model(load_machine(MACHINE)).estimate(KINDS), strict=True))
    steps = []
    for place in range(count):
        counts = {CONV: 1 + place, NORM: 1 + place % 3, RELU: 1 + 7 * place % 11}
        seconds = sum(n * one[each].seconds * (slower if each is CONV else 1.0) for each, n in counts.items())
        steps.append(CountedStep(f"step {place}", "toy", counts, seconds))
    return write_inventory(steps, folder / "steps.json.gz")


def test_kernels_that_are_slower_on_the_gpu_become_so_and_others_do_not(tmp_path):
    written = fit_to_steps(steps_file(tmp_path, 1.2), MACHINE, tmp_path, lambda line: None)
    assert written == tmp_path / f"{MACHINE}.json"
    levels = json.loads(written.read_text(encoding="utf-8"))["adaptations"]
    assert levels["convolution-tensor:float16"]["weights"][0] == pytest.approx(0.18, abs=0.03)
    assert abs(levels["elementwise:float16"]["weights"][0]) < 0.05
    before = gpu_cost_model(load_machine(MACHINE)).estimate([CONV])[0]
    after = gpu_cost_model(load_machine(MACHINE), tmp_path).estimate([CONV])[0]
    assert after.source == "fitted" and before.source == "analytic"
    assert after.seconds == pytest.approx(1.2 * before.seconds, rel=0.03)


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
