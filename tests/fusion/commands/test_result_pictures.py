"""Pictures of frontiers, rooflines and gains: drawn from records, with every point in them."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")
pytest.importorskip("tvm")
import fusion
from costmodel.base.errors import InputError
from costmodel.machines.machine_file import write_machine
from fusion.commands.result_pictures import FRONTIER, draw_frontiers
from tests.fusion.commands.test_cli import toy_machine, write_model

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


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


@pytest.fixture(scope="module")
def gains():
    """The module of the benchmark."""
    spec = importlib.util.spec_from_file_location("fusion_gains", BENCHMARKS / "fusion_gains.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["fusion_gains"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["fusion_gains"]


def layer(kind: str, channels: int, out: int, size: int, kernel: int, stride: int = 1) -> dict:
    return {
        "kind": kind,
        "kernel": [kernel, kernel],
        "stride": [stride, stride],
        "input_shape": [1, channels, size, size],
        "output_shape": [1, out, -(-size // stride), -(-size // stride)],
    }


def site(layers: list, predicted: tuple, measured: tuple) -> dict:
    names = ("unfused_seconds", "fused_seconds")
    times = {"predicted": dict(zip(names, predicted)), "measured": dict(zip(names, measured))}  # noqa: B905
    return {"kind": "depthwise-pointwise", "layers": layers, **times}


LAYERS = [layer("depthwise", 8, 8, 10, 3, 2), layer("pointwise", 8, 4, 5, 1)]
# Multiply-adds: 9 taps of 8 x 5 x 5, 8 channels of 4 x 5 x 5. Values: 800 + 72 + 200, 200 + 32 + 100.
INTENSITY = 2 * (9 * 200 + 8 * 100) / (1072 + 332)


@pytest.mark.parametrize(("precision", "size"), [("float32", 4), ("bfloat16", 2), ("int8", 1)])
def test_gains_of_a_build(gains, precision, size):
    sites = [site(LAYERS, (2.0, 1.0), (3.0, 2.0)), site(LAYERS, (2.0, 1.0), (3.0, None))]
    (found,) = gains.site_gains({"model": "m", "precision": {"shipped": precision}, "sites": sites})
    assert (found.precision, found.predicted, found.measured) == (precision, 2.0, 1.5)
    assert found.intensity == pytest.approx(INTENSITY / size)
    assert not list(gains.site_gains({"model": "m", "precision": {"shipped": "mixed"}, "sites": sites}))


def test_builds_become_a_table_and_a_picture(gains, tmp_path):
    for name, precision, measured in (("a", {}, (3.0, 2.0)), ("b", {"shipped": "int8"}, (2.0, 3.0))):
        (tmp_path / name).mkdir()
        document = {"model": name, "sites": [site(LAYERS, (2.0, 1.0), measured)], "precision": precision}
        (tmp_path / name / "summary.json").write_text(json.dumps(document))
    found = gains.read_gains([tmp_path / "a", tmp_path / "b"])
    lines = gains.table(found).splitlines()
    assert lines[2] == "| float32 | 0.5 to 1 | 1 | 0 | 2.00 | 1.50 | 100% | 100% |"
    assert lines[-1] == "| int8 | all | 1 | 1 | - | - | 0% | 0% |"  # 1.5 times as slow: given up
    gains.draw(found, tmp_path / "gains.svg")
    assert "</svg>" in (tmp_path / "gains.svg").read_text()
    with pytest.raises(InputError, match=r"c/summary.json: cannot be read"):
        gains.read_gains([tmp_path / "c"])
