"""Copies between host and device over PCIe or NVLink-C2C, and between devices over NVLink or PCIe.

Copies within a device are element-wise kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from costmodel.base.errors import MachineError
from costmodel.gpu.families.family import Family, KernelAnalysis, safe_log2
from costmodel.gpu.families.rates import dram_bandwidth
from costmodel.machines.machine_records import Link, Machine
from costmodel.operators.device_work import MemoryCopy

# The driver stages pageable memory through a pinned buffer: about half the rate of pinned memory remains
# (NVIDIA, "How to Optimize Data Transfers in CUDA C/C++").
_PAGEABLE_SHARE = 0.5


class Copies(Family[MemoryCopy]):
    """Copies over a link."""

    name = "copy"

    def analyse(self, operators: Sequence[MemoryCopy], machine: Machine) -> KernelAnalysis:
        rows = [_terms(each, machine) for each in operators]
        names = ("memory:DRAM", "link", "launch")
        terms = {name: np.array([row[place] for row in rows], dtype=float) for place, name in enumerate(names)}
        features = {"size": safe_log2(np.array([each.size_bytes for each in operators]))}
        return KernelAnalysis(np.maximum(terms["memory:DRAM"], terms["link"]) + terms["launch"], terms, features)

    def least(self, operators: Sequence[MemoryCopy], machine: Machine) -> np.ndarray:
        return np.zeros(len(operators))  # one end is in another memory, and no table exists to learn from

    def covers(self, operator: MemoryCopy) -> bool:
        return False  # no measured tables yet


def _terms(operator: MemoryCopy, machine: Machine) -> tuple[float, float, float]:
    """Seconds in DRAM, on the link, and of the start."""
    link = _link(machine, operator.kind)
    share = 1.0 if operator.pinned or operator.kind == "peer" else _PAGEABLE_SHARE
    one_way = operator.size_bytes / dram_bandwidth(machine)
    return one_way, operator.size_bytes / (share * link.bandwidth), link.latency_seconds


def is_within_device(operator: MemoryCopy) -> bool:
    """True if no link is crossed."""
    return operator.kind in ("device_to_device", "memset")


def _link(machine: Machine, kind: str) -> Link:
    link = machine.link("nvlink" if kind == "peer" else "c2c") or machine.link("pcie")
    if link is None:
        raise MachineError(f"{machine.source or machine.name}: no link for copies ({kind}); add links: - kind: pcie")
    return link
