"""The section of image models: what it reads, what it takes, and what it says where timm is absent."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from costmodel.base.errors import InputError
from lab.data.timm_steps import TimmStep, read_timm, timm_files
from lab.steps import image_steps as vision_cases
from lab.steps.image_steps import PUBLISHED, PublishedStep, drawn, fitted_on, is_held_out
from lab.validate.models import VisionResult, VisionSection, vision_section

NAME = "benchmark-train-amp-nhwc-pt112-cu113-rtx3090.csv"
ROWS = "model,train_step_time,train_batch_size,train_img_size\nresnet50.a1,400,256,224\nresnet50.b2,410,256,224\n"


def write(folder: Path, name: str = NAME, rows: str = ROWS) -> Path:
    (folder / "timm").mkdir(exist_ok=True)
    file = folder / "timm" / name
    file.write_text(rows, encoding="utf-8")
    return file


def test_a_row_says_what_ran_where(tmp_path):
    write(tmp_path)
    write(tmp_path, "notes.csv", "anything")
    (file,) = timm_files(tmp_path)
    (step,) = read_timm(file)  # weights of another training are no other step
    assert step == TimmStep("resnet50.a1", "rtx-3090", True, True, False, 112, 256, 224, 0.4)
    assert step.name == "rtx-3090/train-nhwc-pt112/resnet50.a1-256-224"


def steps(family: str, count: int, machine: str = "rtx-3090", compiled: bool = False) -> list[TimmStep]:
    return [TimmStep(f"{family}_{n}", machine, False, False, compiled, 240, 8, 224, 1.0 + n) for n in range(count)]


@pytest.fixture
def families(monkeypatch):
    monkeypatch.setattr(vision_cases, "family_of", lambda model: model.partition("_")[0])


def test_the_other_card_and_compiled_steps_are_held_out(families):
    family = next(name for name in "abcdefgh" if not is_held_out(name))
    other = next(name for name in "abcdefgh" if is_held_out(name))
    assert fitted_on(steps(family, 1)[0])
    assert not fitted_on(steps(other, 1)[0])
    assert not fitted_on(steps(family, 1, "rtx-4090")[0])
    assert not fitted_on(steps(family, 1, compiled=True)[0])


def result(step: TimmStep | PublishedStep, error: float, held_out: bool) -> VisionResult:
    seconds = step.seconds * (1 + error)
    return VisionResult(step, "toy", held_out, seconds, (0.9 * seconds, 1.1 * seconds), error, {"fitted": 1.0})


def test_held_out_steps_have_figures_of_their_own(capsys):
    some = steps("a", 3)
    found = [result(some[0], 0.1, False), result(some[1], -0.2, True), result(some[2], 0.0, True)]
    section = VisionSection([*found, result(PUBLISHED[0], 0.3, True)], {"b": "no"})
    figures = {(name, kind): each for name, kind, each in section.figures()}
    assert figures["all of timm, eager", "held out"].mape == pytest.approx(0.1)
    assert figures["all of timm, eager", "fitted on"].bias == pytest.approx(0.1)
    assert figures["all of nvidia, eager", "held out"].count == 1
    record = json.loads(json.dumps(section.record()))
    assert record["left_out"] == {"b": "no"} and len(record["cases"]) == 4
    section.render()
    assert "left out: b: no" in capsys.readouterr().out


def test_without_timm_it_says_what_it_needs_and_predicts_its_own_models(monkeypatch, capsys):
    from e2e.capture.models import image_models

    def absent():
        raise InputError("timm is not installed; pip install --no-deps timm")

    monkeypatch.setattr(image_models, "timm_library", absent)
    section = vision_section(Path("nowhere"), "train-nhwc-amp-nvidia")
    assert section is not None and {each.step.model for each in section.results} == {"resnet-50"}
    section.render()
    assert "pip install --no-deps timm" in capsys.readouterr().out


def test_a_draw_takes_held_out_steps_of_different_models(families):
    out = [name for name in "abcdefgh" if is_held_out(name)]
    some = [*steps(out[0], 30), *steps(out[0], 30, compiled=True), *steps("abcdefgh"[0], 5, "rtx-4090")]
    found = drawn(some, 10, seed=3)
    assert len({step.architecture for step in found}) == 10 and not any(fitted_on(step) for step in found)
    assert {step.compiled for step in found} == {True, False}
    assert found == drawn(some, 10, seed=3) != drawn(some, 10, seed=4)
    assert {step.machine for step in drawn(some, 3, "rtx-4090")} == {"rtx-4090"}


def test_unfused_attention_computes_in_the_type_of_its_operands_before_pytorch_2_5():
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed
    before = allowed()
    for version, narrow in ((240, True), (291, False)):
        with vision_cases._unfused_attention_of(version):
            assert allowed() is narrow
    assert allowed() is before
