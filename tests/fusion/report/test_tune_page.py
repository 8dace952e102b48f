"""The page of a build, from its summary alone."""

from __future__ import annotations

import json
from itertools import combinations
from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from costmodel.machines.machine_records import ComputeRate, Machine, MemoryLevel, ParallelRegion, PerThreads
from costmodel.operators.layers import Conv2d
from costmodel.pages.charts import inline_chart
from fusion.model.conv_graph import FusionPlan, Graph, Group, Node, Other
from fusion.report.pictures import COLUMNS, WIDE, draw_frontier, network_picture, place_layers
from fusion.report.tune_page import page, remove_reports, write_reports
from fusion.tuning.summary import network_record
from tests.web_pages import HOSTILE, OVERLAPS, drawn_page, found_in, read_page


def layer(name: str, *reads: str, kernel: int | None = None, kind: str = "conv") -> dict:
    found = {"name": name, "kind": kind, "told": "3x3/2 -> 8x4x4", "reads": list(reads)}
    return found if kernel is None else {**found, "kernel": kernel}


def kernel(*layers: str, seconds: float | None = 1e-4) -> dict:
    return {"layers": list(layers), "seconds": seconds, "predicted_seconds": 5e-5, "bound": "compute", "flops": 10**7,
            "intensity": 12.0, "dtype": "float32"}  # fmt: skip


