"""Reference GPUs on which learned models are evaluated, whatever the actual GPU: their packaged files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from costmodel.gpu.families.family import Family
from costmodel.machines.machine_catalog import PACKAGED_DIRECTORY
from costmodel.machines.machine_file import read_machine
from costmodel.machines.machine_records import Machine
from costmodel.operators.any_operator import AnyOperator

# Shape corrections for GPUs without tables use features computed with the rates of this GPU.
NOMINAL = "a100-pcie-40gb"


@lru_cache(maxsize=64)
def packaged_machine(name: str) -> Machine | None:
    """Packaged GPU named ``name``, or ``None``."""
    # Compares with existing files: a name from a user's file may be longer than any path.
    path = next((each for each in (PACKAGED_DIRECTORY / "gpu").glob("*.yaml") if each.stem == name), None)
    return None if path is None else read_machine(path)


def known_as(machine: Machine) -> str:
    """Name under which models know ``machine``: its own if a packaged GPU has it, else that of a packaged GPU that
    differs only in names, texts, the power limit (whose effect the rates include) and memory capacity (equal capacity
    preferred); its own if there is none.
    """
    if packaged_machine(machine.name):
        return machine.name
    same = [
        packaged
        for path in sorted((PACKAGED_DIRECTORY / "gpu").glob("*.yaml"))
        if (packaged := packaged_machine(path.stem)) and _figures(packaged) == _figures(machine)
    ]
    as_large = [each for each in same if each.memory[-1].capacity_bytes == machine.memory[-1].capacity_bytes]
    return next((each.name for each in (*as_large, *same)), machine.name)


def _figures(machine: Machine | None) -> object:
    """Figures of ``machine`` that affect kernels."""
    if machine is None or machine.gpu is None:
        return None
    compute = {name: (each.sustained, each.burst, each.datasheet) for name, each in machine.compute.items()}
    levels = [(each.bandwidth, each.datasheet, each.latency_seconds) for each in machine.memory]
    caches = [each.capacity_bytes for each in machine.memory[:-1]]
    links = [(each.kind, each.bandwidth, each.latency_seconds) for each in machine.links]
    chip = replace(machine.gpu, power_watts=0.0, origin="")
    return chip, machine.gpu.power_limited, compute, levels, caches, links, machine.region_seconds(1)


def nominal_features(family: Family[Any], operators: Sequence[AnyOperator], machine: Machine) -> np.ndarray:
    """Features (operators, features) of ``operators`` on a GPU built like ``machine``, at the rates of :data:`NOMINAL`.

    Multiprocessors and L2's capacity are those of ``machine``; its rates are not used.
    """
    nominal = packaged_machine(NOMINAL)
    assert nominal is not None
    cache = replace(nominal.memory[0], capacity_bytes=machine.memory[0].capacity_bytes)
    built = replace(nominal, gpu=machine.gpu, memory=(cache, *nominal.memory[1:]))
    return family.analyse(operators, built).matrix()
