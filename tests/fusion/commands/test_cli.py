"""``python -m fusion`` on real small ONNX files: results, exit statuses, and nothing half-written."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import tvm  # noqa: F401  # whole, before a command in this process loads its runtime alone: others need the compiler
from onnx import TensorProto, helper, numpy_helper
from typer.testing import CliRunner

from costmodel.base.errors import InputError
from costmodel.base.output_files import LOCK, lock_folder
from costmodel.cpu.calibration import calibrate
from costmodel.machines.machine_file import write_machine
from costmodel.machines.machine_records import ComputeRate, Machine, MemoryLevel, ParallelRegion, PerThreads
from fusion.commands.cli import app, parse_shapes
from fusion.tuning.tuning_run import claimed_directory
from tests.web_pages import read_page

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.usefixtures("short_rounds")


def write_model(path: Path, batch: int | str = 1) -> Path:
    """Depthwise 3x3 -> 1x1 -> ReLU6 -> global average -> dense, 16 channels on 12x12, and the 1x1's output too."""
    rng = np.random.default_rng(0)
    weights = {
        "dw.w": rng.normal(size=(16, 1, 3, 3)),
        "pw.w": rng.normal(size=(24, 16, 1, 1)),
        "pw.b": rng.normal(size=(24,)),
        "fc.w": rng.normal(size=(10, 24)),
        "low": np.array(0.0),
        "high": np.array(6.0),
    }
    nodes = [
        helper.make_node("Conv", ["x", "dw.w"], ["dw"], name="dw", group=16, pads=[1, 1, 1, 1], strides=[2, 2]),
        helper.make_node("Clip", ["dw", "low", "high"], ["dw.act"]),
        helper.make_node("Conv", ["dw.act", "pw.w", "pw.b"], ["features"], name="pw"),
        helper.make_node("GlobalAveragePool", ["features"], ["pooled"]),
        helper.make_node("Flatten", ["pooled"], ["flat"]),
        helper.make_node("Gemm", ["flat", "fc.w"], ["logits"], transB=1),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 16, 12, 12])],
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, [batch, 10]),
            helper.make_tensor_value_info("features", TensorProto.FLOAT, [batch, 24, 6, 6]),
        ],
        [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)
    return path


