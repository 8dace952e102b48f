"""What fusing a site gains, read from builds: the table and the picture."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("matplotlib")
from costmodel.base.errors import InputError
from lab.bench.pictures import draw, read_gains, site_gains, table


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
def test_gains_of_a_build(precision, size):
    sites = [site(LAYERS, (2.0, 1.0), (3.0, 2.0)), site(LAYERS, (2.0, 1.0), (3.0, None))]
    (found,) = site_gains({"model": "m", "precision": {"shipped": precision}, "sites": sites})
    assert (found.precision, found.predicted, found.measured) == (precision, 2.0, 1.5)
    assert found.intensity == pytest.approx(INTENSITY / size)
    assert not list(site_gains({"model": "m", "precision": {"shipped": "mixed"}, "sites": sites}))


def test_builds_become_a_table_and_a_picture(tmp_path):
    for name, precision, measured in (("a", {}, (3.0, 2.0)), ("b", {"shipped": "int8"}, (2.0, 3.0))):
        (tmp_path / name).mkdir()
        document = {"model": name, "sites": [site(LAYERS, (2.0, 1.0), measured)], "precision": precision}
        (tmp_path / name / "summary.json").write_text(json.dumps(document))
    found = read_gains([tmp_path / "a", tmp_path / "b"])
    lines = table(found).splitlines()
    assert lines[2] == "| float32 | 0.5 to 1 | 1 | 0 | 2.00 | 1.50 | 100% | 100% |"
    assert lines[-1] == "| int8 | all | 1 | 1 | - | - | 0% | 0% |"  # 1.5 times as slow: given up
    draw(found, tmp_path / "gains.svg")
    assert "</svg>" in (tmp_path / "gains.svg").read_text()
    with pytest.raises(InputError, match=r"c/summary.json: cannot be read"):
        read_gains([tmp_path / "c"])
