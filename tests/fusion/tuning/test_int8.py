"""``tune --precision int8``: a float model quantised on the way, within an error budget or not at all."""

# ruff: noqa: E402

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import numpy_helper

tvm = pytest.importorskip("tvm")
import fusion
from costmodel.base.errors import InputError
from costmodel.machines.machine_file import write_machine
from fusion.comparing.compare import compare_command
from fusion.comparing.timing import Sampling
from fusion.model.conv_graph import INT8
from fusion.report.console_report import precision_lines
from schedules.contract.cpu_target import host_target
from tests.fusion.commands.test_cli import toy_machine
from tests.fusion.quantised_models import INPUT, float_network

CPU = host_target(1)
pytestmark = pytest.mark.usefixtures("short_rounds")
needs_bytes = pytest.mark.skipif(CPU.lacks(INT8) is not None, reason=f"{CPU.lacks(INT8)}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds a float model whose 3x3 ``window`` is delicate, samples, and a machine eight times as fast in bytes."""
    path = tmp_path_factory.mktemp("int8")
    model = float_network()
    weights = next(each for each in model.graph.initializer if each.name == "window.w")
    array = numpy_helper.to_array(weights).copy()
    array[:, 0] *= 300.0  # one input channel decides what the others are rounded to
    model.graph.initializer.remove(weights)
    model.graph.initializer.append(numpy_helper.from_array(array, "window.w"))
    onnx.save(model, path / "model.onnx")
    samples = np.random.default_rng(3).standard_normal((15, *INPUT[1:])).astype(np.float32)
    np.savez(path / "x.npz", x=samples)
    toy = toy_machine()
    rate = toy.compute["float32"].sustained
    faster = type(rate)(tuple((threads, 8 * value) for threads, value in rate.points))
    compute = {**toy.compute, INT8: replace(toy.compute["float32"], sustained=faster)}
    write_machine(replace(toy, compute=compute), path / "toy.yaml")
    return path


def tuned(folder: Path, build: Path, **options):
    options = {"calibration": folder / "x.npz", "trials": 1, "threads": 1, "machine": folder / "toy.yaml", **options}
    return fusion.tune(folder / "model.onnx", build, precision="int8", **options)


@pytest.fixture(scope="module")
def whole(folder):
    """The summary of a build whose error nobody limits."""
    return tuned(folder, folder / "build", minutes=0)


@needs_bytes
def test_all_layers_are_quantised_where_nobody_limits_the_error(folder, whole):
    record, build = whole.record, folder / "build"
    found = record["precision"]
    assert (found["asked"], found["shipped"], found["choice"]) == ("int8", "int8", None)
    assert found["int8_layers"] >= 6 and found["float_model"] == str(folder / "model.onnx")
    assert record["model"] == str(build / "model-int8.onnx")
    # The errors are those of the build against the float model, on samples that were not calibrated with.
    with np.load(folder / "x.npz") as samples:
        x = samples["x"][4:5]
    assert found["inputs"] == ["x.npz 5", "x.npz 10", "x.npz 15"]
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"), providers=["CPUExecutionProvider"])
    exact = session.run(None, {"x": x})[0]
    ours = fusion.load(build)(x)
    own = float(np.abs(ours - exact).max() / np.abs(exact).max())
    assert 0 < own <= found["errors"]["max_relative_error"] * 1.001
    assert precision_lines(found)[0].startswith(f"precision: {found['int8_layers']} of {found['layers']} layers stored")
    assert json.loads((build / "manifest.json").read_text())["precision"] == "int8"


@needs_bytes
@pytest.mark.thorough
def test_engines_of_int8_run_the_file_of_the_build(folder, tmp_path, whole):
    """By itself; beside a build of the float model; beside that model; and where the build has moved."""
    build, quick = tmp_path / "moved", Sampling(rounds=2, seconds=0.01, calls=2, warmup=1)
    (folder / "build").rename(build)
    try:
        check_engines(folder, tmp_path, build, quick)
    finally:
        build.rename(folder / "build")


def check_engines(folder, tmp_path, build, quick):
    own = build / "model-int8.onnx"
    with pytest.raises(InputError, match="is not the model that .* was built from"):
        compare_command(build, [], model=build / "model.so", sampling=quick)
    alone = compare_command(build, ["onnxruntime-int8"], sampling=quick)
    assert not alone.not_measured and alone.model == str(own)
    of_float = compare_command(build, ["onnxruntime-int8", "onnxruntime"], model=folder / "model.onnx", sampling=quick)
    assert not of_float.not_measured and of_float.model == str(folder / "model.onnx")
    tuned_row, integers, floats = of_float.rows
    assert floats.max_relative_error == 0.0 < integers.max_relative_error < 0.2
    assert 0.0 < tuned_row.max_relative_error < 0.2
    fusion.tune(folder / "model.onnx", tmp_path / "float", minutes=0, threads=1, machine=folder / "toy.yaml")
    both = compare_command(tmp_path / "float", ["onnxruntime-int8"], beside={"ours, int8": build}, sampling=quick)
    assert not both.not_measured and [row.engine for row in both.rows] == ["tuned", "ours, int8", "onnxruntime-int8"]


@needs_bytes
@pytest.mark.thorough
def test_within_a_budget_delicate_layers_stay_in_float32(folder, tmp_path, whole):
    limit = 0.6 * whole.record["precision"]["quantised_errors"]["max_relative_error"]
    found = tuned(folder, tmp_path / "build", max_error=limit).record["precision"]
    choice = found["choice"]
    assert 0 < found["errors"]["max_relative_error"] <= limit
    assert choice["float32_layers"] and found["shipped"] == "mixed"
    assert 0 < found["quantised_nodes"] < 6
    sensitivity = choice["sensitivity"]
    assert max(sensitivity, key=sensitivity.get) in choice["float32_layers"]
    points = choice["frontier"]
    assert points[0]["layers"] == 0 and points[0]["error"] == 0.0 and sum(point["chosen"] for point in points) == 1
    assert points[-1]["error"] > limit and points[-1]["predicted_seconds"] < points[0]["predicted_seconds"]
    (chosen,) = (point for point in points if point["chosen"])
    assert chosen["raced_seconds"] > 0 and chosen["error"] <= limit and chosen["cosine"] > 0.9


@needs_bytes
def test_a_budget_that_bytes_cannot_keep_is_refused_and_nothing_is_left(folder, tmp_path):
    with pytest.raises(
        InputError, match="--max-error 1e-07: quantised to 8 bits, .* with the least delicate layer alone"
    ):
        tuned(folder, tmp_path / "build", max_error=1e-7)
    assert not (tmp_path / "build").exists()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"calibration": None}, "--precision int8: quantising needs samples"),
        ({"calibration": "none.npz"}, "--calibration none.npz: no such file"),
    ],
)
def test_int8_needs_samples(folder, tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        tuned(folder, tmp_path / "build", **options)
    assert not (tmp_path / "build").exists()


@pytest.mark.thorough
def test_for_another_cpu_it_is_quantised_here(folder, tmp_path, monkeypatch):
    monkeypatch.setattr("fusion.analysis.target_machine.cpu_flags", frozenset)
    record = tuned(folder, tmp_path / "build", threads=None, target="llvm -mcpu=cascadelake -num-cores 2").record
    found = record["precision"]
    assert found["shipped"] == "int8" and found["quantised_errors"]["max_relative_error"] > 0
    assert found["errors"]["max_relative_error"] is None  # nothing ran
    with pytest.raises(InputError, match="--precision int8: int8 needs a CPU with avx512_vnni"):
        tuned(folder, tmp_path / "old", threads=None, target="llvm -mcpu=haswell -num-cores 2")
