"""Whole steps inverted: factors that are known, found again."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from costmodel.gpu.factory import gpu_cost_model
from costmodel.gpu.families.convolution import TensorConvolution
from costmodel.gpu.families.family import InvertedShares
from costmodel.gpu.families.normalization import ImageKernels
from costmodel.gpu.own_gpu import CountedStep, write_inventory
from costmodel.machines.machine_file import load_machine
from costmodel.operators.device_work import Elementwise, Normalization
from costmodel.operators.layers import Conv2d
from lab.data.timm_steps import read_timm
from lab.fit.image_steps import OTHER, StepTable, class_seconds, fit_steps, invert, left_out_spread

CLASSES = ("pointwise forward nchw", "pointwise forward nhwc", "spatial forward nhwc", f"{OTHER}element-wise")
TRUE = np.array([1.6, 1.3, 0.8, 1.0])
CONV = Conv2d(64, 64, 28, 28, 64, (1, 1), dtype="float16", channels_last=True)
NORM = Normalization("batch_norm", 64 * 28 * 28, 64, "float16", training=False, channels_last=True)
RELU = Elementwise("relu", 64 * 64 * 28 * 28, dtype="float16")


def made_steps(noise: float = 0.0) -> StepTable:
    random = np.random.default_rng(3)
    seconds = random.uniform(0.0, 1.0, (80, 4))
    measured = seconds @ TRUE * np.exp(noise * random.standard_normal(80))
    return StepTable(CLASSES, seconds, measured, np.array([f"family {place % 8}" for place in range(80)]))


def test_known_factors_are_found_again():
    logs = invert(made_steps())
    assert np.exp([logs[name] for name in CLASSES]) == pytest.approx(TRUE, rel=0.03)


def test_a_class_without_steps_takes_what_its_other_layout_shows():
    table = made_steps()
    seen = replace(table, seconds=table.seconds * np.array([0.0, 1.0, 1.0, 1.0]))
    seen = replace(seen, measured=seen.seconds @ TRUE)
    logs = invert(seen)
    assert 0 < logs["pointwise forward nchw"] < logs["pointwise forward nhwc"]


def test_the_spread_is_that_of_families_left_out():
    assert left_out_spread(made_steps()) < 0.02
    assert 0.1 < left_out_spread(made_steps(noise=0.15)) < 0.3  # 80 % of a normal distribution: 1.28 sigma, 0.19


def test_classes_add_up_to_what_the_models_say():
    machine = load_machine("a100-sxm-80gb")
    model = gpu_cost_model(machine)
    found = class_seconds({CONV: 3, NORM: 2, RELU: 1}, (machine, model))
    one = InvertedShares({}, 0.0, {})
    convolution, norm = TensorConvolution(one).analyse([CONV], machine), ImageKernels(one).analyse([NORM], machine)
    relu = model.estimate([RELU])[0].seconds
    assert sum(found.values()) == pytest.approx(3 * convolution.seconds[0] + 2 * norm.seconds[0] + relu)
    assert set(found) == {
        "pointwise forward nhwc",
        "batch-norm forward evaluation nhwc",
        f"{OTHER}launch",
        f"{OTHER}element-wise",
    }


def test_a_fit_writes_factors_and_names_its_files(tmp_path):
    folder = tmp_path / "timm"
    folder.mkdir()
    file = folder / "benchmark-infer-amp-nhwc-pt240-cu124-rtx3090.csv"
    rows = "model,infer_step_time,infer_batch_size,infer_img_size\n" + "".join(
        f"toy_{place},{2 + place},64,28\n" for place in range(6)
    )
    file.write_text(rows, encoding="utf-8")
    names = [step.name for step in read_timm(file)]
    steps = [
        CountedStep(name, f"f{place % 3}", {CONV: place + 1, NORM: 2, RELU: 5}) for place, name in enumerate(names)
    ]
    inventory = write_inventory(steps, tmp_path / "steps.json.gz")
    (written,) = fit_steps(tmp_path, tmp_path / "out" / "shares.json", inventory=inventory)
    record = json.loads(written.read_text(encoding="utf-8"))
    assert set(record["factors"]) == {"pointwise forward nhwc", "batch-norm forward evaluation nhwc"}
    assert record["provenance"]["tables"]["timm/" + file.name]["rows"] == 6
    assert fit_steps(tmp_path / "nothing", tmp_path / "no.json", inventory=inventory) == []
