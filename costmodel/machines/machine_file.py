"""Reader and writer of machine files, strict YAML. Every error is a :class:`MachineError` naming file and key.

The keys are the fields of :class:`costmodel.machines.machine_records.Machine` without their units; docs/extending.md
explains them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from costmodel.base.errors import MachineError, OutputError
from costmodel.base.units import format_quantity
from costmodel.base.whole_file import write_whole
from costmodel.machines.machine_records import Machine
from costmodel.machines.record_file import file_content, read_mapping, to_record
from costmodel.machines.variant_file import variant_file, with_what_follows


def read_machine(path: Path) -> Machine:
    """Read the machine described by the YAML file ``path``, which may be a variant of another
    (:mod:`costmodel.machines.variant_file`); :class:`MachineError` names the file and the key.
    """
    document = read_mapping(
        path, MachineError, "not a machine file; it must be a mapping with name, kind, compute, memory ..."
    )
    variant = variant_file(document, path, Path(__file__).parent / "gpu")
    machine = to_record(variant.merged if variant else document, Machine, path, MachineError)
    if variant:
        base = to_record(variant.base, Machine, variant.path, MachineError)
        if base.gpu is None or machine.gpu is None:
            raise MachineError(f"{path}: variant_of: {variant.name} is no GPU; write the whole file instead")
        try:
            machine = with_what_follows(machine, base, variant)
        except ValueError as error:
            raise MachineError(f"{path}: not a variant of {variant.name} ({error}); correct the value") from None
    machine = replace(machine, source=str(path))
    problem = _problem(machine)
    if problem:
        raise MachineError(f"{path}: {problem}")
    return machine


def _problem(machine: Machine) -> str:
    """Description of an inconsistency in ``machine``; empty if there is none."""
    levels = [level.name for level in machine.memory]
    kinds = [link.kind for link in machine.links]
    if machine.kind == "cpu" and (machine.gpu is not None or machine.links):
        return "gpu, links: only for kind gpu; remove them"
    if machine.kind == "gpu" and levels != ["L2", "DRAM"]:
        return "memory: a GPU has the levels L2, DRAM, in this order"
    if any(level.usable_bytes is not None and level.usable_bytes > level.capacity_bytes for level in machine.memory):
        return "memory: usable is more than the capacity; correct one of them"
    if machine.kind == "gpu" and machine.gpu is None:
        return "gpu: missing; add it"
    if "network" in kinds:
        return f"links.{kinds.index('network')}.kind: a network has a file of its own; give 'pcie' or 'nvlink'"
    if len(set(kinds)) != len(kinds):
        return "links: two of the same kind; keep one"
    if len(set(levels)) != len(levels):
        return f"memory: two levels have the same name ({', '.join(levels)}); rename one"
    return next(_beyond_datasheet(machine), "")


def _beyond_datasheet(machine: Machine) -> Iterator[str]:
    """Descriptions of figures in a GPU's file that exceed its datasheet."""
    if machine.kind != "gpu":
        return
    most = machine.above_datasheet
    for dtype, rate in machine.compute.items():
        sustained, burst = rate.sustained.at(1), rate.short_load
        if rate.datasheet is not None and max(sustained, burst) > most * rate.datasheet:
            name = "sustained" if sustained > most * rate.datasheet else "burst"
            told = format_quantity(getattr(rate, name) if name == "burst" else sustained, "FLOP/s")
            least = format_quantity(rate.datasheet, "FLOP/s")
            yield f"compute.{dtype}.{name}: {told} is more than the datasheet's {least}; correct one of them"
        if sustained > burst:
            yield f"compute.{dtype}.burst: less than what is sustained; leave it out where the clock holds"
    for level in machine.memory:
        if level.datasheet is not None and level.bandwidth.at(1) > level.datasheet:
            yield f"memory.{level.name}.bandwidth: more than its datasheet says; correct one of them"
    for link in machine.links:
        if link.datasheet is not None and link.bandwidth > link.datasheet:
            yield f"links.{link.kind}.bandwidth: more than its datasheet says; correct one of them"


def write_machine(machine: Machine, path: Path, comment: str = "") -> None:
    """Write ``machine`` so that :func:`read_machine` restores it (to four digits); ``OutputError`` on failure."""
    header = "".join(f"# {line}\n" for line in comment.splitlines())
    text = header + yaml.safe_dump(machine_record(machine), sort_keys=False, width=120, allow_unicode=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place with -o FILE") from None


def machine_record(machine: Machine) -> dict[str, Any]:
    """Content of the machine file, quantities as text; the same record feeds YAML, ``--json`` and tables."""
    return file_content(machine)