def toy_machine(threads: int = 2) -> Machine:
    def flat(value: float) -> PerThreads:
        return PerThreads(tuple((count, value) for count in range(1, threads + 1)))

    return Machine(
        name="toy",
        kind="cpu",
        description="for tests",
        compute={"float32": ComputeRate(flat(1e11), "invented for this test")},
        memory=(
            MemoryLevel("L1", 32 * 1024, False, flat(4e11), "invented for this test"),
            MemoryLevel("DRAM", 1e9, True, flat(1e10), "invented for this test"),
        ),
        parallel_region=ParallelRegion(flat(1e-6), "invented for this test"),
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds ``model.onnx`` and ``toy.yaml``."""
    path = tmp_path_factory.mktemp("cli")
    write_model(path / "model.onnx")
    write_machine(toy_machine(), path / "toy.yaml")
    return path


def arguments(*words: object) -> list[str]:
    return [sys.executable, "-m", "fusion", *map(str, words)]


def fusion_process(*words: object) -> subprocess.CompletedProcess[str]:
    """The command as people start it: TVM is loaded again, and whatever prints, prints."""
    return subprocess.run(arguments(*words), cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def fusion(*words: object) -> subprocess.CompletedProcess[str]:
    """The same in this process, which has TVM: seconds less of a processor each time."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return subprocess.CompletedProcess(words, result.exit_code, result.stdout, result.stderr)


def tune_words(folder: Path, output: Path, trials: int, *more: object) -> list[object]:
    options = ["--trials", trials, "--threads", 1, "--machine", folder / "toy.yaml", "--json"]
    return ["tune", folder / "model.onnx", "-o", output, *options, *more]


@pytest.fixture(scope="module")
def built(folder) -> tuple[Path, dict]:
    """A build directory and the summary that ``tune --json`` printed."""
    done = fusion(*tune_words(folder, folder / "build", 2))
    assert done.returncode == 0, done.stderr
    return folder / "build", json.loads(done.stdout)


def test_tune_writes_a_whole_build_and_prints_its_summary(built):
    directory, summary = built
    assert json.loads((directory / "summary.json").read_text()) == summary
    assert {"tuned", "tuned_without_fusion", "onnxruntime"} == summary["latency_seconds"].keys()
    assert all(0 < seconds < 1 for seconds in summary["latency_seconds"].values())
    assert 0 <= summary["max_abs_error"] < 1e-3
    assert summary["trials"] > 0 and summary["wall_seconds"] > 0 and not summary["interrupted"]
    assert summary["machine"]["threads"] == 1 and summary["versions"]["apache-tvm"]
    memory = summary["memory"]
    assert list(memory) == ["tuned", "tuned_without_fusion", "onnxruntime"]
    outputs = 4 * (24 * 36 + 10)  # kept until a run ends, besides the intermediates
    assert all(memory[name]["activation_bytes"] > outputs for name in ("tuned", "tuned_without_fusion"))
    assert memory["tuned"]["weight_bytes"] > 4 * (16 * 9 + 16 * 24 + 240) and memory["onnxruntime"]["growth_bytes"] > 0
    (site,) = summary["sites"]
    assert site["kind"] == "depthwise-pointwise"
    assert site["measured"]["fused_seconds"] > 0 and site["predicted"]["fused_seconds"] > 0
    # Which network as a whole is faster decides: with kernels of microseconds that may go either way.
    assert site["decision"].startswith("fused: " if site["fused_in_model"] else "kept apart: ")
    assert site["fuse"] or not site["fused_in_model"]
    names = {path.name for path in directory.iterdir()}
    assert {"model.so", "model_unfused.so", "manifest.json", "summary.json", "report.html", "records"} <= names
    assert not [name for name in names if name.startswith(".")]


def test_the_page_of_a_build_shows_its_network_and_can_be_made_again(built):
    directory, summary = built
    read = read_page((directory / "report.html").read_text(encoding="utf-8"))
    layers = {layer["name"]: layer for layer in summary["network"]["layers"]}
    assert all(name in read.text for name in ("model.onnx", "Roofline", "Sites"))
    assert len(layers) >= 3 and all(source in layers for layer in layers.values() for source in layer["reads"])
    assert sum(not layer["reads"] for layer in layers.values()) == 1  # one input, which one layer reads
    assert summary["tuning_curve"] and summary["network"]["ceilings"]["bandwidths"]
    before = (directory / "report.html").read_bytes()
    (directory / "report.html").unlink()
    done = fusion("report", directory)
    assert done.returncode == 0 and done.stdout.strip() == str(directory / "report.html")
    assert (directory / "report.html").read_bytes() == before


@pytest.mark.thorough
def test_tune_times_other_engines_that_are_asked_for(folder, tmp_path):
    """One that runs, and one of INT8 that has no file: the note says why."""
    words = [*tune_words(folder, tmp_path / "build", 1, "--minutes", 0), "--against", "torch-eager,onnxruntime-int8"]
    done = fusion(*words)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert list(summary["latency_seconds"])[-2:] == ["onnxruntime", "torch-eager"]
    peer = summary["peers"]["torch-eager"]
    assert peer["median_seconds"] == summary["latency_seconds"]["torch-eager"] > 0
    assert 0 < peer["max_relative_error"] < 1e-4 and peer["top1_agreement"] == 1 and peer["compared_inputs"] > 5
    assert any(note.startswith("onnxruntime-int8 skipped: ") and "--quantized" in note for note in summary["notes"])


def test_an_unknown_engine_is_refused_before_tuning(folder, tmp_path):
    line = refused_here(*tune_words(folder, tmp_path / "build", 1), "--against", "tensorflow")
    assert "--against tensorflow: no such engine" in line and not (tmp_path / "build").exists()
    elsewhere = ["--against", "openvino", "--target", "llvm -mcpu=znver4 -num-cores 2"]
    assert "--against: engines are timed where" in refused_here(*tune_words(folder, tmp_path / "b", 1), *elsewhere)


@pytest.mark.slow
@pytest.mark.thorough
def test_a_second_run_measures_no_kernel_twice(built, folder):
    directory, _ = built
    records = directory / "records" / "database_tuning_record.json"
    rehearsals = directory / "records" / "rehearsals.jsonl"
    before = records.read_bytes(), rehearsals.read_bytes()
    again = fusion(*tune_words(folder, directory, 2))
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["trials"] == 0
    assert (records.read_bytes(), rehearsals.read_bytes()) == before


def test_run_computes_what_onnxruntime_does(built, folder):
    directory, _ = built
    x = np.random.default_rng(1).normal(size=(1, 16, 12, 12)).astype(np.float32)
    np.savez(folder / "x.npz", x=x)
    done = fusion_process("run", directory, "--input", folder / "x.npz", "--output", folder / "y.npz")
    assert done.returncode == 0, done.stderr
    session = onnxruntime.InferenceSession(str(folder / "model.onnx"))
    with np.load(folder / "y.npz") as outputs:
        assert set(outputs.files) == {"logits", "features"}
        for name, expected in zip(("logits", "features"), session.run(["logits", "features"], {"x": x}), strict=True):
            np.testing.assert_allclose(outputs[name], expected, rtol=1e-4, atol=1e-4)


def test_compare_prints_rows_and_skips_nothing_silently(built):
    directory, _ = built
    done = fusion("compare", directory, "--against", "onnxruntime,tvm-unfused", "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [row["engine"] for row in document["rows"]] == ["tuned", "onnxruntime", "tvm-unfused"]
    assert document["rows"][0]["ratio_to_tuned"] == 1.0
    for row in document["rows"]:
        assert row["median_seconds"] >= row["min_seconds"] > 0
        assert row["max_abs_error"] < 1e-3


@pytest.fixture(scope="module")
def profiled(folder, tmp_path_factory) -> tuple[Path, dict, Path]:
    """A build for two batches of a model that leaves it open, the summary that was printed, and the model."""
    path = tmp_path_factory.mktemp("profiles")
    model = write_model(path / "open.onnx", batch="n")
    words = ["tune", model, "-o", path / "build", "--minutes", 0, "--threads", 1, "--machine", folder / "toy.yaml"]
    done = fusion(*words, "--json", "--shape", "x=1,16,12,12", "--shape", "x=3,16,12,12")
    assert done.returncode == 0, done.stderr
    assert "profile x=1,16,12,12" in done.stderr and "profile x=3,16,12,12" in done.stderr
    return path / "build", json.loads(done.stdout), model


def test_every_profile_is_tuned_and_checked_and_shipped_in_one_folder(profiled):
    directory, summary, _ = profiled
    assert json.loads((directory / "summary.json").read_text()) == summary
    names = {path.name for path in directory.iterdir()}
    assert names - {"records"} == {"1x16x12x12", "3x16x12x12", "manifest.json", "summary.json", "report.html"}
    for profile in summary["profiles"]:
        folder = directory / profile["folder"]
        own = {name: value for name, value in profile.items() if name != "folder"}
        assert json.loads((folder / "summary.json").read_text()) == own
        assert "x".join(map(str, profile["inputs"][0]["shape"])) == profile["folder"]
        assert profile["max_abs_error"] < 1e-3 and (folder / "model.so").is_file()


def test_run_picks_the_profile_and_names_all_where_none_fits(profiled, tmp_path):
    directory, _, model = profiled
    session = onnxruntime.InferenceSession(str(model))
    for batch in (3, 1):
        x = np.random.default_rng(batch).normal(size=(batch, 16, 12, 12)).astype(np.float32)
        np.savez(tmp_path / "x.npz", x=x)
        done = fusion("run", directory, "--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz")
        assert done.returncode == 0, done.stderr
        with np.load(tmp_path / "y.npz") as outputs:
            np.testing.assert_allclose(outputs["logits"], session.run(["logits"], {"x": x})[0], rtol=1e-4, atol=1e-4)
    np.savez(tmp_path / "x.npz", x=x[:, :, :11])
    line = refused("run", directory, "--input", tmp_path / "x.npz", "--output", tmp_path / "y.npz")
    known = "the model was tuned for x=1,16,12,12; x=3,16,12,12"
    assert f"x.npz: x=1,16,11,12 fits no profile; {known}; pad to one of these" in line


def test_benchmark_takes_every_profile_in_turn(profiled):
    directory, _, _ = profiled
    done = fusion("benchmark", directory, "--seconds", 0.05, "--json")
    assert done.returncode == 0, done.stderr
    assert [each["batch"] for each in json.loads(done.stdout)["profiles"]] == [1, 3]


@pytest.mark.slow
@pytest.mark.thorough
def test_several_batches_of_a_static_model_are_profiles(folder, tmp_path):
    """Stopped from the start: built from no measurement, by time and not by a signal that might come late."""
    words = tune_words(folder, tmp_path / "build", 1, "--batch", 2, "--batch", 4, "--minutes", 0)
    done = fusion(*words)
    assert done.returncode == 0, done.stderr
    folders = [profile["folder"] for profile in json.loads(done.stdout)["profiles"]]
    assert folders == ["2x16x12x12", "4x16x12x12"]
    assert (tmp_path / "build" / "4x16x12x12" / "model-batch4.onnx").is_file()
    assert "two profiles" in refused(*tune_words(folder, tmp_path / "same", 1, "--batch", 2, "--batch", 2))
    assert not (tmp_path / "same").exists()


@pytest.mark.slow
@pytest.mark.thorough
def test_ctrl_c_builds_the_best_so_far_and_exits_with_130(folder):
    output = folder / "stopped"
    process = subprocess.Popen(
        arguments(*tune_words(folder, output, 10_000)),
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    records = output / "records" / "database_tuning_record.json"
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.poll() is None:
        if records.exists() and records.read_text().count("\n") >= 12:
            break
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 130, stderr
    summary = json.loads(stdout)
    assert summary["interrupted"] and "stopped early" in summary["notes"][0]
    assert summary["trials"] >= 10
    assert (output / "model.so").is_file()
    assert summary["max_abs_error"] < 1e-3


def test_a_second_tune_into_a_folder_is_refused_before_any_work(folder, tmp_path):
    with lock_folder(tmp_path / "build", "a build"):
        line = refused(*tune_words(folder, tmp_path / "build", 1))
    assert f"{tmp_path / 'build'}: another process is writing a build here (process {os.getpid()}: " in line
    assert not (tmp_path / "build").exists()


def test_what_a_killed_tune_left_goes_with_the_next_one(tmp_path):
    kept = ["manifest.json", "records"]
    for name in (".checking-a", ".staging-b", ".quantising-c", "records"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("")
    for name in (".model.so.0123.partial", "manifest.json"):
        (tmp_path / name).write_text("")
    with claimed_directory(tmp_path):
        assert sorted(path.name for path in tmp_path.iterdir()) == [LOCK, *kept]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_analyze_prints_only_json(folder):
    done = fusion_process("analyze", folder / "model.onnx", "--machine", folder / "toy.yaml", "--threads", 1, "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["machine"] == "toy"
    assert [site["kind"] for site in document["sites"]] == ["depthwise-pointwise"]


def test_analyze_as_text_names_levels_and_the_reason(folder):
    done = fusion("analyze", folder / "model.onnx", "--machine", folder / "toy.yaml")
    assert done.returncode == 0, done.stderr
    assert "depthwise-pointwise on 16x12x12" in done.stdout
    assert "faster fused" in done.stdout


def refused(*words: object) -> str:
    """The one line with which the command line refuses, after at most what it began with; exit status 2."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    *stages, line = result.stderr.strip().splitlines()
    assert line.startswith("error: ")
    assert all(stage.startswith(("importing ", "no records of ")) for stage in stages)
    return line


def test_open_shapes_need_the_option(tmp_path, folder):
    model = write_model(tmp_path / "open.onnx", batch="n")
    assert "--shape" in refused("analyze", model, "--machine", folder / "toy.yaml")
    words = ["analyze", model, "--machine", folder / "toy.yaml", "--shape", "x=2,16,12,12", "--json"]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout)["sites"][0]["layers"][0]["input_shape"] == [2, 16, 12, 12]


def test_more_threads_than_cores_are_refused(built, folder, tmp_path):
    machine = toy_machine(1000)
    write_machine(machine, tmp_path / "many.yaml")
    words = ["tune", folder / "model.onnx", "-o", tmp_path / "b", "--machine", tmp_path / "many.yaml"]
    assert "this process may use" in refused(*words, "--threads", 1000)
    directory, _ = built
    assert "this process may use" in refused("compare", directory, "--threads", 1000)
    analysis = CliRunner().invoke(app, [str(word) for word in ("analyze", *words[1:2], *words[4:], "--threads", 1000)])
    assert analysis.exit_code == 0  # another machine may be asked about


def test_a_model_without_reference_is_refused_before_anything_is_tuned(folder, tmp_path, monkeypatch):
    """Of a newer version than ONNX Runtime reads."""
    model = onnx.load(folder / "model.onnx")
    model.ir_version = 999
    onnx.save(model, tmp_path / "new.onnx")
    monkeypatch.setattr("fusion.tuning.job.TuningJob.measure", lambda *arguments: pytest.fail("was tuned"))
    monkeypatch.setattr("onnx.checker.check_model", lambda model: None)  # as a newer `onnx` would find it
    words = ["tune", tmp_path / "new.onnx", "-o", tmp_path / "build", "--machine", folder / "toy.yaml", "--threads", 1]
    assert "ONNX Runtime, which checks the outputs, does not load the model" in refused(*words)
    assert not (tmp_path / "build").exists()
    assert "does not load the model" in refused("analyze", tmp_path / "new.onnx", "--machine", folder / "toy.yaml")


def test_what_tvm_cannot_compile_is_one_line(folder, tmp_path, monkeypatch):
    def fail(mod, cpu, objects):
        raise RuntimeError("Stack trace:\n  File 'x.cc'\nInternalError: CodeGenVM cannot handle relax.nonzero\n")

    monkeypatch.setattr("fusion.tuning.job.TuningJob.measure", lambda *arguments: pytest.fail("was tuned"))
    monkeypatch.setattr("fusion.relax.machine_code.build_executable", fail)
    words = ["tune", folder / "model.onnx", "-o", tmp_path / "build", "--machine", folder / "toy.yaml", "--threads", 1]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2
    line = result.stderr.strip().splitlines()[-1]
    reason = "TVM cannot compile it: InternalError: CodeGenVM cannot handle relax.nonzero; report it with the model"
    assert line == f"error: {folder / 'model.onnx'}: {reason}"
    assert not (tmp_path / "build").exists()


def test_shape_options():
    assert parse_shapes(["a=1,3,224,224", "b:0=7"]) == [{"a": (1, 3, 224, 224), "b:0": (7,)}]
    assert parse_shapes(None) == [{}]
    for wrong in ("a", "a=", "=1,2", "a=1,-2", "a=1,x"):
        with pytest.raises(InputError, match="NAME=1,3,224,224"):
            parse_shapes([wrong])
    twice = ["a=1,2", "b=3", "a=1,4"]
    assert parse_shapes(twice) == [{"a": (1, 2), "b": (3,)}, {"a": (1, 4), "b": (3,)}]
    with pytest.raises(InputError, match=r"--shape b=\.\.\.: given 2 times, another input 3 times"):
        parse_shapes([*twice, "a=1,5", "b=4"])


def test_without_a_calibrated_machine_it_is_measured_once_and_said(folder, tmp_path, monkeypatch):
    """The first use measures and keeps; the second reads."""
    from dataclasses import replace

    from costmodel.machines.machine_file import host_identity

    measured = []

    def quick(threads, effort):
        measured.append(threads)
        return replace(toy_machine(max(2, threads)), host=host_identity())

    monkeypatch.setenv("COSTMODEL_MACHINES", str(tmp_path))
    monkeypatch.setattr(calibrate.__module__ + ".calibrate", quick)
    words = ["analyze", str(folder / "model.onnx"), "--json", "--threads", "1"]
    first, second = CliRunner().invoke(app, words), CliRunner().invoke(app, words)
    assert first.exit_code == second.exit_code == 0, first.stderr + second.stderr
    assert "not calibrated yet" in first.stderr and "not calibrated" not in second.stderr
    assert len(measured) == 1 and (tmp_path / "host.yaml").is_file()
    assert os.fspath(tmp_path) in first.stderr


def test_a_planted_error_is_refused_before_anything_is_tuned(folder, tmp_path, monkeypatch):
    """Weights of our kernels off by 1 %: seconds, not the tuning."""
    from fusion.relax.lowered_module import KernelLibrary

    constant = KernelLibrary.constant
    monkeypatch.setattr(KernelLibrary, "constant", lambda self, array: constant(self, array * np.float32(1.01)))
    monkeypatch.setattr("fusion.tuning.job.TuningJob.measure", lambda *arguments: pytest.fail("was tuned"))
    words = ["tune", folder / "model.onnx", "-o", tmp_path / "build", "--machine", folder / "toy.yaml", "--threads", 1]
    line = refused_here(*words)
    assert "outputs of the first network are wrong" in line and "times what rounding explains" in line
    assert not (tmp_path / "build").exists()


def refused_here(*words: object) -> str:
    """As ``refused``, in this process."""
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 2, result.output
    return result.stderr.strip().splitlines()[-1]


@pytest.mark.thorough
def test_a_model_for_another_batch_is_tuned_compared_and_run(folder, tmp_path):
    """Its sigmoid saturates; the build holds the model that others are compared on."""
    model = onnx.load(folder / "model.onnx")
    for node in model.graph.node:
        node.output[:] = ["plain" if name == "logits" else name for name in node.output]
    model.graph.initializer.append(numpy_helper.from_array(np.array(-12.0, np.float32), "shift"))
    model.graph.node.append(helper.make_node("Add", ["plain", "shift"], ["shifted"]))
    model.graph.node.append(helper.make_node("Sigmoid", ["shifted"], ["logits"]))
    onnx.save(model, tmp_path / "model.onnx")
    options = ["--trials", 1, "--threads", 1, "--machine", folder / "toy.yaml", "--json", "--batch", 3]
    done = fusion("tune", tmp_path / "model.onnx", "-o", tmp_path / "build", *options)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert summary["check"]["reference"] == "ONNX model in FP64" and summary["check"]["compared_inside"] == ["shifted"]
    assert summary["check"]["worst_share_of_allowed"] < 1
    shipped = summary["finals"]["networks"][0]
    assert shipped["name"] == summary["finals"]["shipped"] and shipped["ratio_to_unfused"] <= 1
    done = fusion("compare", tmp_path / "build", "--against", "onnxruntime", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["rows"][1]["max_abs_error"] == 0
    np.savez(tmp_path / "in.npz", x=np.ones((3, 16, 12, 12), np.float32))
    done = fusion("run", tmp_path / "build", "--input", tmp_path / "in.npz", "--output", tmp_path / "out.npz")
    assert done.returncode == 0, done.stderr
    assert np.load(tmp_path / "out.npz")["logits"].shape == (3, 10)


@pytest.mark.parametrize(
    ("variable", "value", "word"),
    [
        ("CXX", "/nowhere/g++", "compiler: /nowhere/g++"),
        ("CXX", "false", "compiler: false fails"),
        ("TMPDIR", "/nowhere/temporary", "TMPDIR /nowhere/temporary: no such folder"),
        ("PATH", "/nowhere", "compiler: none found; install a C++ compiler"),
    ],
)
def test_tune_asks_for_its_tools_before_it_starts(tmp_path, monkeypatch, variable, value, word):
    for other in ("CXX", "CC"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(variable, value)
    result = CliRunner().invoke(app, ["tune", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "build")])
    assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1) and word in result.stderr
    assert not (tmp_path / "build").exists()


def test_tune_refuses_files_that_may_not_hold_a_library(tmp_path, monkeypatch):
    monkeypatch.setattr("resource.getrlimit", lambda which: (4096, 4096))
    result = CliRunner().invoke(app, ["tune", str(tmp_path / "m.onnx"), "-o", str(tmp_path / "build")])
    assert result.exit_code == 2 and "may hold 4,096 bytes" in result.stderr and "ulimit -f" in result.stderr
