"""Files of fitted GPU models: one per measured GPU, and one of what carries over to GPUs never measured.

calibration/gpu/<machine>.json    residuals by family, and which tables they were learned from
calibration/gpu/transfer.json     how far measured GPUs are from their analytic model, per family and power class,
                                  and for some families how that depends on the shape
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.whole_file import write_whole
from costmodel.gpu.residuals import adaptation, forest, residual
from costmodel.gpu.residuals.adaptation import Adaptation
from costmodel.gpu.residuals.forest import Forest
from costmodel.gpu.residuals.residual import Residual
from costmodel.machines.machine_records import Machine

DIRECTORY = Path(__file__).parents[2] / "calibration" / "gpu"
TRANSFER = "transfer"
ANY_POWER = "any"
_FORMAT = 1


@dataclass(frozen=True)
class Fitted:
    """Residuals by family of one machine. ``provenance``: tables, rows, versions. ``adaptations``: by family and dtype
    of which a few rows only were measured.
    """

    machine: str
    architecture: str
    power_limited: bool
    families: Mapping[str, Residual]
    provenance: Mapping[str, Any]
    adaptations: Mapping[str, Adaptation] = field(default_factory=dict)


@dataclass(frozen=True)
class Level:
    """log(measured / analytic) of GPUs of one class: median over the GPUs, and what holds 80 % of the rows of each."""

    middle: float
    lower: float
    upper: float
    machines: tuple[str, ...]


@dataclass(frozen=True)
class LevelTransfer:
    """Levels by family and power class (``open``, ``power-limited``; ``any`` of families that the clock hardly matters
    to); what the trees of ``shapes`` say adds to them.
    """

    levels: Mapping[str, Mapping[str, Level]]
    shapes: Mapping[str, Forest]
    provenance: Mapping[str, Any]

    def level(self, family: str, machine: Machine) -> Level | None:
        """The level for ``machine``, of another class if its own was not measured; ``None`` if no class was."""
        classes = self.levels.get(family, {})
        return classes.get(ANY_POWER) or classes.get(power_class(machine)) or next(iter(classes.values()), None)


def power_class(machine: Machine) -> str:
    """``power-limited`` for cards of 75 W and less, else ``open``."""
    return "power-limited" if machine.chip().power_limited else "open"


def residuals_for(machine: Machine, directory: Path = DIRECTORY) -> dict[str, tuple[str, Residual]]:
    """Family -> (machine it was fitted on, residual): ``machine`` itself or, where it was not measured, a relative.

    A relative has the same architecture and power class. ``InputError`` names a corrupt file.
    """
    known, chip = all_fitted(directory), machine.chip()
    alike = [each for each in known.values() if each.architecture == chip.architecture]
    relatives = [each for each in alike if each.power_limited == chip.power_limited and each.machine != machine.name]
    own = [known[machine.name]] if machine.name in known else []
    found: dict[str, tuple[str, Residual]] = {}
    for each in [*own, *relatives]:
        for family, learned in each.families.items():
            found.setdefault(family, (each.machine, learned))
    return found


def adaptations_for(machine: Machine, directory: Path = DIRECTORY) -> Mapping[str, Adaptation]:
    """What a few measurements of ``machine`` itself say, by family and dtype; empty where there are none."""
    known = all_fitted(directory)
    return known[machine.name].adaptations if machine.name in known else {}


@lru_cache(maxsize=4)
def all_fitted(directory: Path = DIRECTORY) -> Mapping[str, Fitted]:
    """Every fitted machine by name; ``InputError`` names a corrupt file."""
    files = sorted(path for path in directory.glob("*.json") if path.stem != TRANSFER)
    return {path.stem: _read_fitted(path) for path in files}


@lru_cache(maxsize=4)
def transfer(directory: Path = DIRECTORY) -> LevelTransfer:
    """What carries over; no levels where the file is absent."""
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
        return LevelTransfer(levels, shapes, record["provenance"])
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _corrupt(path, error) from None


def write_fitted(fitted: Fitted, directory: Path) -> Path:
    """Writes ``directory/<machine>.json``; ``OutputError`` if it cannot."""
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
    """Writes ``directory/transfer.json``; ``OutputError`` if it cannot."""
    levels = {
        family: {name: {**vars(each), "machines": list(each.machines)} for name, each in classes.items()}
        for family, classes in content.levels.items()
    }
    shapes = {family: forest.to_record(each) for family, each in content.shapes.items()}
    record = {"provenance": dict(content.provenance), "levels": levels, "shapes": shapes}
    return _write(directory / f"{TRANSFER}.json", record)


def _read_fitted(path: Path) -> Fitted:
    record = _read(path)
    try:
        families = {name: residual.from_record(each) for name, each in record["families"].items()}
        limited = bool(record["power_limited"])
        moved = {name: adaptation.from_record(each) for name, each in record.get("adaptations", {}).items()}
        return Fitted(record["machine"], record["architecture"], limited, families, record["provenance"], moved)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise _corrupt(path, error) from None


def _read(path: Path) -> dict[str, Any]:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror})") from None
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
    all_fitted.cache_clear()
    transfer.cache_clear()
    return path


def _corrupt(path: Path, error: Exception) -> InputError:
    return InputError(f"{path}: corrupt ({error}); write it anew with `python -m costmodel fit`")
