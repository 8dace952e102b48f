from __future__ import annotations

import dataclasses

import pytest

from costmodel.machine import Machine, VectorUnit, load_machine


@pytest.fixture
def toy() -> Machine:
    """Peak 100 flop/s; L1 500 B usable at 100 B/s, L2 5000 B at 50 B/s, DRAM 10 B/s; on two threads twice that
    (DRAM excepted), and 1 s to start a parallel region. No vector unit."""
    return load_machine("toy")


@pytest.fixture
def vector_toy(toy: Machine) -> Machine:
    """The toy machine with registers of 4 floats, 6 of them (2 accumulators)."""
    return dataclasses.replace(toy, vector=VectorUnit(bits=128, registers=6, features=(), origin="test"))


@pytest.fixture(autouse=True)
def user_machines(tmp_path, monkeypatch):
    """Keeps the user's own machine files out of the tests; returns the directory in their place."""
    directory = tmp_path / "machines"
    monkeypatch.setenv("COSTMODEL_MACHINES", str(directory))
    return directory
