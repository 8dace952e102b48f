"""Files of fitted GPU models: one per measured GPU, and one of what carries over to GPUs never measured.

calibration/gpu/<machine>.json    residuals by family, and which tables they were learned from
calibration/gpu/transfer.json     how far measured GPUs are from their analytic model, per family and power class,
                                  and for some families how that depends on the shape

What a user measured (``python -m costmodel fit --table``) lies in :func:`own_directory`: only points, which adapt
what is shipped. Learned models are evaluated on reference GPUs, the packaged files of those they were learned on,
whatever the actual GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from costmodel.base.errors import OutputError
from costmodel.base.output_files import write_whole
from costmodel.gpu.families.family import Family
from costmodel.gpu.residual import (
    Adaptation,
    Forest,
    Residual,
    adaptation_from_record,
    adaptation_to_record,
    forest_from_record,
    forest_to_record,
    residual_from_record,
    residual_to_record,
)
from costmodel.machines.machine_file import PACKAGED_DIRECTORY, read_machine, user_directory
from costmodel.machines.machine_records import Machine
from costmodel.machines.record_file import made_by, read_record
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


DIRECTORY = PACKAGED_DIRECTORY.parent / "calibration" / "gpu"
TRANSFER = "transfer"
# Subfolders of a folder of fitted models, with separate fits: linear attention; operators only run by serving engines;
# attention and experts as each engine runs them.
SCANS, SERVING, ENGINES = "scans", "serving", "engines"
ANY_POWER, OPEN, LIMITED, HALF_RATE = "any", "open", "power-limited", "half-rate"
ANY_FAMILY = "any"
_REMEDY = "install the package again, or fit your own with `python -m costmodel fit --table`"
# Family -> grade -> range of log(measured / predicted).
Grades = Mapping[str, Mapping[str, tuple[float, float]]]


@dataclass(frozen=True)
class Fitted:
    """Residuals of one machine."""

    machine: str
    architecture: str
    power_limited: bool
    # By family.
    families: Mapping[str, Annotated[Residual, made_by(residual_from_record)]]
    # Tables, rows, versions.
    provenance: Mapping[str, Any]
    # For families and dtypes with few measured rows.
    adaptations: Mapping[str, Annotated[Adaptation, made_by(adaptation_from_record)]] = field(default_factory=dict)
    format: Literal[1] = 1


@dataclass(frozen=True)
class Level:
    """log(measured / analytic) of a class of GPUs: median over the GPUs, and the interval that holds 80 % of the rows
    of each.
    """

    middle: float
    lower: float
    upper: float
    machines: tuple[str, ...]


@dataclass(frozen=True)
class LevelTransfer:
    """Levels by family and power class (:func:`power_class`; ``any`` for families that hardly depend on the clock),
    plus corrections by the trees of ``shapes``. ``grades``: see :mod:`lab.fit.transfer`.
    """

    levels: Mapping[str, Mapping[str, Level]]
    shapes: Mapping[str, Annotated[Forest, made_by(forest_from_record)]]
    provenance: Mapping[str, Any]
    grades: Grades = field(default_factory=dict)
    format: Literal[1] = 1

    def grade(self, family: str, name: str) -> tuple[float, float] | None:
        """Range of log(measured / predicted) of the grade ``name`` of :mod:`lab.fit.transfer`: for ``family``, else for
        all families together; ``None`` without measurements.
        """
        return self.grades.get(family, {}).get(name) or self.grades.get(ANY_FAMILY, {}).get(name)

    def level(self, family: str, machine: Machine) -> Level | None:
        """Level for ``machine``, or of another class if its own was not measured; ``None`` if no class was."""
        classes = self.levels.get(family, {})
        own = classes.get(ANY_POWER) or classes.get(power_class(machine)) or classes.get(OPEN)
        return own or next(iter(classes.values()), None)


def power_class(machine: Machine) -> str:
    """Power class: ``power-limited`` for cards of 75 W and less; ``half-rate`` for GeForce cards, whose tensor cores
    reach twice the FP32 rate where others reach four times and more, and are easier to feed; else ``open``.
    """
    if machine.chip().power_limited:
        return LIMITED
    return HALF_RATE if machine.half_rate else OPEN


def is_relative(known: Fitted, machine: Machine) -> bool:
    """True if residuals learned on the GPU of ``known`` apply to ``machine``: the same architecture, lanes per
    multiprocessor (A100 and RTX 3090 are both Ampere) and, where power limits, power class.
    """
    chip = machine.chip()
    there = packaged_machine(known.machine)
    lanes = chip.lanes if there is None else there.chip().lanes
    return (known.architecture, known.power_limited, lanes) == (chip.architecture, chip.power_limited, chip.lanes)


def _unlike(known: Fitted, machine: Machine) -> tuple[bool, float, float]:
    """Distance of a relative for sorting: another class, then the ratio of multiprocessors, then that of the memory's
    rate.
    """
    there = packaged_machine(known.machine)
    if there is None:
        return True, 0.0, 0.0
    counts = there.chip().sm_count, machine.chip().sm_count
    rates = there.memory[-1].bandwidth.at(1), machine.memory[-1].bandwidth.at(1)
    return power_class(there) != power_class(machine), max(counts) / min(counts), max(rates) / min(rates)


def residuals_for(machine: Machine, directory: Path = DIRECTORY) -> dict[str, tuple[str, Residual]]:
    """Residuals by family, each with the machine it was fitted on: ``machine`` itself or, if not measured, a relative.

    The most similar of the relatives (:func:`is_relative`) comes first. ``InputError`` names a corrupt file.
    """
    known, name = all_fitted(directory), known_as(machine)
    relatives = [each for each in known.values() if each.machine != name and is_relative(each, machine)]
    relatives.sort(key=lambda each: (*_unlike(each, machine), each.machine))
    own = [known[name]] if name in known else []
    found: dict[str, tuple[str, Residual]] = {}
    for each in [*own, *relatives]:
        for family, learned in each.families.items():
            found.setdefault(family, (each.machine, learned))
    return found


def adaptations_for(machine: Machine, directory: Path = DIRECTORY) -> Mapping[str, Adaptation]:
    """Adaptations to measurements of ``machine`` itself, or of one that differs only in memory capacity and power
    limit, by family and dtype; may be empty.
    """
    known, figures = all_fitted(directory), _figures(machine)
    own = known.get(known_as(machine))
    alike = (each for each in known.values() if figures and _figures(packaged_machine(each.machine)) == figures)
    found = own or next(alike, None)
    return found.adaptations if found else {}


def own_directory() -> Path:
    """Folder of the models of the user's own GPUs, beside those of the user's own collectives."""
    return user_directory() / "calibration" / "gpu"


def all_fitted(directory: Path = DIRECTORY) -> Mapping[str, Fitted]:
    """All fitted machines by name; shipped models are adapted by the user's own points. ``InputError`` names a corrupt
    file.
    """
    if directory != DIRECTORY:
        return fitted_in(directory)
    found = dict(fitted_in(directory))
    for name, own in fitted_in(own_directory()).items():
        base = found.get(name, own)
        found[name] = replace(base, adaptations={**base.adaptations, **own.adaptations})
    return found


@lru_cache(maxsize=8)
def fitted_in(directory: Path) -> Mapping[str, Fitted]:
    """Fitted machines of one folder by name, without the user's adaptations."""
    files = sorted(path for path in directory.glob("*.json") if path.stem != TRANSFER)
    return {path.stem: read_record(path, Fitted, _REMEDY) for path in files}


