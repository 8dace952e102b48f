"""``--precision`` on a small ONNX file: refusals before any work, builds whose inputs and outputs stay in float32."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tvm  # noqa: F401  # whole, before a command in this process loads its runtime alone
from typer.testing import CliRunner

from costmodel.base.errors import InputError
from costmodel.machines.machine_file import write_machine
from costmodel.machines.machine_records import ComputeRate
from fusion.analysis.analyzer import analyze_in, outlooks, read_graph
from fusion.commands.cli import app
from fusion.model.conv_graph import BFLOAT16, INT8
from fusion.relax.extract import extract_graph
from fusion.relax.onnx.importer import import_onnx
from fusion.report.console_report import precision_lines
from fusion.tuning.network import TuneRequest
from schedules.contract.cpu_target import CpuTarget, host_target
from tests.fusion.commands.test_cli import fusion, toy_machine, tune_words, write_model
from tests.fusion.quantised_models import quantised

CPU = host_target(1)
pytestmark = pytest.mark.usefixtures("short_rounds")
needs_bfloat16 = pytest.mark.skipif(CPU.lacks(BFLOAT16) is not None, reason=f"{CPU.lacks(BFLOAT16)}")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds ``model.onnx`` and ``toy.yaml``, a machine with rates for float32 and, eight times as high, bfloat16 and
    int8.
    """
    path = tmp_path_factory.mktemp("precision")
    write_model(path / "model.onnx")
    machine = toy_machine()
    rate = machine.compute["float32"].sustained
    faster = type(rate)(tuple((threads, 8 * value) for threads, value in rate.points))
    compute = {**machine.compute, **dict.fromkeys((BFLOAT16, INT8), ComputeRate(faster, "invented for this test"))}
    write_machine(replace(machine, compute=compute), path / "toy.yaml")
    return path


def refused(*words: object) -> str:
    """The one line with which the options are refused."""
    done = CliRunner().invoke(app, [*map(str, words)])
    assert done.exit_code == 2 and done.stdout == "", done.output
    (line,) = done.stderr.strip().splitlines()
    return line.removeprefix("error: ")


def test_a_cpu_without_the_instructions_refuses_before_it_reads_anything(folder, monkeypatch):
    monkeypatch.setattr(CpuTarget, "lacks", lambda self, dtype: "no CPU has it")
    words = ["tune", folder / "missing.onnx", "-o", folder / "none", "--precision", "bfloat16"]
    assert refused(*words) == "--precision bfloat16: no CPU has it; choose --precision float32"
    assert not (folder / "none").exists()


def test_auto_goes_on_in_float32_where_there_is_nothing_else(monkeypatch):
    monkeypatch.setattr(CpuTarget, "lacks", lambda self, dtype: "no CPU has it")
    said: list[str] = []
    request = TuneRequest(Path("m.onnx"), Path("b"), precision="auto", max_error=0.1)
    request.require_valid()
    assert request.on_cpu(CPU, said.append) == TuneRequest(Path("m.onnx"), Path("b"))
    assert said == ["all layers stay in float32: no CPU has it"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--precision", "float8"], "--precision float8: choose one of float32, bfloat16, int8, auto"),
        (["--max-error", "0.1"], "--max-error 0.1: says how far a shorter type may err"),
        (["--calibration", "x.npz"], "--calibration x.npz: says how far a shorter type may err"),
        (["--precision", "auto", "--max-error", "0"], "--max-error 0: must be above 0"),
        (["--precision", "auto", "--max-error", "nan"], "--max-error nan: give a finite number"),
        (["--precision", "auto", "--calibration", "x.npz"], "--calibration x.npz: no such file"),
        (
            ["--precision", "auto", "--calibration", "/dev/zero"],
            "--calibration /dev/zero: cannot be read (it is a pipe or a device, not a file)",
        ),
        (["--precision", "int8", "--calibration", "/dev"], "--calibration /dev: cannot be read (it is a folder)"),
    ],
)
def test_options_that_do_not_fit_are_refused_in_one_line(folder, options, message):
    line = refused("tune", folder / "model.onnx", "-o", folder / "none", *options)
    assert line.startswith(message) and not (folder / "none").exists()


def test_analyze_takes_one_precision(folder):
    assert refused("analyze", folder / "model.onnx", "--precision", "auto").startswith("--precision auto: choose")


@pytest.mark.skipif(CPU.lacks(INT8) is not None, reason=f"{CPU.lacks(INT8)}")
def test_a_quantised_model_has_its_precision_from_its_file(folder, tmp_path, monkeypatch):
    """Another one is refused before anything is built, and an analysis names it."""
    monkeypatch.setattr(CpuTarget, "lacks", lambda self, dtype: None)
    file = quantised(tmp_path / "q.onnx", per_channel=True)
    for precision in ("bfloat16", "auto"):
        words = ["tune", file, "-o", tmp_path / "b", "--precision", precision, "--threads", 1]
        done = CliRunner().invoke(app, [*map(str, words), "--machine", str(folder / "toy.yaml")])
        message = f"error: --precision {precision}: the model is quantised, 7 of its 7 layers are computed in whole"
        assert done.exit_code == 2 and message in done.stderr
    assert not (tmp_path / "b").exists()
    found = analyze_in("float32", *read_graph(file, {}, str(folder / "toy.yaml"), 1, lambda _: None))
    assert found.precision == INT8 and not found.precisions


