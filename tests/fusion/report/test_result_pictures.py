"""Pictures of frontiers and rooflines: drawn from records, with every point in them."""

from __future__ import annotations

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tvm")
import fusion
from costmodel.base.errors import InputError
from costmodel.machines.machine_file import write_machine
from fusion.report.pictures import FRONTIER, draw_frontiers
from tests.fusion.commands.test_cli import toy_machine, write_model


def point(layers: int, error: float, micros: float, chosen: bool = False, measured: bool = True) -> dict:
    return {
        "layers": layers,
        "error": error,
        "chosen": chosen,
        "predicted_seconds": 0.9e-6 * micros,
        "measured_seconds": 1e-6 * micros if measured else None,
        "raced_seconds": 1.1e-6 * micros if chosen else None,
    }


def test_a_frontier_is_drawn_beside_its_build_and_an_old_one_taken_away(tmp_path):
    points = [point(0, 0.0, 900), point(20, 0.004, 700, chosen=True), point(50, 0.03, 500, measured=False)]
    precision = {"choice": {"frontier": points}, "max_error": 0.01, "layers": 50}
    draw_frontiers({tmp_path: {"precision": precision}})
    drawn = (tmp_path / FRONTIER).read_text()
    assert drawn.count("</svg>") == 1 and len(drawn) < 150_000
    draw_frontiers({tmp_path: {"precision": {"shipped": "float32"}}})
    assert not (tmp_path / FRONTIER).exists()


def test_an_analysis_draws_the_roofline(tmp_path):
    write_model(tmp_path / "model.onnx")
    write_machine(toy_machine(), tmp_path / "toy.yaml")
    picture = tmp_path / "roofline.svg"
    words = {"machine": tmp_path / "toy.yaml", "threads": 1}
    found = fusion.analyze(tmp_path / "model.onnx", picture=picture, **words)
    assert found == fusion.analyze(tmp_path / "model.onnx", **words) and "</svg>" in picture.read_text()
    with pytest.raises(InputError, match=r"model.gif: a plot is one of"):
        fusion.analyze(tmp_path / "none.onnx", picture=tmp_path / "model.gif", **words)
