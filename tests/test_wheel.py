"""The wheel: everything that the packages read is in it, and it works where the checkout is not."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests.source_imports import PACKAGES

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("pyproject.toml", "README.md", "LICENSE", *PACKAGES)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built in a copy: setuptools leaves folders beside what it builds."""
    pytest.importorskip("setuptools", minversion="77")
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in PARTS:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, source / name)
    words = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index"]
    built = subprocess.run(
        [*words, "--wheel-dir", str(made), str(source)], capture_output=True, text=True, check=False, cwd=source
    )
    assert built.returncode == 0, built.stderr[-2000:]
    (path,) = made.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the wheel's content alone."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def run(installed: Path, elsewhere: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(installed), "COSTMODEL_MACHINES": str(elsewhere / "machines")}
    environment.pop("FUSION_RECORDS", None)
    return subprocess.run(
        [sys.executable, *arguments], capture_output=True, text=True, check=False, cwd=elsewhere, env=environment
    )


def test_every_file_of_the_packages_is_in_the_wheel_and_nothing_else(wheel: Path):
    ours = {
        path.relative_to(ROOT).as_posix()
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    inside = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert sorted(ours - inside) == []
    assert sorted(inside - ours) == []


def test_the_wheel_names_its_commands_and_is_typed(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    (entries,) = (name for name in names if name.endswith("entry_points.txt"))
    text = zipfile.ZipFile(wheel).read(entries).decode()
    assert {line.partition(" =")[0] for line in text.splitlines() if "=" in line} == {"costmodel", "e2e", "fusion"}
    assert all(f"{package}/py.typed" in names for package in PACKAGES)
    assert any("licenses/LICENSE" in name for name in names)


def test_the_packages_are_those_of_the_wheel(installed: Path, tmp_path: Path):
    code = f"import {', '.join(PACKAGES)}; print([each.__file__ for each in ({', '.join(PACKAGES)})])"
    done = run(installed, tmp_path, "-c", code)
    assert done.returncode == 0 and done.stdout.count(str(installed)) == len(PACKAGES), done.stdout + done.stderr


def test_clusters_and_fitted_models_are_found_elsewhere(installed: Path, tmp_path: Path):
    code = (
        "from costmodel.collectives import collective_cost_model; from costmodel.machines.cluster import load_cluster\n"
        "from costmodel.operators.collective_transfer import CollectiveTransfer\n"
        "from costmodel.gpu.fitted import all_fitted\n"
        "model = collective_cost_model(load_cluster('dgx-h100', 16, 2))\n"
        "print(model.estimate([CollectiveTransfer('all_reduce', 2.0**26, 16, 2)])[0].source, len(all_fitted()))"
    )
    done = run(installed, tmp_path, "-c", code)
    assert done.stdout.split()[0] == "fitted" and int(done.stdout.split()[1]) > 10, done.stderr


@pytest.mark.thorough
def test_a_step_is_predicted_elsewhere(installed: Path, tmp_path: Path):
    pytest.importorskip("torch")
    words = ("-m", "e2e", "predict", "--model", "gpt2", "--gpu", "t4", "--sequence-length", "64", "--json")
    done = run(installed, tmp_path, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    here = run(ROOT, tmp_path, *words)
    assert json.loads(done.stdout)["iteration_seconds"] == json.loads(here.stdout)["iteration_seconds"] > 0


def test_a_network_is_analysed_elsewhere(installed: Path, tmp_path: Path):
    pytest.importorskip("tvm")
    onnx = pytest.importorskip("onnx")
    import numpy as np
    from onnx import TensorProto, helper, numpy_helper

    weights = {"d": np.ones((8, 1, 3, 3), np.float32), "p": np.ones((16, 8, 1, 1), np.float32)}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["x", "d"], ["m"], "depthwise", group=8, pads=[1, 1, 1, 1]),
            helper.make_node("Conv", ["m", "p"], ["y"], "pointwise"),
        ],
        "pair",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 8, 28, 28])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 16, 28, 28])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    onnx.save(
        helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=10), tmp_path / "pair.onnx"
    )
    words = ("-m", "fusion", "analyze", "pair.onnx", "--machine", "xeon-amx-2c", "--threads", "1", "--json", "--all")
    done = run(installed, tmp_path, *words)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "depthwise-pointwise" in done.stdout
