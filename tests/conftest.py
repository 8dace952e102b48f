"""Marks for all tests: ``tvm`` and ``torch`` by what a test file imports; ``slow`` is set by hand where it is true."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

# Two workers of two threads on two cores: threads that wait for others sleep instead of taking a core from them.
# As many threads as ever compute; set before a library reads it, and passed on to the processes that tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Who starts the tests may ignore Ctrl-C (nohup, a job in the background), which processes inherit: tests of it would
# wait for ever.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest

from tests.source_imports import frameworks
from tests.torch_switches import restore_defaults

# As the commands do (e2e/commands/cli.py): among all that libraries have made, looking for garbage as often as usual
# takes a quarter of the time of tests of predictions.
gc.set_threshold(100_000, 20, 20)

# Files that take a minute or so by themselves begin first, so that no worker is left with one at the end (files are
# handed out whole, in this order: `--no-loadscope-reorder` in the Makefile).
LONG_FILES = (
    "test_e2e_api.py",
    "test_tutorials.py",
    "test_stock_meta_schedule.py",
    "test_tuning.py",
    "test_fusion_api.py",
    "test_measured_models.py",
    "test_runner.py",
    "test_kills.py",
    "test_engines.py",
    "test_parallel_build.py",
    "test_templates.py",
    "test_conv_pair.py",
)
LONG_FOLDERS = ("fusion/commands", "fusion/tuning", "fusion/relax", "e2e/commands", "e2e/capture")


CORES = os.sched_getaffinity(0)
COMPILERS = ("g++", "gcc", "clang++", "clang", "c++", "cc")  # as TVM looks for them


@pytest.fixture(autouse=True)
def default_tf32_switches() -> Iterator[None]:
    """What a captured script sets in PyTorch stays for the process; the next test begins with the defaults."""
    yield
    restore_defaults()


@pytest.fixture(autouse=True)
def all_cores() -> Iterator[None]:
    """With one thread TVM pins the process to one core, and the processes that later tests start would inherit that."""
    yield
    if os.sched_getaffinity(0) != CORES:
        os.sched_setaffinity(0, CORES)


def pytest_itemcollected(item: pytest.Item) -> None:
    for mark in frameworks(item.path):
        item.add_marker(mark)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(map(os.environ.get, ("CXX", "CC"))) and not any(map(shutil.which, COMPILERS)):
        for item in items:
            if item.get_closest_marker("tvm"):
                item.add_marker(pytest.mark.skip(reason="there is no compiler, which TVM links kernels with"))
    items.sort(key=lambda item: not _is_long(item.path))  # stable: else the order stays


def _is_long(path: Path) -> bool:
    return path.name in LONG_FILES or path.parent.as_posix().endswith(LONG_FOLDERS)
