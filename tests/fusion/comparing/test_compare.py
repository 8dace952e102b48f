"""``fusion compare`` with the real tuned module and ONNX Runtime, and with engines that misbehave."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from costmodel.base.errors import InputError
from fusion.comparing import compare, output_errors, timing
from fusion.comparing.compare import Comparison, EngineRow, compare_command
from fusion.comparing.engine import ENGINES, EngineSpec, Unavailable
from fusion.comparing.timing import Sampling, quantized_file
from fusion.model.build_folder import MANIFEST, Artifact
from fusion.model.named_arrays import TensorInfo
from fusion.report.console_report import print_comparison
from fusion.tuning.quantization import quantize_model

pytest.importorskip("onnxruntime")
QUICK = Sampling(rounds=3, seconds=0.01, calls=3, warmup=1)
HERE = Path(__file__).parent


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Adds the engines of ``fake_engines.py`` under their names in lower case, and one that is not installed."""
    monkeypatch.syspath_prepend(str(HERE))
    names = ("slow", "wrong", "not_a_number", "unavailable", "raising", "crashing_later")
    for name in names:
        monkeypatch.setitem(ENGINES, name, EngineSpec(name, f"fake_engines:{name.upper()}", (), "none"))
    monkeypatch.setitem(ENGINES, "absent", EngineSpec("absent", "absent:ABSENT", ("absent_package",), "peers"))


@pytest.fixture
def comparison(fakes: None, tiny_build: Artifact) -> Comparison:
    names = ["absent", "onnxruntime", "unavailable", "raising", "crashing_later", "slow", "wrong", "not_a_number"]
    return compare_command(tiny_build.directory, names, sampling=QUICK)


def test_engines_that_work_have_rows_and_the_others_reasons(comparison: Comparison, tiny_build: Artifact):
    assert [row.engine for row in comparison.rows] == ["tuned", "onnxruntime", "slow", "wrong"]
    reasons = {entry.engine: (entry.status, entry.reason) for entry in comparison.not_measured}
    assert reasons == {
        "absent": ("skipped", "absent_package not installed: pip install -e '.[peers]'"),
        "unavailable": ("skipped", "no such instruction here"),
        "raising": ("failed", "ValueError: operator Foo is unknown"),
        "crashing_later": ("failed", "its process died (killed by SIGSEGV)"),
        "not_a_number": (
            "failed",
            "its outputs lack values or shapes that ONNX Runtime's have (on the random input)",
        ),
    }
    rows = {row.engine: row for row in comparison.rows}
    assert rows["tuned"].ratio_to_tuned == 1
    assert rows["tuned"].max_abs_error < 1e-6
    assert rows["onnxruntime"].max_abs_error == 0
    assert rows["wrong"].max_abs_error == pytest.approx(0.5, abs=1e-6)
    assert rows["wrong"].compared_inputs == len(output_errors.error_inputs(tiny_build.manifest.inputs))
    assert rows["onnxruntime"].cosine == 1.0 and rows["onnxruntime"].top1_agreement == 1.0
    assert rows["wrong"].cosine < 0.99 and 0 < rows["wrong"].mean_relative_error <= rows["wrong"].max_relative_error
    assert rows["slow"].median_seconds >= rows["slow"].min_seconds >= 0.02
    assert rows["slow"].ratio_to_tuned > 10  # the tiny model takes microseconds, the slow engine 20 ms
    assert comparison.seconds("slow") == rows["slow"].median_seconds
    assert comparison.seconds("absent") is None
    document = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    wanted = {"engine", "median_seconds", "min_seconds", "ratio_to_tuned", "max_abs_error"}
    assert all(wanted <= set(row) for row in document["rows"])


def test_the_reference_checks_outputs_even_when_it_is_not_compared(tiny_build: Artifact):
    """An engine of int8 is skipped where there is no quantised file, with the way on."""
    found = compare_command(tiny_build.directory, ["tvm-unfused", "onnxruntime-int8"], sampling=QUICK)
    assert [row.engine for row in found.rows] == ["tuned", "tvm-unfused"]
    assert all(row.max_abs_error < 1e-6 for row in found.rows)
    (absent,) = found.not_measured
    assert absent.status == "skipped" and "--quantized FILE" in absent.reason


def test_a_failure_of_the_tuned_model_is_an_error(fakes: None, tiny_build: Artifact, monkeypatch):
    for name, words in (("raising", "cannot run: ValueError"), ("crashing_later", "failed while it was timed")):
        monkeypatch.setitem(ENGINES, "tuned", dataclasses.replace(ENGINES[name], name="tuned"))
        with pytest.raises(InputError, match=words):
            compare_command(tiny_build.directory, [], sampling=QUICK)


