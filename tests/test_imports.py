"""Imports go one way: costmodel <- schedules <- fusion and costmodel <- e2e, and nobody imports lab."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.source_imports import import_circle, imported_names, modules_below, order_violations

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "costmodel": {"costmodel"},
    "schedules": {"costmodel", "schedules"},
    "fusion": {"costmodel", "schedules", "fusion"},
    "e2e": {"costmodel", "e2e"},
    "lab": {"costmodel", "schedules", "fusion", "e2e", "lab"},
}
# Frameworks a package may not touch at all; inside functions included.
FORBIDDEN_FRAMEWORKS = {
    "costmodel": {"tvm", "torch", "onnx", "onnxruntime", "openvino"},
    "schedules": {"torch", "onnx", "onnxruntime", "openvino"},
    "fusion": set(),
    "e2e": {"tvm"},
    "lab": set(),
}
# Folders of each package from bottom to top: a module imports its own folder and those before it.
ORDER: dict[str, tuple[str, ...]] = {
    "costmodel": (
        "base", "pages", "operators", "machines", "cpu", "gpu", "collectives",
        "measure", "commands",
    ),
    "schedules": ("contract", "loops", "kernels", "measuring", "tuning"),
    "fusion": (
        "model", "relax", "analysis", "comparing", "acceptance", "report", "tuning",
        "commands",
    ),
    "e2e": (
        "step", "capture", "traces", "lowering", "price", "parallelism", "simulate", "explain", "whatif", "report",
        "sharding", "sources", "sweeps", "serving", "commands",
    ),
    "lab": ("data", "steps", "fit", "validate", "bench"),
}  # fmt: skip

# Modules below this folder that say `TORCH = True` measure with torch, and import it when they are used.
MAY_BE_MARKED = ROOT / "costmodel" / "measure"


def is_marked(source: str) -> bool:
    """Whether the module ``source`` says ``TORCH = True`` at its top level."""
    return any(isinstance(node, ast.Assign) and ast.unparse(node) == "TORCH = True" for node in ast.parse(source).body)


def violations(package: str, source: str) -> set[str]:
    """Roots that ``package`` imports in ``source`` but may not."""
    roots = {name.split(".")[0] for name in imported_names(source)}
    return (roots & MAY_IMPORT.keys()) - MAY_IMPORT[package] | roots & FORBIDDEN_FRAMEWORKS[package]


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_package_imports_only_what_lies_below_it(package: str):
    found = {
        str(path.relative_to(ROOT)): bad
        for path in sorted((ROOT / package).rglob("*.py"))
        if (bad := violations(package, source := path.read_text(encoding="utf-8")))
        and not (bad == {"torch"} and MAY_BE_MARKED in path.parents and is_marked(source))
    }
    assert not found


def test_a_mark_is_an_assignment_at_the_top_level():
    assert is_marked("import torch\nTORCH = True\n")
    assert not is_marked("import torch\n# TORCH = True\ndef f():\n    TORCH = True\n")


def test_the_check_sees_a_forbidden_edge_wherever_it_hides():
    assert violations("costmodel", "def f():\n    from schedules.contract.cpu_target import host_target") == {
        "schedules"
    }
    assert violations("e2e", "import fusion.model.conv_graph as g") == {"fusion"}
    assert violations("costmodel", "import numpy, tvm") == {"tvm"}
    assert violations("fusion", "from schedules import layout\nimport costmodel.base.errors, tvm") == set()


@pytest.mark.parametrize("package", ORDER)
def test_folders_of_a_package_import_only_those_below_them(package: str):
    sources = {name: path.read_text(encoding="utf-8") for name, path in modules_below(ROOT, (package,)).items()}
    assert order_violations(package, ORDER[package], sources) == []


@pytest.mark.parametrize("package", ["costmodel", "schedules", "fusion", "e2e"])
def test_no_modules_import_each_other(package: str):
    sources = {name: path.read_text(encoding="utf-8") for name, path in modules_below(ROOT, (package,)).items()}
    assert import_circle(sources) == []


def test_a_circle_is_seen_wherever_it_hides():
    sources = {"toy.a": "def f():\n    from toy.b import g", "toy.b": "import toy.c", "toy.c": "from toy import a"}
    assert {*import_circle(sources)} == {*sources}
    assert import_circle({**sources, "toy.c": "import sys"}) == []


TOY = {
    "toy": "",
    "toy.cli": "from toy.top import thing",
    "toy.base": "from toy.cli import main",
    "toy.base.units": "import toy.base.other",
    "toy.top": "from toy.base import units",
    "toy.top.thing": "from toy.top import other\nfrom toy.base.units import METRE",
}
UPWARDS = {
    "import": "import toy.top.thing",
    "from": "from toy.top import thing",
    "of the folder": "from toy import top",
    "relative": "from ..top import thing",
    "in a function": "def f():\n    from toy.top.thing import g",
    "for types": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from toy.top.thing import G",
    "by name": "import importlib\nimportlib.import_module('toy.top.thing')",
    "by part of a name": "from importlib import import_module\ndef f(n):\n    return import_module(f'toy.top.{n}')",
    "as a program": "import subprocess, sys\nsubprocess.run([sys.executable, '-m', 'toy.top', 'x'])",
}


def test_the_order_allows_the_own_folder_and_those_below():
    assert order_violations("toy", ("base", "top"), TOY) == []


@pytest.mark.parametrize("kind", UPWARDS)
def test_the_order_forbids_an_import_upwards_in_any_dress(kind: str):
    found = order_violations("toy", ("base", "top"), {**TOY, "toy.base.units": UPWARDS[kind]})
    assert found and all(line.startswith("toy.base.units -> toy.top") for line in found)


def test_a_folder_without_a_place_is_named():
    sources = {**TOY, "toy.new": "", "toy.new.part": ""}
    assert order_violations("toy", ("base", "top"), sources)[0] == "toy.new: folder new has no place in the order"


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_importing_a_package_loads_no_framework(package: str):
    code = f"import sys, {package}; sys.exit(bool({{'tvm', 'torch', 'onnxruntime', 'openvino'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_suites_of_measurements_load_torch_only_when_they_run():
    code = "import sys, costmodel.commands.cli, costmodel.measure.suites; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_command_line_answers_help_without_a_framework():
    frameworks = "{'tvm', 'torch', 'onnxruntime', 'openvino'}"
    code = f"import sys, fusion.commands.cli; sys.exit(bool({frameworks} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_command_line_of_predictions_starts_without_libraries_of_numbers():
    code = "import sys, e2e.commands.cli; sys.exit(bool({'torch', 'numpy', 'scipy', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
