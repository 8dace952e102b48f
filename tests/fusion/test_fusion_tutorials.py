"""Tutorials that tune networks, block by block; rules, and what is tested of all tutorials: ``test_tutorials.py``."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.tutorial_blocks import TUTORIALS, require, run_page, uses


def test_there_are_some():
    assert {name for name in TUTORIALS if uses("fusion", name)} == {"fuse-and-deploy", "tvm-pipeline"}


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.parametrize("name", [name for name in TUTORIALS if uses("fusion", name)])
def test_the_commands_of_a_tutorial_print_what_it_shows(name: str, tmp_path: Path):
    require("fusion", name)
    if uses("g++", name) and shutil.which("g++") is None:
        pytest.skip("there is no g++")
    assert run_page(TUTORIALS[name], tmp_path) == []