@lru_cache(maxsize=8)
def level_transfer(directory: Path = DIRECTORY) -> LevelTransfer:
    """Levels that transfer to unmeasured GPUs; empty if the file is absent."""
    path = directory / f"{TRANSFER}.json"
    if not path.exists():
        return LevelTransfer({}, {}, {})
    return read_record(path, LevelTransfer, _REMEDY)


def merge_transfers(first: LevelTransfer, second: LevelTransfer) -> LevelTransfer:
    """Union of two fits of different families; values for any family are those of ``first``."""
    return LevelTransfer(
        {**second.levels, **first.levels},
        {**second.shapes, **first.shapes},
        first.provenance,
        {**second.grades, **first.grades},
    )


def write_fitted(fitted: Fitted, directory: Path) -> Path:
    """Write ``directory/<machine>.json``; ``OutputError`` on failure."""
    record = {
        "machine": fitted.machine,
        "architecture": fitted.architecture,
        "power_limited": fitted.power_limited,
        "provenance": dict(fitted.provenance),
        "families": {name: residual_to_record(each) for name, each in sorted(fitted.families.items())},
        "adaptations": {name: adaptation_to_record(each) for name, each in sorted(fitted.adaptations.items())},
    }
    return _write(directory / f"{fitted.machine}.json", record)


def write_transfer(content: LevelTransfer, directory: Path) -> Path:
    """Write ``directory/transfer.json``; ``OutputError`` on failure."""
    levels = {
        family: {name: {**vars(each), "machines": list(each.machines)} for name, each in classes.items()}
        for family, classes in content.levels.items()
    }
    shapes = {family: forest_to_record(each) for family, each in content.shapes.items()}
    grades = {family: {name: list(each) for name, each in known.items()} for family, known in content.grades.items()}
    record = {"provenance": dict(content.provenance), "levels": levels, "grades": grades, "shapes": shapes}
    return _write(directory / f"{TRANSFER}.json", record)


def _write(path: Path, record: dict[str, Any]) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"format": 1, **record}, indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another directory with -o") from None
    forget_fitted()
    return path


def forget_fitted() -> None:
    """Clear the cache of fitted models after files were written."""
    fitted_in.cache_clear()
    level_transfer.cache_clear()
