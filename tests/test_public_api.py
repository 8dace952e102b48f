"""Names that the packages offer: lazy, complete, typed; the examples of docs/api.md and the loops of both tools run."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
OFFERING = ("costmodel", "fusion", "e2e")
PAGE = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
LOOPS = {"fusion": ROOT / "examples" / "tune_loop.py", "e2e": ROOT / "examples" / "predict_loop.py"}
BLOCKS = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)

USER = """
import costmodel
import e2e
import fusion
from costmodel.operators.layers import Dense

reveal_type(e2e.predict("gpt2", gpu="h100-sxm").iteration_seconds)
reveal_type(e2e.sweep("gpt2", gpu="h100-sxm", gpus=8)[0].samples_per_second)
reveal_type(fusion.tune("m.onnx", "build").speedup_over_onnxruntime)
reveal_type(fusion.analyze("m.onnx").sites[0].fuse)
reveal_type(fusion.load("build").inputs[0].shape)
reveal_type(costmodel.estimate(Dense(1, 2, 3), "toy").bound)
reveal_type(costmodel.estimate([Dense(1, 2, 3)], "toy"))
e2e.predict("gpt2", gpu="h100-sxm", batchsize=4)
e2e.predict("gpt2", gpu="h100-sxm", dtype="float12")
fusion.laod("build")
"""
REVEALED = [
    "float",
    "float | None",
    "float",
    "bool",
    "tuple[int, ...]",
    "str",
    "list[costmodel.cost_model.Estimate]",
]
REFUSED = ['"batchsize" for "predict"', "incompatible type \"Literal['float12", 'Module has no attribute "laod"']


def run(*words: str, folder: Path = ROOT, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    known = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    command = [sys.executable, *words]
    return subprocess.run(command, cwd=folder, env=known, capture_output=True, text=True, timeout=timeout, check=False)


@pytest.mark.parametrize("package", OFFERING)
def test_importing_a_package_loads_no_library_of_numbers(package: str):
    libraries = "{'tvm', 'torch', 'onnx', 'onnxruntime', 'numpy', 'scipy', 'pydantic', 'typer', 'rich'}"
    assert run("-c", f"import sys, {package}; sys.exit(str({libraries} & set(sys.modules) or 0))").stderr == "0\n"


@pytest.mark.parametrize("package", OFFERING)
def test_what_a_package_offers_is_the_same_for_readers_types_and_callers(package: str):
    module = importlib.import_module(package)
    tree = ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8"))
    typed = {alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module
             for alias in node.names if node.module.startswith(package)}  # fmt: skip
    typed.pop("lazy_names", None)
    homes = next(node for node in ast.walk(tree) if isinstance(node, ast.Dict))
    assert ast.literal_eval(homes) == typed and sorted(typed) == module.__all__ == sorted(module.__all__)
    assert set(typed) <= set(dir(module))
    assert not {path.name for path in (ROOT / package).iterdir() if path.is_dir()} & set(typed)


@pytest.mark.parametrize("package", OFFERING)
def test_every_name_of_a_package_is_there_and_documented(package: str):
    if package == "fusion":
        pytest.importorskip("tvm")
    module = importlib.import_module(package)
    for name in module.__all__:
        assert getattr(module, name).__doc__ and name in vars(module)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nothing'"):
        _ = module.nothing


@pytest.mark.thorough
def test_types_reach_a_users_file(tmp_path: Path):
    (tmp_path / "user.py").write_text(USER)
    options = ("--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache"))
    done = run("-m", "mypy", *options, "--follow-imports", "silent", str(tmp_path / "user.py"))
    found = [each.replace("builtins.", "") for each in re.findall(r'Revealed type is "(.*)"', done.stdout)]
    assert found == REVEALED, done.stdout + done.stderr
    errors = [line for line in done.stdout.splitlines() if " error: " in line]
    assert len(errors) == len(REFUSED)
    assert all(words in line for words, line in zip(REFUSED, errors, strict=True))


def write_model(path: Path) -> None:
    """ONNX: 1x1 convolution -> ReLU -> depthwise 3x3, 16 channels on 12x12."""
    import numpy as np
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    generator = np.random.default_rng(0)
    weights = {"pw": generator.normal(size=(16, 16, 1, 1)), "dw": generator.normal(size=(16, 1, 3, 3))}
    nodes = [
        helper.make_node("Conv", ["x", "pw"], ["a"], name="pointwise"),
        helper.make_node("Relu", ["a"], ["b"]),
        helper.make_node("Conv", ["b", "dw"], ["y"], name="depthwise", group=16, pads=[1, 1, 1, 1]),
    ]
    shape = [1, 16, 12, 12]
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy"]
    constants = [numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()]
    graph = helper.make_graph(nodes, "small", ends[:1], ends[1:], constants)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9), path)


def test_the_page_has_an_example_of_every_function():
    for name in ("e2e.predict", "e2e.sweep", "fusion.analyze", "fusion.tune", "fusion.load", "costmodel.estimate"):
        assert any(f"{name}(" in block for block in BLOCKS)
    assert all(block.startswith(tuple(f"import {package}\n" for package in OFFERING)) for block in BLOCKS)


# Programs one after the other, each by itself but for the libraries, which take longer to load than they to run.
IN_TURN = """
import runpy, sys
for name in sys.argv[1:]:
    print("program", name, flush=True)
    runpy.run_path(name, run_name="__main__")
"""


@pytest.mark.thorough
@pytest.mark.parametrize("package", OFFERING)
def test_the_examples_of_the_page_run(package: str, tmp_path: Path):
    if package == "fusion":
        pytest.importorskip("tvm")
        write_model(tmp_path / "model.onnx")
    elif package == "e2e":
        pytest.importorskip("torch")
    names = []
    for number, block in enumerate(BLOCKS, 1):
        if block.startswith(f"import {package}\n"):
            names.append(f"example{number}.py")
            (tmp_path / names[-1]).write_text(block)
    done = run("-c", IN_TURN, *names, folder=tmp_path, COSTMODEL_MACHINES=str(tmp_path / "machines"))
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-2000:]
    told = re.split(r"^program (.*)$", done.stdout, flags=re.MULTILINE)
    assert told[1::2] == names and all(each.strip() for each in told[2::2]), done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    "package", [pytest.param(each, marks=pytest.mark.thorough if each == "fusion" else ()) for each in LOOPS]
)
def test_the_loop_of_the_example_runs(package: str, tmp_path: Path):
    pytest.importorskip("tvm" if package == "fusion" else "torch")
    write_model(tmp_path / "model.onnx")
    done = run(str(LOOPS[package]), folder=tmp_path)
    assert done.returncode == 0 and done.stdout.strip(), done.stderr[-2000:]
    if package == "fusion":
        assert float(done.stdout.split()[-1]) < 1e-4  # the largest difference from FP64