@needs_bfloat16
def test_an_analysis_of_a_quantised_model_takes_no_precision(folder, tmp_path):
    file = quantised(tmp_path / "q.onnx")
    line = refused("analyze", file, "--precision", "bfloat16", "--machine", folder / "toy.yaml", "--threads", 1)
    assert line.startswith("--precision bfloat16: the model is quantised")


def test_a_machine_without_a_rate_is_refused(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(CpuTarget, "lacks", lambda self, dtype: None)
    write_machine(toy_machine(), tmp_path / "poor.yaml")
    words = ["tune", folder / "model.onnx", "-o", tmp_path / "b", "--precision", "auto", "--threads", 1]
    done = CliRunner().invoke(app, [*map(str, words), "--machine", str(tmp_path / "poor.yaml")])
    assert done.exit_code == 2 and "no compute rate for bfloat16" in done.stderr.strip().splitlines()[-1]


@needs_bfloat16
def test_what_each_precision_promises(folder):
    """A machine with eight times the rate in bfloat16: half the bytes, at most an eighth of the arithmetic."""
    from costmodel.machines.machine_file import load_machine

    graph = extract_graph(import_onnx(folder / "model.onnx").mod)
    single, half, *_ = outlooks(graph, load_machine(str(folder / "toy.yaml")), CPU)
    assert (single.precision, half.precision) == ("float32", BFLOAT16)
    assert half.layers == single.layers == len(graph.nodes) and half.missing is None
    assert half.unfused_intensity == pytest.approx(2 * single.unfused_intensity)
    assert half.unfused_seconds < single.unfused_seconds and half.gain >= 1 <= single.gain
    assert half.peak_flops == 8 * single.peak_flops


@needs_bfloat16
@pytest.mark.parametrize("precision", [pytest.param("bfloat16", marks=pytest.mark.thorough), "auto"])
def test_a_build_in_bfloat16_takes_and_gives_float32(folder, tmp_path, precision):
    done = fusion(*tune_words(folder, tmp_path / "build", 1, "--precision", precision, "--max-error", 0.5))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    manifest = json.loads((tmp_path / "build" / "manifest.json").read_text())
    found = summary["precision"]
    assert found["asked"] == precision and manifest["precision"] == found["shipped"]
    assert found["layers"] == 4 and found["max_error"] == 0.5 and len(found["inputs"]) > 5
    if precision == "bfloat16":
        assert found["shipped"] == "bfloat16" and found["bfloat16_layers"] == 4 and not found["float32_layers"]
    else:  # which one is faster is up to the machine: kernels take microseconds
        assert set(found["choice"]["sensitivity"]) >= {"dw", "pw"}
        points = found["choice"]["frontier"]
        assert [point["chosen"] for point in points].count(True) == 1
        assert points[0]["layers"] == 0 == points[0]["error"] and points[-1]["layers"] == 3  # pooling follows
        assert all(point["predicted_seconds"] > 0 and point["compared_inputs"] > 1 for point in points)
        assert points[-1]["error"] > points[-1]["mean_relative_error"] > 0 and points[-1]["cosine"] > 0.99
        assert points[0]["measured_seconds"] > 0  # every kernel in float32 was
    if found["shipped"] != "float32":
        assert 0 < found["errors"]["max_relative_error"] < 0.5 and found["errors"]["cosine"] > 0.99
        assert precision_lines(found)[0].endswith("of 4 layers stored in bfloat16")
    x = np.random.default_rng(1).normal(size=(1, 16, 12, 12)).astype(np.float32)
    np.savez(tmp_path / "x.npz", x=x)
    assert (
        fusion("run", tmp_path / "build", "--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz").returncode == 0
    )
    with np.load(tmp_path / "y.npz") as outputs:
        assert {outputs[name].dtype for name in outputs.files} == {np.dtype(np.float32)}


@needs_bfloat16
def test_a_budget_that_bfloat16_cannot_keep_is_refused_before_tuning(folder, tmp_path):
    done = fusion(*tune_words(folder, tmp_path / "build", 1, "--precision", "bfloat16", "--max-error", 1e-6))
    assert done.returncode == 2 and done.stdout == ""
    line = done.stderr.strip().splitlines()[-1]
    assert "--max-error 1e-06" in line and "--precision auto" in line
    assert not (tmp_path / "build").exists()


@needs_bfloat16
@pytest.mark.thorough
def test_under_a_tiny_budget_auto_stays_in_float32(folder, tmp_path):
    done = fusion(*tune_words(folder, tmp_path / "build", 1, "--precision", "auto", "--max-error", 1e-6))
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)["precision"]
    assert found["shipped"] == "float32" and found["bfloat16_layers"] == 0


def test_a_request_in_float32_is_left_alone():
    request = TuneRequest(Path("m.onnx"), Path("b"))
    request.require_valid()
    assert request.on_cpu(CPU, pytest.fail) is request
    with pytest.raises(InputError, match="max-error"):
        replace(request, max_error=0.1).require_valid()
