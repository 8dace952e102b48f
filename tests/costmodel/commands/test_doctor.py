"""What `doctor` finds: each check on a machine where it is well and on one where it is not."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement
from typer.testing import CliRunner

from costmodel.base.errors import MachineError
from costmodel.commands import doctor
from costmodel.commands.doctor import BadPair, Finding, satisfies


@pytest.mark.parametrize(
    ("version", "condition", "answer"),
    [
        ("2.13.0+cpu", ">=2.13,<2.14", True),
        ("0.1.14.post1", ">=0.1.15", False),
        ("0.1.13", "<0.1.13.post2", True),
        ("3.1rc1", ">=3", True),
        ("1.0", "", True),
    ],
)
def test_versions_and_conditions(version: str, condition: str, answer: bool):
    assert satisfies(version, condition) is answer


def with_versions(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    monkeypatch.setattr(doctor, "installed", versions.get)


def test_packages_are_compared_with_what_is_declared(monkeypatch: pytest.MonkeyPatch):
    lines = {
        "": [Requirement("numpy>=2.4,<3")],
        "fusion": [Requirement("apache-tvm-ffi==0.1.14.post1"), Requirement("onnx>=1.23,<1.24")],
        "peers": [Requirement("openvino>=2026.4")],
    }
    monkeypatch.setattr(doctor, "declared", lines.get)
    with_versions(monkeypatch, {"numpy": "3.1", "apache-tvm": "0.27.0.post1", "apache-tvm-ffi": "0.1.15"})
    pair = BadPair({"apache-tvm": "==0.27.0.post1", "apache-tvm-ffi": ">=0.1.15"}, "do not load", "pip install both")
    other = BadPair({"apache-tvm": ">=0.28", "apache-tvm-ffi": ">=0.1.15"}, "never", "nothing")
    _, *found = doctor.packages("fusion", {"peers": "other engines"}, [pair, other])
    assert [(each.name, each.state) for each in found] == [
        ("numpy", "note"),
        ("apache-tvm-ffi", "broken"),
        ("onnx", "broken"),
        ("extra peers", "note"),
        ("apache-tvm + apache-tvm-ffi", "broken"),
    ]
    assert found[1].advice == "pip install 'apache-tvm-ffi==0.1.14.post1'"
    assert found[2].advice == "pip install 'fusion-costmodel[fusion]'" == found[3].advice.replace("peers", "fusion")


def test_the_declared_packages_are_those_of_the_project():
    names = {extra: {each.name for each in doctor.declared(extra)} for extra in ("", "fusion", "e2e", "nothing")}
    assert {"numpy", "typer"} <= names[""] and {"apache-tvm", "onnx"} <= names["fusion"] and "torch" in names["e2e"]
    assert not names[""] & names["fusion"] and not names["nothing"]
    assert all(each.specifier for each in doctor.declared("fusion"))


def test_two_distributions_of_one_module(monkeypatch: pytest.MonkeyPatch):
    owners = {"cv2": ["opencv-python", "opencv-python-headless"], "onnx": ["onnx", "onnx"]}
    monkeypatch.setattr(doctor.metadata, "packages_distributions", lambda: owners)
    (found,) = doctor.modules_once(["cv2", "onnx", "tvm"])
    assert found.state == "broken" and "opencv-python and opencv-python-headless" in found.found


def test_what_cannot_be_imported_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "torn.py").write_text("raise OSError('libtorn.so: undefined symbol: x')")
    (tmp_path / "dies.py").write_text("import os; os.abort()")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    good, torn, dies = doctor.imports(dict.fromkeys(["json", "torn", "dies"], "numpy"), "install it again")
    assert (good.state, torn.state, dies.state) == ("ok", "broken", "broken")
    assert "undefined symbol" in torn.found and torn.advice == "install it again" and "status -6" in dies.found


def test_threads_that_no_core_is_for(monkeypatch: pytest.MonkeyPatch):
    for name in doctor._THREADS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(doctor, "usable_cores", lambda: 2)
    monkeypatch.setattr(doctor, "core_quota", lambda: 0.5)
    monkeypatch.setenv("OMP_NUM_THREADS", "64")
    monkeypatch.setenv("TVM_NUM_THREADS", "2")
    first, second = doctor.cores()
    assert first.state == "note" and "0.5" in first.found
    assert (second.name, second.state) == ("OMP_NUM_THREADS", "note") and "at most 2" in second.advice
    monkeypatch.setattr(doctor, "core_quota", lambda: None)
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert [each.state for each in doctor.cores()] == ["ok"]


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert doctor.folder("cache CACHE", tmp_path / "a" / "b").state in ("ok", "note")
    assert not (tmp_path / "a").exists()
    (tmp_path / "file").write_text("")
    bad = doctor.folder("cache CACHE", tmp_path / "file" / "b")
    assert bad.state == "broken" and "not a folder" in bad.found and "CACHE" in bad.advice
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: usage)
    assert doctor.folder("cache CACHE", tmp_path).state == "broken"


def test_compilers(tmp_path: Path):
    assert doctor.compiler(None, "compiler", "install g++").advice == "install g++"
    liar = tmp_path / "liar"
    liar.write_text("#!/bin/sh\necho no space >&2\nexit 1\n")
    liar.chmod(0o755)
    bad = doctor.compiler([str(liar)], "compiler", "install g++")
    assert bad.state == "broken" and bad.found.endswith("fails: no space")
    assert doctor.compiler([str(tmp_path / "none")], "compiler", "install g++").state == "broken"
    if (found := next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)) is not None:
        assert doctor.compiler([found], "compiler", "").state == "ok"


def test_files_that_an_installation_lacks(tmp_path: Path):
    (tmp_path / "empty").write_text("")
    assert doctor.shipped("files", [tmp_path / "empty", tmp_path / "none"]).state == "broken"
    assert doctor.shipped("files", [Path(__file__)]).found == "1 files"


def torn_check() -> list[Finding]:
    raise MachineError("x.yaml: broken")


@pytest.mark.parametrize("as_json", [False, True])
def test_the_report_ends_with_1_where_something_is_broken(as_json: bool, capsys: pytest.CaptureFixture[str]):
    well = [lambda: [Finding("a", "ok", "1"), Finding("b", "note", "2", "do it")]]
    doctor.report("tool", well, as_json)
    text = capsys.readouterr().out
    assert json.loads(text)["ok"] is True if as_json else "nothing is broken" in text and "-> do it" in text
    with pytest.raises(typer.Exit) as ended:
        doctor.report("tool", [*well, torn_check], as_json)
    text = capsys.readouterr().out
    assert ended.value.exit_code == 1
    assert json.loads(text)["findings"][-1]["found"] == "x.yaml: broken" if as_json else "1 of 3 are broken" in text


@pytest.mark.parametrize("tool", ["fusion", "e2e"])
def test_both_tools_have_a_doctor(tool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip({"fusion": "tvm", "e2e": "torch"}[tool])
    environment = {**os.environ, "COSTMODEL_MACHINES": str(tmp_path)}
    words = [sys.executable, "-m", tool, "doctor", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    record = json.loads(done.stdout)
    assert done.returncode == (0 if record["ok"] else 1) and record["tool"] == tool
    names = {each["name"] for each in record["findings"]}
    assert {"Python", "numpy", "cores", "memory", "machine files"} <= names
    assert ("AMX" in names and "compiler" in names) if tool == "fusion" else "import torch" in names
    assert all(each["advice"] for each in record["findings"] if each["state"] == "broken")
    # Torn machine files and no temporary folder; libraries are imported above.
    (tmp_path / "torn.yaml").write_text("name: [")
    monkeypatch.setenv("COSTMODEL_MACHINES", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "torn.yaml"))
    monkeypatch.setattr(doctor, "_import", lambda name, advice: Finding(f"import {name}", "ok", "left out"))
    broken = CliRunner().invoke(importlib.import_module(f"{tool}.commands.cli").app, ["doctor", "--json"])
    assert broken.exit_code == 1, broken.output
    findings = {each["name"]: each["state"] for each in json.loads(broken.stdout)["findings"]}
    assert findings["temporary TMPDIR"] == "broken" and findings["memory"] != "broken"
