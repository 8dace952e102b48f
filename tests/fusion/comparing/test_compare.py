"""``fusion compare`` with the real tuned module and ONNX Runtime, and with engines that misbehave."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from costmodel.base.errors import InputError
from fusion.artifact.build_folder import MANIFEST, Artifact
from fusion.commands.console_report import print_comparison
from fusion.comparing import compare
from fusion.comparing.compare import Comparison, EngineRow, compare_command
from fusion.comparing.engines.engine_table import ENGINES, EngineSpec
from fusion.comparing.rounds import Sampling

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


def test_engines_that_work_have_rows_and_the_others_reasons(comparison: Comparison):
    assert [row.engine for row in comparison.rows] == ["tuned", "onnxruntime", "slow", "wrong"]
    reasons = {entry.engine: (entry.status, entry.reason) for entry in comparison.not_measured}
    assert reasons == {
        "absent": ("skipped", "absent_package not installed: pip install -e '.[peers]'"),
        "unavailable": ("skipped", "no such instruction here"),
        "raising": ("failed", "ValueError: operator Foo is unknown"),
        "crashing_later": ("failed", "its process died (killed by SIGSEGV)"),
        "not_a_number": ("failed", "its outputs lack values or shapes that ONNX Runtime's have"),
    }
    rows = {row.engine: row for row in comparison.rows}
    assert rows["tuned"].ratio_to_tuned == 1
    assert rows["tuned"].max_abs_error < 1e-6
    assert rows["onnxruntime"].max_abs_error == 0
    assert rows["wrong"].max_abs_error == pytest.approx(0.5, abs=1e-6)
    assert rows["slow"].median_seconds >= rows["slow"].min_seconds >= 0.02
    assert rows["slow"].ratio_to_tuned > 10  # the tiny model takes microseconds, the slow engine 20 ms
    assert comparison.seconds("slow") == rows["slow"].median_seconds
    assert comparison.seconds("absent") is None
    document = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    wanted = {"engine", "median_seconds", "min_seconds", "ratio_to_tuned", "max_abs_error"}
    assert all(wanted <= set(row) for row in document["rows"])


def test_the_reference_checks_outputs_even_when_it_is_not_compared(tiny_build: Artifact):
    found = compare_command(tiny_build.directory, ["tvm-unfused"], sampling=dataclasses.replace(QUICK, cold_calls=1))
    assert [row.engine for row in found.rows] == ["tuned", "tvm-unfused"]
    assert all(row.max_abs_error < 1e-6 for row in found.rows)
    assert all(row.cold_median_seconds > 0 for row in found.rows)
    assert found.not_measured == ()


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
    (tmp_path / "other.onnx").write_bytes(tiny_model.read_bytes() + b"\0")
    with pytest.raises(InputError, match="is not the model that"):
        compare_command(build, ["onnxruntime"], model=tmp_path / "other.onnx")
    moved = shutil.copy(tiny_model, tmp_path / "moved.onnx")
    assert compare_command(build, [], model=Path(moved), sampling=QUICK).model == str(moved)


def test_no_process_outlives_the_command(fakes: None, tiny_build: Artifact, monkeypatch: pytest.MonkeyPatch):
    started = []

    class Watched(compare.Worker):
        def __init__(self, spec: EngineSpec, threads: int) -> None:
            super().__init__(spec, threads)
            started.append(self._process)

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "Worker", Watched)
    monkeypatch.setattr(compare, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        compare_command(tiny_build.directory, ["slow"])
    assert len(started) == 3  # the reference, tuned, slow
    assert all(process.poll() is not None for process in started)


def test_identical_modules_are_timed_once(tiny_build: Artifact):
    """The two modules of this build are the same bytes: a ratio between them would be noise."""
    found = compare_command(tiny_build.directory, ["tvm-unfused", "onnxruntime"], sampling=QUICK)
    tuned, twin, _ = found.rows
    assert twin == dataclasses.replace(tuned, engine="tvm-unfused", mode="identical to tuned: nothing fused")
    alone = compare_command(tiny_build.directory, ["onnxruntime"], sampling=QUICK)
    assert [row.engine for row in alone.rows] == ["tuned", "onnxruntime"]


def test_brackets_in_the_mode_of_an_engine_are_text(capsys):
    mode = "2.13, eager; Inductor failed: [enforce fail at alloc.cpp:117] [/tmp] not writable"
    row = EngineRow("torch", mode, 1e-3, 1e-3, 1e-3, 1e-3, 1.0, 0.0, 0.0, 10, None, None)
    print_comparison(Comparison("m.onnx", 2, QUICK, (row,), ()))
    assert mode.split(": ")[1] in " ".join(capsys.readouterr().out.split())
