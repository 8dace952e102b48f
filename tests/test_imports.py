"""Imports go one way: costmodel <- schedules <- fusion and costmodel <- e2e."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
MAY_IMPORT = {
    "costmodel": {"costmodel"},
    "schedules": {"costmodel", "schedules"},
    "fusion": {"costmodel", "schedules", "fusion"},
    "e2e": {"costmodel", "e2e"},
}
# Frameworks a package may not touch at all; inside functions included.
FORBIDDEN_FRAMEWORKS = {
    "costmodel": {"tvm", "torch", "onnx", "onnxruntime", "openvino"},
    "schedules": {"torch", "onnx", "onnxruntime", "openvino"},
    "fusion": set(),
    "e2e": {"tvm"},
}


# Modules below this folder that say `TORCH = True` measure with torch, and import it when they are used.
MAY_BE_MARKED = ROOT / "costmodel" / "measure"


def is_marked(source: str) -> bool:
    """Whether the module ``source`` says ``TORCH = True`` at its top level."""
    return any(isinstance(node, ast.Assign) and ast.unparse(node) == "TORCH = True" for node in ast.parse(source).body)


def imported_roots(source: str) -> set[str]:
    """Top-level names of every import in ``source``, also those inside functions and TYPE_CHECKING blocks."""
    roots: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            roots.update(alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            roots.add(node.module.split(".")[0])
    return roots


def violations(package: str, source: str) -> set[str]:
    """Roots that ``package`` imports in ``source`` but may not."""
    roots = imported_roots(source)
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
    assert violations("costmodel", "def f():\n    from schedules.target import host_target") == {"schedules"}
    assert violations("e2e", "import fusion.graph as g") == {"fusion"}
    assert violations("costmodel", "import numpy, tvm") == {"tvm"}
    assert violations("fusion", "from schedules import layout\nimport costmodel.errors, tvm") == set()


@pytest.mark.parametrize("package", MAY_IMPORT)
def test_importing_a_package_loads_no_framework(package: str):
    code = f"import sys, {package}; sys.exit(bool({{'tvm', 'torch', 'onnxruntime', 'openvino'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_suites_of_measurements_load_torch_only_when_they_run():
    code = "import sys, costmodel.cli, costmodel.measure.suites; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_command_line_answers_help_without_a_framework():
    code = "import sys, fusion.cli; sys.exit(bool({'tvm', 'torch', 'onnxruntime', 'openvino'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_the_command_line_of_predictions_starts_without_libraries_of_numbers():
    code = "import sys, e2e.cli; sys.exit(bool({'torch', 'numpy', 'scipy', 'pydantic'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
