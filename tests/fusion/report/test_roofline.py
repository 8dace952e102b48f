"""The roofline of an analysis, as a picture."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tvm")
import fusion
from costmodel.base.errors import InputError
from costmodel.machines.machine_file import write_machine
from tests.fusion.commands.test_cli import toy_machine, write_model


def test_an_analysis_draws_the_roofline(tmp_path):
    write_model(tmp_path / "model.onnx")
    write_machine(toy_machine(), tmp_path / "toy.yaml")
    picture = tmp_path / "roofline.svg"
    words = {"machine": tmp_path / "toy.yaml", "threads": 1}
    found = fusion.analyze(tmp_path / "model.onnx", picture=picture, **words)
    assert found == fusion.analyze(tmp_path / "model.onnx", **words) and "</svg>" in picture.read_text()
    with pytest.raises(InputError, match=r"model.gif: a plot is one of"):
        fusion.analyze(tmp_path / "none.onnx", picture=tmp_path / "model.gif", **words)
