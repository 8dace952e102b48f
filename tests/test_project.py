"""The project as a package: entry points, typing markers, the lock file against the ranges, marks of tests."""

from __future__ import annotations

import ast
import importlib
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from costmodel.base.version import project_version
from tests.source_imports import PACKAGES, frameworks

ROOT = Path(__file__).resolve().parents[1]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT = PYPROJECT["project"]
SCRIPTS = PROJECT["scripts"]
LINES = (ROOT / "requirements.lock").read_text(encoding="utf-8").splitlines()
LOCK = [line for line in LINES if not line.startswith("#")]
INSTALLED = ("fusion", "e2e", "peers", "models", "docs", "dev")  # extras of `make setup`


@pytest.mark.parametrize("name", SCRIPTS)
def test_console_scripts_start_something_that_exists(name: str):
    module, _, function = SCRIPTS[name].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_console_scripts_are_those_of_nobody_else():
    others = [each for each in entry_points(group="console_scripts") if each.name in SCRIPTS]
    assert all(each.value.split(".")[0] in PACKAGES for each in others)


@pytest.mark.parametrize("package", PACKAGES)
def test_packages_say_that_they_are_typed(package: str):
    assert (ROOT / package / "py.typed").read_bytes() == b""
    assert "py.typed" in PYPROJECT["tool"]["setuptools"]["package-data"][package]


def test_the_lock_has_names_and_versions_alone():
    assert all(re.fullmatch(r"[\w.-]+==[\w.]+", line) for line in LOCK)
    assert len({canonicalize_name(line.split("==")[0]) for line in LOCK}) == len(LOCK)


def test_the_lock_fulfils_every_range():
    locked = {canonicalize_name(name): version for name, version in (line.split("==") for line in LOCK)}
    extras = [line for extra in INSTALLED for line in PROJECT["optional-dependencies"][extra]]
    for requirement in map(Requirement, [*PROJECT["dependencies"], *extras]):
        version = locked[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version, prereleases=True), requirement


def test_make_setup_installs_the_same_extras():
    assert f"EXTRAS := {','.join(INSTALLED)}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_coverage_is_of_all_packages_and_of_the_processes_that_tests_start():
    run = PYPROJECT["tool"]["coverage"]["run"]
    assert tuple(run["source_pkgs"]) == PACKAGES and run["patch"] == ["subprocess"] and run["parallel"]
    assert f"PACKAGES := {' '.join(PACKAGES)}\n" in (ROOT / "Makefile").read_text(encoding="utf-8")


# --- versions -------------------------------------------------------------------------------------

VERSION = PROJECT["version"]
CLASSIFIED = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))


