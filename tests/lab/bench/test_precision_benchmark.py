"""The benchmark of precisions: its arithmetic on made-up rows, its pictures, and what it says without a build."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from costmodel.base.errors import InputError
from fusion.model.named_arrays import DeclaredInput, read_calibration
from lab.bench import precision


def row(engine: str, ratio: float, error: float) -> dict[str, object]:
    """Of an engine that takes ``ratio`` times the 2 ms of ours in FP32."""
    seconds = 2e-3 * ratio
    errors = {"max_relative_error": error, "mean_relative_error": error / 8, "cosine": 0.5, "top1_agreement": 1.0}
    return dict(engine=engine, mode="mode", median_seconds=seconds, min_seconds=seconds, ratio_to_tuned=ratio, **errors)


def document(*rows: dict[str, object]) -> dict[str, object]:
    return {"rows": [row("tuned", 1.0, 1e-6), *rows], "not_measured": [], "absent": {}}


def test_ratios_of_a_precision_are_to_ours_in_that_precision():
    ours = row("ours, bfloat16", 0.5, 0.01)
    apart, peer, other = (
        row("ours, bfloat16, fusion off", 0.6, 0.01), row("openvino-bf16", 0.75, 0.02), row("torch-bf16", 2.0, 0.04),
    )  # fmt: skip
    second = document(row("ours, bfloat16", 1.0, 0.01), row("openvino-bf16", 6.0, 0.5))
    lines = precision.overview({"a": document(ours, apart, peer, other), "b": second}, "bfloat16").splitlines()
    assert lines[2] == "| a | 1.00 | 2.00 | 1.20 | 1.50 | 4.00 | 1.50 | 1.0e-02 | 2.0e-02 | 4.0e-02 |"
    assert lines[3] == "| b | 2.00 | 2.00 | - | 6.00 | - | 6.00 | 1.0e-02 | 5.0e-01 | - |"
    # Geometric means: twice and once as long in FP32; 1.5 and 6.
    assert lines[4] == "| geometric mean |  | 1.41 times | 1.20 | 3.00 | 4.00 | 3.00 |  |  |  |"
    assert len({line.count("|") for line in lines}) == 1


def test_a_network_without_our_build_has_a_line_all_the_same():
    lines = precision.overview({"a": document(row("openvino-bf16", 0.5, 0.1))}, "bfloat16").splitlines()
    assert lines[2].startswith("| a | - |")
    absent = {**document(), "absent": {"ours, int8": "not built"}}
    assert "| ours, int8 | not built |" in precision.table("a", absent)


def test_pictures_fit_the_inputs_and_differ(tmp_path):
    inputs = [DeclaredInput("x", (2, 3, 8, 8), "float32")]
    data = read_calibration(precision.calibration_file(tmp_path / "net.onnx", inputs, {}), inputs)
    assert data.calls == precision.PICTURES
    assert not np.array_equal(data.call(0)["x"], data.call(1)["x"])
    normalised, picture, random = data.arrays["x"][:3]
    assert abs(normalised.mean()) < 1e-5 and abs(normalised.std() - 1) < 1e-5
    assert picture.min() >= 0 and picture.max() <= 1
    assert random.min() < -1.5 and random.max() > 1.5


def test_without_a_precision_in_tune_ours_is_left_out_with_a_clear_line(tmp_path, monkeypatch, capsys):
    setting = precision.Setting("net", tmp_path / "net.onnx", {}, 1, 1)
    monkeypatch.setattr(precision.fusion, "tune", lambda model, output: None)
    with pytest.raises(InputError, match="takes no precision: nothing of ours computes in bfloat16"):
        precision.tuned(setting, "bfloat16", setting.model, tmp_path / "build", 0.0)
    (tmp_path / f"{setting.title}-float32").mkdir()
    (tmp_path / f"{setting.title}-float32" / "manifest.json").write_text("{}")
    arguments = argparse.Namespace(
        precisions=("float32", "bfloat16"), output=tmp_path, built=True, minutes=0.0, per_tensor=False
    )
    found, absent = precision.builds(setting, arguments)
    assert list(found) == ["float32"] and absent["ours, bfloat16"].endswith("-bfloat16: not built")
    assert "ours, bfloat16: " in capsys.readouterr().out
