"""Identity of the CPU of a measurement: the properties that determine its code, and the name of the chip."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path

from schedules.contract.cpu_target import CpuTarget

_NAMED_BY = ("vendor_id", "cpu family", "model", "stepping")


@dataclass(frozen=True)
class CpuIdentity:
    """Identity of a CPU; the fields after ``chip`` are those of :class:`schedules.contract.cpu_target.CpuTarget`."""

    # Vendor, family, model and stepping from CPUID, which virtual machines do not change.
    chip: str
    mcpu: str
    features: tuple[str, ...]
    lanes: int
    registers: int
    l1_bytes: int
    l2_bytes: int

    def runs_alike(self, other: CpuIdentity) -> bool:
        """True if both get the same code, with the same cache sizes."""
        return replace(self, chip=other.chip) == other

    def distance(self, other: CpuIdentity) -> float:
        """Dissimilarity of the code of both; infinite with other vectors or registers, whose configuration spaces
        differ.

        A feature of only one CPU counts as much as caches twice as large.
        """
        if (self.lanes, self.registers) != (other.lanes, other.registers):
            return math.inf
        caches = ((self.l1_bytes, other.l1_bytes), (self.l2_bytes, other.l2_bytes))
        features = len(set(self.features) ^ set(other.features)) + (self.mcpu != other.mcpu)
        return features + sum(abs(math.log2(one / two)) for one, two in caches)

    def target(self, threads: int) -> CpuTarget:
        """This CPU with ``threads`` threads."""
        return CpuTarget(
            self.lanes, self.registers, self.mcpu, self.features, threads, self.l1_bytes, self.l2_bytes
        )  # fmt: skip


def identity_of(cpu: CpuTarget) -> CpuIdentity:
    """Identity of ``cpu``, which must be the CPU of this process."""
    return CpuIdentity(
        chip_name(), cpu.mcpu, cpu.features, cpu.lanes, cpu.registers, cpu.l1_bytes, cpu.l2_bytes
    )  # fmt: skip


def chip_name(cpuinfo: str | None = None) -> str:
    """Vendor, family, model and stepping, e.g. ``AuthenticAMD 25/17/1``; empty if unknown."""
    if cpuinfo is None:
        try:
            cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        except OSError:
            return ""
    fields: dict[str, str] = {}
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        fields.setdefault(name.strip(), value.strip())
    vendor, *numbers = (fields.get(name, "") for name in _NAMED_BY)
    return f"{vendor} {'/'.join(numbers)}" if vendor and all(numbers) else ""