def test_every_file_names_the_same_version():
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == VERSION
    released = re.findall(r"^## \[(.*?)\](.*)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert [name for name, _ in released[:2]] == ["Unreleased", VERSION]
    assert re.fullmatch(r" - \d{4}-\d\d-\d\d", released[1][1])
    assert f"version {VERSION[:3]}" in (ROOT / "docs" / "limits.md").read_text(encoding="utf-8")


def test_a_checkout_tells_its_own_version_and_others_what_is_installed(tmp_path: Path):
    assert project_version() == VERSION
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "somebody-else"\nversion = "7.7.7"\n')
    assert project_version(tmp_path) == project_version(tmp_path / "missing") != "7.7.7"
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "fusion-costmodel"\nversion = "7.7.7"\n')
    assert project_version(tmp_path) == "7.7.7"


def test_tools_take_the_oldest_python_for_the_least_one():
    assert SpecifierSet(PROJECT["requires-python"]) == SpecifierSet(f">={CLASSIFIED[0]}")
    assert PYPROJECT["tool"]["mypy"]["python_version"] == CLASSIFIED[0]
    assert PYPROJECT["tool"]["ruff"]["target-version"] == f"py{CLASSIFIED[0].replace('.', '')}"


def test_continuous_integration_runs_the_chores_with_every_python_of_the_classifiers():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8"))
    assert set(workflow[True]) == {"push", "pull_request"}  # YAML 1.1 reads "on" as true
    assert workflow["concurrency"]["cancel-in-progress"] is True
    (job,) = workflow["jobs"].values()
    assert job["strategy"]["matrix"] == {"python": CLASSIFIED} and job["timeout-minutes"] > 0
    assert job["env"]["PYTHON"] == "python${{ matrix.python }}"
    (python,) = (step["with"] for step in job["steps"] if "setup-python" in step.get("uses", ""))
    assert python["python-version"] == "${{ matrix.python }}" and python["cache"] == "pip"
    assert (ROOT / python["cache-dependency-path"]).is_file()
    commands = [step["run"] for step in job["steps"] if "run" in step]
    assert commands == [".ci/run", "make thorough", ".ci/wheel"]
    assert all(os.access(ROOT / each, os.X_OK) for each in commands if each.startswith("."))
    assert "\nthorough: " in (ROOT / "Makefile").read_text(encoding="utf-8")


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_make_takes_the_python_of_the_environment(tmp_path: Path):
    words = ["make", "--always-make", "--dry-run", "--silent", "setup", f"VENV={tmp_path / 'none'}"]
    environment = {**os.environ, "PYTHON": "the-python-of-the-matrix"}
    done = subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert "the-python-of-the-matrix -m venv" in done.stdout


# --- marks of tests -------------------------------------------------------------------------------


def test_a_test_file_is_marked_by_what_it_and_its_helpers_import(tmp_path: Path):
    sources = {
        "test_none.py": "import json",
        "test_direct.py": "def test():\n    import torch.nn",
        "test_skipped.py": "import pytest\npytest.importorskip('tvm')",
        "test_helped.py": "from toys import thing",
        "toys.py": "import tvm",
        "test_ours.py": "from e2e.capture.distributed.world import c10d",
    }
    for name, source in sources.items():
        (tmp_path / name).write_text(source)
    found = {name: set(frameworks(tmp_path / name)) for name in sources if name.startswith("test_")}
    assert found == {
        "test_none.py": set(),
        "test_direct.py": {"torch"},
        "test_skipped.py": {"tvm"},
        "test_helped.py": {"tvm"},
        "test_ours.py": {"torch"},
    }


# --- docstrings -----------------------------------------------------------------------------------

DOCUMENTED = 0.95  # of the public modules, classes, functions and methods of each package
# Methods that torch and TVM call by these names; what they are for is told there.
HOOKS = {"forward", "backward", "transform_module"}


def public_members(node: ast.Module | ast.ClassDef) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Public classes and functions right below ``node``."""
    for each in node.body:
        if isinstance(each, ast.ClassDef | ast.FunctionDef) and not each.name.startswith("_"):
            yield each


def promised_methods(trees: dict[str, ast.Module]) -> set[tuple[str, int]]:
    """Names and numbers of arguments of the methods that a protocol or a base class documents for all who have them."""
    classes = [each for tree in trees.values() for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]
    bases = {ast.unparse(base).partition("[")[0] for each in classes for base in each.bases}
    return {
        (method.name, len(method.args.args))
        for each in classes
        if each.name in bases or "Protocol" in map(ast.unparse, each.bases)
        for method in public_members(each)
        if isinstance(method, ast.FunctionDef) and ast.get_docstring(method)
    }


def undocumented(trees: dict[str, ast.Module]) -> tuple[list[str], int]:
    """Public names without a docstring of their own or one that is promised, and how many public names there are."""
    promised, lacking, count = promised_methods(trees), [], 0
    for path, tree in trees.items():
        found: list[tuple[str, ast.Module | ast.ClassDef | ast.FunctionDef]] = [(path, tree)]
        for member in public_members(tree):
            found.append((f"{path}:{member.name}", member))
            if isinstance(member, ast.ClassDef):
                methods = (
                    each
                    for each in public_members(member)
                    if each.name not in HOOKS
                    and not (isinstance(each, ast.FunctionDef) and (each.name, len(each.args.args)) in promised)
                )
                found.extend((f"{path}:{member.name}.{each.name}", each) for each in methods)
        count += len(found)
        lacking += [name for name, node in found if not ast.get_docstring(node)]
    return lacking, count


@pytest.mark.parametrize("package", PACKAGES)
def test_public_names_say_what_they_are(package: str):
    paths = sorted((ROOT / package).rglob("*.py"))
    trees = {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    lacking, count = undocumented(trees)
    assert 1 - len(lacking) / count >= DOCUMENTED, lacking


def test_only_what_a_base_class_documents_goes_without():
    source = """
'''A module.'''
class Base:
    '''A base.'''
    def told(self): '''Told for all.'''
class Derived(Base):
    def told(self): ...
    def untold(self): ...
    def forward(self): ...
def function(): ...
def _private(): ...
"""
    lacking, count = undocumented({"toy.py": ast.parse(source)})
    assert lacking == ["toy.py:Derived", "toy.py:Derived.untold", "toy.py:function"] and count == 5
