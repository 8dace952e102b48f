"""The project as a package: entry points, typing markers, the lock file against the ranges, marks of tests."""

from __future__ import annotations

import ast
import importlib
import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from source_imports import PACKAGES, frameworks

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
