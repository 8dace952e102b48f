"""``fusion.load``, ``fusion.analyze``, ``fusion.tune``: arrays in every form, and the records of the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

import fusion
from costmodel import ProjectError
from costmodel.base.errors import InputError
from costmodel.machines.machine_file import write_machine
from fusion.commands.cli import app
from fusion.model.build_folder import Artifact, TensorInfo
from fusion.model.named_arrays import to_tvm
from fusion.model.tuned_model import LoadedProfile, TunedModel
from tests.fusion.commands.test_cli import toy_machine

pytest.importorskip("tvm")

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.usefixtures("short_rounds")
A = np.array([[1, -2, 3], [4, 5, -6]], np.float32)
B = np.array([[2, 2, -1], [0.5, 1, 1]], np.float32)


@pytest.fixture
def model(tiny_build: Artifact) -> fusion.TunedModel:
    return fusion.load(str(tiny_build.directory))


def test_arrays_by_position_by_name_or_as_a_dict(model):
    assert [info.name for info in model.inputs] == ["a", "b"]
    for outputs in (model(A, B), model(a=A, b=B), model({"b": B, "a": A}), model(A, b=B), model.run({"a": A, "b": B})):
        assert list(outputs) == ["sum", "file"]
        np.testing.assert_array_equal(outputs["sum"], A + B)
        np.testing.assert_array_equal(outputs["file"], np.maximum(A * B, 0))


def test_one_output_is_an_array(model):
    class Doubling:
        def __call__(self, arrays):
            return {"y": 2 * arrays["x"]}

    info = (TensorInfo("x", (2, 3), "float32"),)
    profile = LoadedProfile(info, (TensorInfo("y", (2, 3), "float32"),), Doubling())  # type: ignore[arg-type]
    one = TunedModel(model.folder, [profile], 1)
    np.testing.assert_array_equal(one(A), 2 * A)
    assert list(one.run({"x": A})) == ["y"] and "x: float32[2, 3]" in repr(one)


def test_outputs_are_the_callers_own(model):
    first = model(A, B)["sum"]
    model(B, B)
    first += 1  # writable
    np.testing.assert_array_equal(first, A + B + 1)


def test_tensors_of_other_libraries_are_taken(model):
    torch = pytest.importorskip("torch")
    outputs = model(torch.from_numpy(A), torch.from_numpy(np.asfortranarray(B)))
    np.testing.assert_array_equal(outputs["sum"], A + B)
    with pytest.raises(InputError, match="input 'a' cannot be read in this CPU's memory"):
        model(torch.from_numpy(A.copy()).requires_grad_(), B)
    with pytest.raises(InputError, match="input 'b' is float64"):
        model(A, torch.from_numpy(B.astype(np.float64)))


def test_an_aligned_tensor_of_another_library_is_not_copied():
    torch = pytest.importorskip("torch")
    tensor = torch.arange(64, dtype=torch.float32).reshape(8, 8)
    assert tensor.data_ptr() % 64 == 0
    taken = to_tvm(tensor)
    tensor[0, 0] = 7.0
    assert taken.numpy()[0, 0] == 7.0


def test_a_folder_that_is_no_build_is_named(tiny_build: Artifact, tmp_path):
    with pytest.raises(InputError, match="nowhere: no such build directory"):
        fusion.load("nowhere")
    folder = shutil.copytree(tiny_build.directory, tmp_path / "build")
    (folder / "manifest.json").unlink()
    with pytest.raises(InputError, match=r"manifest\.json: missing"):
        fusion.load(folder)
    with pytest.raises(InputError, match="--threads 4096"):
        fusion.load(tiny_build.directory, threads=4096)
    with pytest.raises(InputError, match="--threads 0: must be 1 or more"):
        fusion.load(tiny_build.directory, threads=0)


def program(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_what_cannot_be_done_after_a_load_is_said(tiny_build: Artifact, tiny_model: Path):
    """TVM is there without its compiler, and its threads are settled."""
    done = program(
        "import fusion, costmodel, costmodel.base.process\n"
        f"fusion.load({str(tiny_build.directory)!r}, threads=1)\n"
        "costmodel.base.process.usable_cores = lambda: 2\n"
        f"for call in (lambda: fusion.analyze({str(tiny_model)!r}), lambda: fusion.tune({str(tiny_model)!r}, 'x'),\n"
        f"             lambda: fusion.load({str(tiny_build.directory)!r}, threads=2)):\n"
        "    try: call()\n"
        "    except costmodel.ProjectError as error: print(error)\n"
        "try:\n    from fusion.analysis.fuse_conv_pairs import FuseConvPairs\n"
        "except ImportError as error: print(error)\n"
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 4, done.stderr
    assert "before the first load, or in another process" in lines[0] == lines[1]
    assert lines[2].startswith("--threads 2: TVM runs with 1 threads in this process")
    assert "import fusion.analysis.fuse_conv_pairs before the first fusion.load" in lines[3]


@pytest.fixture(scope="module")
def toy(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("machine") / "toy.yaml"
    write_machine(toy_machine(), path)
    return path


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"batch": 0}, "--batch 0: must be a whole number, 1 or more"),
        ({"batch": 10**30}, f"--batch {10**30}: must be at most 2,147,483,647"),
        ({"threads": 0}, "--threads 0"),
        ({"shapes": {"a": (2, -3)}}, "--shape a=2,-3: expected positive sizes"),
        ({"shapes": {"a": (2, 10**30)}}, f"--shape a=2,{10**30}: expected positive sizes, of at most 2,147,483,647"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line(tiny_model: Path, toy: Path, tmp_path, asked, words):
    for call in (fusion.analyze, lambda *args, **named: fusion.tune(*args, tmp_path / "build", **named)):
        with pytest.raises(InputError, match=words) as caught:
            call(tiny_model, machine=toy, **asked)
        assert isinstance(caught.value, ProjectError) and "\n" not in str(caught.value)
    for wrong in ({"trials": 0}, {"minutes": -1.0}, {"minutes": float("nan")}):
        with pytest.raises(InputError, match=f"--{next(iter(wrong))} "):
            fusion.tune(tiny_model, tmp_path / "build", machine=toy, **wrong)
    assert not (tmp_path / "build").exists()


def test_the_analysis_is_that_of_the_command_line(tiny_model: Path, toy: Path):
    words = ["analyze", str(tiny_model), "--machine", str(toy), "--threads", "1", "--json"]
    done = CliRunner().invoke(app, words)
    analysis = fusion.analyze(str(tiny_model), machine=str(toy), threads=1)
    assert json.loads(json.dumps(analysis.to_json())) == json.loads(done.stdout)
    assert isinstance(analysis, fusion.NetworkAnalysis)


@pytest.mark.slow
def test_tune_says_what_it_wrote_and_load_runs_it(tmp_path, toy: Path):
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = np.random.default_rng(0).normal(size=(16, 16, 1, 1)).astype(np.float32)
    shape = [1, 16, 8, 8]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="pointwise")
    graph = helper.make_graph([node], "one", ends[:1], ends[1:], [numpy_helper.from_array(weight, "w")])
    opset = [helper.make_opsetid("", 17)]
    onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=9), tmp_path / "model.onnx")
    lines: list[str] = []
    started = time.monotonic()
    summary = fusion.tune(
        tmp_path / "model.onnx", tmp_path / "build", trials=1, threads=1, machine=toy, progress=lines.append
    )
    assert any("checking the outputs" in line for line in lines)
    assert summary.record == json.loads((tmp_path / "build" / "summary.json").read_text())
    latency = summary.record["latency_seconds"]
    assert summary.speedup_over_onnxruntime == latency["onnxruntime"] / latency["tuned"] > 0
    assert summary.speedup_over_unfused == pytest.approx(1.0) and summary.sites == summary.sites_fused == 0
    assert summary.max_abs_error < 1e-4 and 0 < summary.wall_seconds < time.monotonic() - started
    assert not summary.interrupted and isinstance(summary.notes, tuple) and summary.output == tmp_path / "build"
    data = np.random.default_rng(1).normal(size=shape).astype(np.float32)
    expected = np.einsum("oi,nihw->nohw", weight[:, :, 0, 0], data)
    np.testing.assert_allclose(fusion.load(summary.output)(data), expected, rtol=1e-4, atol=1e-4)
