from __future__ import annotations

import dataclasses

import pytest

from costmodel.machines.machine_file import load_machine
from costmodel.machines.machine_records import (
    ComputeRate,
    GpuChip,
    Link,
    Machine,
    MemoryLevel,
    ParallelRegion,
    PerThreads,
    VectorUnit,
)


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


def _number(value: float) -> PerThreads:
    return PerThreads(((1, value),))


@pytest.fixture
def toy_gpu() -> Machine:
    """10 SMs, 1e9 flop/s, L2 of 1 MB at 1e7 B/s, DRAM 1e6 B/s, no kernel floor, PCIe 1e5 B/s after 1 s."""
    return Machine(
        name="toy-gpu",
        kind="gpu",
        description="for mental arithmetic",
        compute={"float32": ComputeRate(_number(1e9), "invented", 2e9)},
        memory=(
            MemoryLevel("L2", 1e6, True, _number(1e7), "invented"),
            MemoryLevel("DRAM", 1e9, True, _number(1e6), "invented", datasheet=2e6),
        ),
        parallel_region=ParallelRegion(_number(0.0), "invented"),
        gpu=GpuChip("toy", 10, 64, 1e9, 2048, 65536.0, 65536.0, 250.0, "invented"),
        links=(Link("pcie", 1e5, 1.0, "invented"),),
    )
