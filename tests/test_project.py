"""The project as a package: entry points, typing markers, the lock file against the ranges, marks of tests."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from costmodel.base.command_line import project_version
from tests.source_imports import PACKAGES

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


# --- versions -------------------------------------------------------------------------------------

VERSION = PROJECT["version"]


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