def network(names: list[str]) -> dict:
    """A chain of pairs, each pair one kernel, with a residual around the first and an addition of TVM's in the end."""
    layers = [layer(names[0], kernel=0)]
    for number, name in enumerate(names[1:], 1):
        layers.append(layer(name, names[number - 1], kernel=number // 2, kind="depthwise"))
    layers.append(layer("add", names[-1], names[1], kind="relax.add"))
    pairs = [names[place : place + 2] for place in range(0, len(names), 2)]
    return {
        "layers": layers,
        "kernels": [kernel(*pair, seconds=1e-4 * (1 + place)) for place, pair in enumerate(pairs)],
        "ceilings": {"flops": {"float32": 2e11}, "bandwidths": {"L1": 4e11, "L2": 1e11, "DRAM": 2e10}},
    }


def summary(names: list[str] | None = None) -> dict:
    """As ``tune`` writes it, of a made-up network."""
    names = names or [f"block.{number}.conv" for number in range(20)]
    found = network(names)
    sites = [
        {
            "name": f"{one}+{other}",
            "kind": "conv-depthwise",
            "layers": [{"name": one}, {"name": other}],
            "flops": 10**7,
            "unfused_intensity": 6.0,
            "fused_intensity": 12.0,
            "predicted": {
                "unfused_seconds": 2e-4,
                "fused_seconds": 1e-4,
                "bound": "compute",
                "fuse": True,
                "reason": "",
            },
            "measured": {"unfused_seconds": 2e-4, "fused_seconds": 1.5e-4 + 1e-6 * place, "in_network": True},
            "fuse": True,
            "fused_in_model": place < 8,
            "decision": f"fused: {HOSTILE if names[0] == HOSTILE else '1.33 times faster fused'}",
        }
        for place, (one, other) in enumerate(zip(names[::2], names[1::2], strict=True))
    ]
    memory = {"activation_bytes": 3 << 20, "weight_bytes": 14 << 20, "scratch_bytes": 1 << 19, "growth_bytes": 9 << 20}
    return {
        "model": f"/somewhere/{'<b>.onnx' if names[0] == HOSTILE else 'net.onnx'}",
        "inputs": [{"name": "x", "shape": [1, 3, 224, 224], "dtype": "float32"}],
        "latency_seconds": {"tuned": 2e-3, "tuned_without_fusion": 2.2e-3, "onnxruntime": 3e-3, "openvino": 2.5e-3},
        "finals": {"shipped": "fused", "decided": True, "networks": [
            {"name": "fused", "fused_sites": 8, "median_seconds": 2e-3},
            {"name": "unfused", "fused_sites": 0, "median_seconds": 2.2e-3}]},
        "check": {"reference": "ONNX model in FP64", "inputs": ["random"], "worst_share_of_allowed": 0.07,
                  "worst_output": "logits"},
        "sites": sites,
        "precision": {"shipped": "float32"},
        "memory": {"tuned": memory, "tuned_without_fusion": memory, "onnxruntime": dict.fromkeys(memory)},
        "other_operators": [{"name": "add", "operator": "relax.add", "reason": "follows no layer"}],
        "notes": ["a note"],
        "machine": {"name": "toy", "description": "a toy", "mcpu": "toy-cpu", "features": [], "threads": 2},
        "versions": {"python": "3.11"},
        "trials": 332, "failures": 1, "wall_seconds": 118.0, "interrupted": False,
        "stage_seconds": {"read": 3.0, "tuning": 80.0, "final comparison": 20.0},
        "network": found,
        "tuning_curve": [{"elapsed_seconds": 2.0 * place, "trials": 10 * place, "network_seconds": 4e-3 - 1e-4 * place}
                         for place in range(12)],
        "layers": {"engine": "onnxruntime", "rows": [
            {"layers": [names[0]], "ours_seconds": 1e-4, "theirs_seconds": 8e-5, "lost_seconds": 2e-5}],
            "others": {"layers": [], "ours_seconds": 1e-5, "theirs_seconds": None, "lost_seconds": 1e-5}},
    }  # fmt: skip


def test_the_page_tells_the_answer_the_sites_and_the_peers():
    read = read_page(page(summary()))
    for piece in ("net.onnx on toy", "2 ms", "1.25 times as fast as openvino", "8 of 10", "1.33 times faster fused",
                  "332 kernels measured", "ONNX model in FP64", "a note", "Beside onnxruntime"):  # fmt: skip
        assert piece in read.text, piece
    sections = {attributes.get("id") for name, attributes in read.tags if name == "section"}
    assert sections >= {"engines", "network", "roofline", "sites", "layers", "tuning", "memory", "rest"}


def test_long_chains_wrap_and_boxes_never_lie_on_each_other():
    layers = network([f"l{number}" for number in range(40)])["layers"]
    layers += [layer(f"branch{number}", "l3", kind="pointwise") for number in range(3)]
    placed = place_layers(layers)
    assert len(placed) == len(layers) and max(each.column for each in placed.values()) == COLUMNS - 1
    assert max(each.band for each in placed.values()) >= 40 // COLUMNS
    for one, other in combinations(placed.values(), 2):
        assert abs(one.left - other.left) >= WIDE or abs(one.top - other.top) >= 50
    order = {each["name"]: (placed[each["name"]].band, placed[each["name"]].column) for each in layers}
    for each in layers:
        assert all(order[source] < order[each["name"]] for source in each["reads"])


def test_every_fused_kernel_is_a_block_behind_its_layers():
    found = network([f"l{number}" for number in range(20)])
    read = read_page(page({**summary(), "network": found}))
    assert read.count("g", class_="fused") == 10
    block = network_picture(found, {})["blocks"][0]
    first = place_layers(found["layers"])["l0"]
    assert block["areas"][0][:2] == (first.left - 9, first.top - 9) and "l0 + l1" in block["tip"]


def test_the_roofline_has_each_measured_site_before_and_after():
    read = read_page(page(summary()))
    tips = [text for text in read.texts if text.startswith(("before: ", "after: "))]
    assert len(tips) == 2 * 10 and any("block.0.conv" in tip or "0.conv" in tip or "0" in tip for tip in tips)
    assert "DRAM 20 GB/s" in read.text and "float32 200 GFLOP/s" in read.text


def test_the_frontier_has_every_candidate():
    def point(layers: int, error: float, micros: float, chosen: bool = False, measured: bool = True) -> dict:
        times = {"predicted_seconds": 0.9e-6 * micros, "measured_seconds": 1e-6 * micros if measured else None}
        return {"layers": layers, "error": error, "chosen": chosen, **times,
                "raced_seconds": 1.1e-6 * micros if chosen else None}  # fmt: skip

    points = [point(0, 0.0, 900), point(20, 0.004, 700, chosen=True), point(50, 0.03, 500, measured=False)]
    precision = {"choice": {"frontier": points}, "max_error": 0.01, "layers": 50}
    chart = inline_chart("frontier", lambda axes: draw_frontier(axes, precision))
    assert all(f">{text}</text>" in chart for text in ("0", "20", "50", "chosen", "allowed error"))


def test_a_build_that_was_not_timed_says_so():
    built = summary()
    built["latency_seconds"] = dict.fromkeys(built["latency_seconds"])
    read = read_page(page(built))
    assert "not timed on this machine" in read.text and "times as fast" not in read.text


def test_pages_are_written_beside_their_summaries_and_taken_away(tmp_path: Path):
    (tmp_path / "1x3").mkdir()
    (tmp_path / "summary.json").write_text(
        json.dumps({"model": "m.onnx", "profiles": [{"folder": "1x3", **summary()}]})
    )
    written = write_reports(tmp_path)
    assert {path.relative_to(tmp_path).as_posix() for path in written} == {"report.html", "1x3/report.html"}
    assert 'href="1x3/report.html"' in (tmp_path / "report.html").read_text()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "report.html").write_text("somebody else's")
    remove_reports(tmp_path)
    assert list(tmp_path.rglob("report.html")) == [tmp_path / "mine" / "report.html"]


@pytest.mark.parametrize("content", [None, "{", '{"a": 1}'])
def test_what_is_no_summary_is_named(tmp_path: Path, content: str | None):
    if content is not None:
        (tmp_path / "summary.json").write_text(content)
    with pytest.raises(InputError, match=r"summary\.json: .*tune"):
        write_reports(tmp_path)


def test_the_record_follows_variables_that_no_layer_owns():
    """conv a -> a view that nobody owns -> conv b; both read by an addition that TVM compiles."""
    conv = Conv2d(1, 16, 8, 8, 16, (1, 1))
    a, b = (Node(name, conv, "x", None, (), name, (name,)) for name in "ab")  # type: ignore[arg-type]
    readers = {"a": ("view", "sum"), "view": ("b",), "b": ("sum",)}
    graph = Graph((a, b), (Other("sum", "relax.add", "sum"),), {}, readers)  # type: ignore[arg-type]
    plan = FusionPlan((Group((a,), conv), Group((b,), conv)))
    rates = {"compute": {"float32": ComputeRate(PerThreads(((1, 100.0),)), "toy")}}
    level = MemoryLevel("DRAM", 1e12, True, PerThreads(((1, 10.0),)), "toy")
    machine = Machine(
        "toy", "cpu", "toy", memory=(level,), parallel_region=ParallelRegion(PerThreads(((1, 0.0),)), "toy"), **rates
    )
    found = network_record(graph, plan, {conv: 2e-5}, machine, 1)
    assert [(each["name"], each["reads"]) for each in found["layers"]] == [("a", []), ("b", ["a"]), ("sum", ["a", "b"])]
    assert found["layers"][0]["kernel"] == 0 and "kernel" not in found["layers"][2]
    assert found["kernels"][0]["seconds"] == 2e-5 and found["kernels"][0]["flops"] == conv.flops
    assert found["ceilings"]["flops"] == {"float32": machine.peak_flops("float32", 1)}
    assert found["layers"][0]["kind"] == "pointwise" and found["layers"][0]["told"] == "1x1 -> 16x8x8"


def test_the_page_draws_in_a_browser(tmp_path: Path):
    (tmp_path / "summary.json").write_text(json.dumps(summary()))
    (path,) = write_reports(tmp_path)
    code = f"""(() => {{
      const network = document.querySelector("svg.network").getBoundingClientRect();
      const whole = document.documentElement;
      return [{OVERLAPS}("#roofline svg text"), network.width, network.height, whole.scrollWidth - whole.clientWidth];
    }})()"""
    (labels, overlaps), width, height, sideways = found_in(path, code)
    assert labels >= 15 and overlaps == 0 and width > 900 and height > 150 and sideways <= 1
    image = pytest.importorskip("matplotlib.image")
    drawn_page(path, tmp_path / "page.png")
    pixels = image.imread(tmp_path / "page.png")[..., :3]
    assert 0.08 < float((abs(pixels - pixels[2, 2]).max(axis=2) > 0.05).mean()) < 0.7
