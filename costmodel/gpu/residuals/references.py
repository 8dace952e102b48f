"""The GPUs on which learned models are asked, whatever GPU is at hand: as their files stand in the package."""

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

# What carries over to GPUs without tables depends on shapes as they look on this one.
NOMINAL = "a100-pcie-40gb"


@lru_cache(maxsize=64)
def packaged_machine(name: str) -> Machine | None:
    """The packaged GPU of that name; ``None`` if there is none."""
    # By what is there: a name of a foreign file may be longer than any path.
    path = next((each for each in (PACKAGED_DIRECTORY / "gpu").glob("*.yaml") if each.stem == name), None)
    return None if path is None else read_machine(path)


def nominal_features(family: Family[Any], operators: Sequence[AnyOperator], machine: Machine) -> np.ndarray:
    """Features (operators, features) of ``operators`` on a GPU built as ``machine``, at the rates of :data:`NOMINAL`.

    Multiprocessors and L2's capacity are those of ``machine``; no rate of it is asked.
    """
    nominal = packaged_machine(NOMINAL)
    assert nominal is not None
    cache = replace(nominal.memory[0], capacity_bytes=machine.memory[0].capacity_bytes)
    built = replace(nominal, gpu=machine.gpu, memory=(cache, *nominal.memory[1:]))
    return family.analyse(operators, built).matrix()
