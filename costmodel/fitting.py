"""Fits, and validates, everything that is fitted to public tables: GPU kernels and collectives."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from costmodel.collectives.calibration import DIRECTORY as CALIBRATIONS
from costmodel.collectives.fit import fit_collectives
from costmodel.collectives.validate import validate_collectives
from costmodel.errors import InputError
from costmodel.gpu.fit import fit
from costmodel.gpu.fitted import DIRECTORY
from costmodel.gpu.validate import Result, validate

PARTS = ("kernels", "collectives")


def fit_public(data: Path, output: Path | None, only: str | None, progress: Callable[[str], None]) -> list[Path]:
    """Writes the models of both parts, or ``only`` one, into ``output`` (collectives into a folder of it; default:
    where they are shipped); returns the files. Collectives are left out where ``data`` has no sweeps of them, unless
    they are all that is wanted: :class:`InputError`.
    """
    files: list[Path] = []
    if _wanted("kernels", only):
        files += fit(data, output or DIRECTORY, progress)
    if _wanted("collectives", only):
        files += fit_collectives(data, output / "collectives" if output else CALIBRATIONS, progress)
    _need(files, data)
    return files


def validate_public(data: Path, models: Path | None, only: str | None) -> list[Result]:
    """Every result of both parts, or of ``only`` one. ``models``: fitted kernels; collectives are fitted anew."""
    results: list[Result] = []
    if _wanted("kernels", only):
        results += validate(data, models or DIRECTORY)
    if _wanted("collectives", only):
        results += validate_collectives(data)
    _need(results, data)
    return results


def _need(found: Sequence[object], data: Path) -> None:
    if not found:
        raise InputError(f"{data}: no sweeps of collectives; give the folder of the data with --data")


def _wanted(part: str, only: str | None) -> bool:
    if only is not None and only not in PARTS:
        raise InputError(f"--only {only}: not known; choose one of {', '.join(PARTS)}")
    return only in (None, part)