def test_the_model_must_be_there_and_be_the_one_that_was_tuned(tiny_build: Artifact, tiny_model: Path, tmp_path: Path):
    build = shutil.copytree(tiny_build.directory, tmp_path / "build")
    manifest = json.loads((build / MANIFEST).read_text())
    (build / MANIFEST).write_text(json.dumps({**manifest, "model_path": "/gone/m.onnx"}))
    with pytest.raises(InputError, match=r"/gone/m\.onnx: the model of .* is not there; name it with --model"):
        compare_command(build, ["onnxruntime"])
    with pytest.raises(InputError, match="/dev/zero: cannot be read .it is a pipe or a device"):
        compare_command(build, ["onnxruntime"], model=Path("/dev/zero"))
    with pytest.raises(InputError, match="/dev/zero: is not a folder"):
        compare_command(Path("/dev/zero"), ["onnxruntime"])
    (tmp_path / "other.onnx").write_bytes(tiny_model.read_bytes() + b"\0")
    with pytest.raises(InputError, match="is not the model that"):
        compare_command(build, ["onnxruntime"], model=tmp_path / "other.onnx")
    moved = shutil.copy(tiny_model, tmp_path / "moved.onnx")
    assert compare_command(build, [], model=Path(moved), sampling=QUICK).model == str(moved)


def test_no_process_outlives_the_command(fakes: None, tiny_build: Artifact, monkeypatch: pytest.MonkeyPatch):
    started = []

    class Watched(timing.Worker):
        def __init__(self, spec: EngineSpec, threads: int) -> None:
            super().__init__(spec, threads)
            started.append(self._process)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(timing, "Worker", Watched)
    monkeypatch.setattr(compare, "measure_engines", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare_command(tiny_build.directory, ["slow"])
    assert len(started) == 3  # the reference, tuned, slow
    assert all(process.poll() is not None for process in started)


def test_identical_modules_are_timed_once(tiny_build: Artifact):
    """The two modules of this build are the same bytes: a ratio between them would be noise."""
    found = compare_command(tiny_build.directory, ["tvm-unfused", "onnxruntime"], sampling=QUICK)
    tuned, twin, _ = found.rows
    assert twin == dataclasses.replace(tuned, engine="tvm-unfused", mode="identical to tuned: nothing fused")


def test_errors_over_inputs_have_columns_of_their_own(capsys):
    row = EngineRow(
        "x", "mode", 1e-3, 1e-3, 1e-3, 1e-3, 1.0, 0.5, 0.125, 10,
        mean_relative_error=0.03125, cosine=0.75, top1_agreement=0.5, compared_inputs=12,
    )  # fmt: skip
    print_comparison(Comparison("m.onnx", 2, QUICK, (row,), ()))
    out = capsys.readouterr().out
    assert "1.2e-01" in out and "3.1e-02" in out and "0.750000" in out and "50%" in out
    assert "errors against ONNX Runtime on 12 inputs" in out


# -- the quantised file ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Holds ``net.onnx``, one layer, and ``net-int8.onnx``, which was quantised from it."""
    from onnx import TensorProto, helper, numpy_helper, save

    path = tmp_path_factory.mktemp("quantised")
    weight = np.random.default_rng(0).normal(size=(4, 3, 1, 1)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("Conv", ["x", "w"], ["y"], name="conv")],
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 4, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4, 4, 4])],
        [numpy_helper.from_array(weight, "w")],
    )
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path / "net.onnx")
    quantize_model(path / "net.onnx", random=True)
    return path


X, Y = TensorInfo("x", (1, 3, 4, 4), "float32"), TensorInfo("y", (1, 4, 4, 4), "float32")


def test_engines_of_int8_run_what_quantize_wrote_beside_the_model(folder, tmp_path):
    model, beside = folder / "net.onnx", folder / "net-int8.onnx"
    assert quantized_file(model, [X], [Y], None, tmp_path) == beside
    assert quantized_file(model, [X], [Y], beside, tmp_path) == beside
    assert quantized_file(beside, [X], [Y], None, tmp_path) == beside  # a user's model that is quantised itself


