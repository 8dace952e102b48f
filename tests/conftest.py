"""Marks for all tests: ``tvm`` and ``torch`` by what a test file imports; ``slow`` is set by hand where it is true."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests

from source_imports import frameworks


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in frameworks(item.path):
        item.add_marker(mark)
