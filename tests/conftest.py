"""Marks for all tests: ``tvm`` and ``torch`` by what a test file imports; ``slow`` is set by hand where it is true."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Two workers of two threads on two cores: threads that wait for others sleep instead of taking a core from them.
# As many threads as ever compute; set before a library reads it, and passed on to the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # helpers beside the tests

from source_imports import frameworks


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in frameworks(item.path):
        item.add_marker(mark)