def test_engines_of_int8_run_what_a_build_was_quantised_to(folder, tmp_path):
    """Rather than what lies beside the model; nothing that was made from another."""
    model, beside = folder / "net.onnx", folder / "net-int8.onnx"
    built, changed = Path(shutil.copy(beside, tmp_path / "built.onnx")), tmp_path / "changed.onnx"
    assert quantized_file(model, [X], [Y], None, tmp_path, [model, tmp_path / "none.onnx", built]) == built
    assert quantized_file(beside, [X], [Y], None, tmp_path, [built]) == beside
    changed.write_bytes(model.read_bytes() + b"\x82\x01\x00")  # an unknown field of protobuf
    with pytest.raises(Unavailable, match="has no quantised file"):
        quantized_file(changed, [X], [Y], None, tmp_path, [built])


def test_a_quantised_file_of_an_older_model_is_not_taken(folder, tmp_path):
    changed = tmp_path / "net.onnx"
    changed.write_bytes((folder / "net.onnx").read_bytes() + b"\x82\x01\x00")  # an unknown field of protobuf
    shutil.copy(folder / "net-int8.onnx", tmp_path)
    with pytest.raises(Unavailable, match=r"net-int8\.onnx was not quantised from .*net\.onnx as it is now"):
        quantized_file(changed, [X], [Y], None, tmp_path)


def test_a_named_file_must_be_quantised_and_of_the_model(folder, tmp_path):
    with pytest.raises(InputError, match=r"net\.onnx: is not quantised"):
        quantized_file(folder / "net.onnx", [X], [Y], folder / "net.onnx", tmp_path)
    other = dataclasses.replace(X, name="image")
    with pytest.raises(InputError, match="is of another model: its inputs are x, the model's are image"):
        quantized_file(folder / "net.onnx", [other], [Y], folder / "net-int8.onnx", tmp_path)
    wide = dataclasses.replace(X, shape=(1, 3, 4, 9))
    with pytest.raises(InputError, match=r"input 'x' has shape \(1, 3, 4, 4\), the model takes \(1, 3, 4, 9\)"):
        quantized_file(folder / "net.onnx", [wide], [Y], folder / "net-int8.onnx", tmp_path)


def test_a_quantised_file_is_rewritten_for_another_batch(folder, tmp_path):
    import onnxruntime

    eight = [dataclasses.replace(each, shape=(8, *each.shape[1:])) for each in (X, Y)]
    file = quantized_file(folder / "net.onnx", eight[:1], eight[1:], folder / "net-int8.onnx", tmp_path / "cache")
    assert file.parent == tmp_path / "cache"
    samples = np.random.default_rng(0).normal(size=(8, 3, 4, 4)).astype(np.float32)
    ours, theirs = (
        onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
        for path in (file, folder / "net-int8.onnx")
    )
    single = np.concatenate([theirs.run(None, {"x": sample[None]})[0] for sample in samples])
    np.testing.assert_array_equal(ours.run(None, {"x": samples})[0], single)


def test_errors_are_told_over_a_users_samples(fakes: None, tiny_build: Artifact, tmp_path: Path):
    """``wrong`` adds a half to a + b: a tenth of the largest sum here."""
    samples = {name: np.full((8, 3), 2.5, np.float32) for name in "ab"}  # four calls of two rows
    np.savez(tmp_path / "data.npz", **samples)
    found = compare_command(tiny_build.directory, ["wrong"], data=tmp_path / "data.npz", sampling=QUICK)
    assert found.rows[1].compared_inputs == 4
    assert found.rows[1].max_relative_error == found.rows[1].mean_relative_error == pytest.approx(0.1)
    np.savez(tmp_path / "data.npz", a=samples["a"])
    with pytest.raises(InputError, match=r"data\.npz: input 'b' is missing"):
        compare_command(tiny_build.directory, ["wrong"], data=tmp_path / "data.npz", sampling=QUICK)


# -- builds beside one another ---------------------------------------------------------------------------------------


def test_further_builds_have_rows_of_their_own(tiny_build: Artifact, tmp_path: Path):
    other = shutil.copytree(tiny_build.directory, tmp_path / "other")
    found = compare_command(tiny_build.directory, ["onnxruntime"], beside={"ours, bfloat16": other}, sampling=QUICK)
    assert [row.engine for row in found.rows] == ["tuned", "ours, bfloat16", "onnxruntime"]
    manifest = json.loads((other / MANIFEST).read_text())
    manifest["inputs"][0]["shape"] = [2, 4]
    (other / MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(InputError, match="is of another network, or of other shapes"):
        compare_command(tiny_build.directory, [], beside={"other": other}, sampling=QUICK)
