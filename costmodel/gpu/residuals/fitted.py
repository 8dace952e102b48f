"""Files of fitted GPU models: one per measured GPU, and one of what carries over to GPUs never measured.

calibration/gpu/<machine>.json    residuals by family, and which tables they were learned from
calibration/gpu/transfer.json     how far measured GPUs are from their analytic model, per family and power class,
                                  and for some families how that depends on the shape

What a user measured (``python -m costmodel fit --table``) lies in :func:`own_directory`: only points, which adapt what
is shipped.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.foreign_files import read_text
from costmodel.base.plain_json import MALFORMED, decoded
from costmodel.base.whole_file import write_whole
from costmodel.gpu.residuals import adaptation, forest, residual
from costmodel.gpu.residuals.adaptation import Adaptation
from costmodel.gpu.residuals.forest import Forest
from costmodel.gpu.residuals.references import known_as, packaged_machine
from costmodel.gpu.residuals.residual import Residual
from costmodel.machines.machine_catalog import PACKAGED_DIRECTORY, user_directory
from costmodel.machines.machine_records import Machine

DIRECTORY = PACKAGED_DIRECTORY.parent / "calibration" / "gpu"
TRANSFER = "transfer"
# Subfolders of a folder of fitted models, with separate fits: linear attention, and operators only run by serving
# engines.
SCANS, SERVING = "scans", "serving"
ANY_POWER, OPEN, LIMITED, HALF_RATE = "any", "open", "power-limited", "half-rate"
ANY_FAMILY = "any"
_FORMAT = 1
# Family -> grade -> range of log(measured / predicted).
Grades = Mapping[str, Mapping[str, tuple[float, float]]]


@dataclass(frozen=True)
class Fitted:
    """Residuals of one machine."""

    machine: str
    architecture: str
    power_limited: bool
    # By family.
    families: Mapping[str, Residual]
    # Tables, rows, versions.
    provenance: Mapping[str, Any]
    # For families and dtypes with few measured rows.
    adaptations: Mapping[str, Adaptation] = field(default_factory=dict)


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
    plus corrections by the trees of ``shapes``. ``grades``: see :mod:`lab.fit.grades`.
    """

    levels: Mapping[str, Mapping[str, Level]]
    shapes: Mapping[str, Forest]
    provenance: Mapping[str, Any]
    grades: Grades = field(default_factory=dict)

    def grade(self, family: str, name: str) -> tuple[float, float] | None:
        """Range of log(measured / predicted) of the grade ``name`` of :mod:`lab.fit.grades`: for ``family``, else for
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
    """Adaptations to measurements of ``machine`` itself, by family and dtype; may be empty."""
    known, name = all_fitted(directory), known_as(machine)
    return known[name].adaptations if name in known else {}


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
    return {path.stem: _read_fitted(path) for path in files}


@lru_cache(maxsize=8)
def transfer(directory: Path = DIRECTORY) -> LevelTransfer:
    """Levels that transfer to unmeasured GPUs; empty if the file is absent."""
    path = directory / f"{TRANSFER}.json"
    if not path.exists():
        return LevelTransfer({}, {}, {})
    record = _read(path)
    try:
        levels = {
            family: {name: Level(**{**each, "machines": tuple(each["machines"])}) for name, each in classes.items()}
            for family, classes in record["levels"].items()
        }
        shapes = {family: forest.from_record(each) for family, each in record["shapes"].items()}
        grades = {
            family: {name: (float(low), float(high)) for name, (low, high) in each.items()}
            for family, each in record["grades"].items()
        }
        return LevelTransfer(levels, shapes, record["provenance"], grades)
    except MALFORMED as error:
        raise _corrupt(path, error) from None


def merged(first: LevelTransfer, second: LevelTransfer) -> LevelTransfer:
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
        "families": {name: residual.to_record(each) for name, each in sorted(fitted.families.items())},
        "adaptations": {name: adaptation.to_record(each) for name, each in sorted(fitted.adaptations.items())},
    }
    return _write(directory / f"{fitted.machine}.json", record)


def write_transfer(content: LevelTransfer, directory: Path) -> Path:
    """Write ``directory/transfer.json``; ``OutputError`` on failure."""
    levels = {
        family: {name: {**vars(each), "machines": list(each.machines)} for name, each in classes.items()}
        for family, classes in content.levels.items()
    }
    shapes = {family: forest.to_record(each) for family, each in content.shapes.items()}
    grades = {family: {name: list(each) for name, each in known.items()} for family, known in content.grades.items()}
    record = {"provenance": dict(content.provenance), "levels": levels, "grades": grades, "shapes": shapes}
    return _write(directory / f"{TRANSFER}.json", record)


def _read_fitted(path: Path) -> Fitted:
    record = _read(path)
    try:
        families = {name: residual.from_record(each) for name, each in record["families"].items()}
        if not isinstance(record["machine"], str) or not isinstance(record["architecture"], str):
            raise TypeError("its machine or architecture is no text")
        limited = bool(record["power_limited"])
        moved = {name: adaptation.from_record(each) for name, each in record.get("adaptations", {}).items()}
        return Fitted(record["machine"], record["architecture"], limited, families, record["provenance"], moved)
    except MALFORMED as error:
        raise _corrupt(path, error) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        record = decoded(read_text(path, "record"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its path and permissions") from None
    except ValueError as error:
        raise _corrupt(path, error) from None
    if not isinstance(record, dict) or record.get("format") != _FORMAT:
        raise _corrupt(path, ValueError("unknown format"))
    return record


def _write(path: Path, record: dict[str, Any]) -> Path:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps({"format": _FORMAT, **record}, indent=1) + "\n")
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another directory with -o") from None
    forget_fitted()
    return path


def forget_fitted() -> None:
    """Clear the cache of fitted models after files were written."""
    fitted_in.cache_clear()
    transfer.cache_clear()


def _corrupt(path: Path, error: Exception) -> InputError:
    return InputError(
        f"{path}: corrupt ({error}); install the package again, or fit your own with `python -m costmodel fit --table`"
    )
