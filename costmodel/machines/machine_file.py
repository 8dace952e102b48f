"""Machine files: strict YAML in, strict YAML out. Every mistake is a :class:`MachineError` naming file and key.

The keys are the fields of :class:`costmodel.machines.machine_records.Machine` without their units;
docs/adding-a-machine.md explains them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from costmodel.base.errors import MachineError, OutputError
from costmodel.base.whole_file import write_whole
from costmodel.machines.machine_records import Machine
from costmodel.machines.record_file import file_content, read_mapping, to_record
from costmodel.machines.variant_file import whole_document


def read_machine(path: Path) -> Machine:
    """The machine described by the YAML file ``path``, which may be a variant of another
    (:mod:`costmodel.machines.variant_file`); :class:`MachineError` names the file and the key.
    """
    document = read_mapping(
        path, MachineError, "not a machine file; it must be a mapping with name, kind, compute, memory ..."
    )
    document = whole_document(document, path, Path(__file__).parent / "gpu")
    machine = replace(to_record(document, Machine, path, MachineError), source=str(path))
    problem = _problem(machine)
    if problem:
        raise MachineError(f"{path}: {problem}")
    return machine


def _problem(machine: Machine) -> str:
    """What contradicts itself in ``machine``; empty where nothing does."""
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
    return ""


def write_machine(machine: Machine, path: Path, comment: str = "") -> None:
    """Writes ``machine`` so that :func:`read_machine` gives it back (four digits); ``OutputError`` if it cannot."""
    header = "".join(f"# {line}\n" for line in comment.splitlines())
    text = header + yaml.safe_dump(machine_record(machine), sort_keys=False, width=120, allow_unicode=True)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place with -o FILE") from None


def machine_record(machine: Machine) -> dict[str, Any]:
    """The content of the machine file, quantities as text; the same record feeds YAML, ``--json`` and tables."""
    return file_content(machine)
