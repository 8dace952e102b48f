"""Fits everything that is fitted to public tables: GPU kernels, those of linear attention and of serving engines by
themselves, collectives, and what whole steps of image models tell; validates all but the last (``python -m e2e validate
--section vision`` does).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from costmodel.base.errors import InputError
from costmodel.base.say import Say
from costmodel.collectives.calibration import DIRECTORY as CALIBRATIONS
from costmodel.collectives.constants import FILE as CONSTANTS
from costmodel.collectives.fit_collectives import fit_collectives
from costmodel.collectives.validate_collectives import validate_collectives
from costmodel.datasets.aiconfigurator import gemm_files
from costmodel.datasets.attention_tables import attention_files
from costmodel.datasets.collective_rows import sweep_files
from costmodel.datasets.data_folder import FETCH
from costmodel.datasets.expert_tables import expert_files
from costmodel.datasets.layer_kernels import layer_files
from costmodel.datasets.linear_tables import linear_files
from costmodel.datasets.named_files import Selection, Wanted, everything, select
from costmodel.datasets.neusight import latency_files
from costmodel.datasets.scaled_tables import cast_files
from costmodel.datasets.serving_tables import serving_files
from costmodel.datasets.timm_steps import timm_files
from costmodel.gpu.families.inverted_shares import SHARES
from costmodel.gpu.fit_kernels import fit, fit_scans, fit_serving
from costmodel.gpu.fit_steps import fit_steps
from costmodel.gpu.kernel_errors import KernelErrors
from costmodel.gpu.residuals.fitted import DIRECTORY, SCANS, SERVING, TRANSFER
from costmodel.gpu.validate_attention import validate_attention, validate_serving
from costmodel.gpu.validate_kernels import validate
from costmodel.gpu.validate_scans import validate_scans

PARTS = ("kernels", "scans", "serving", "collectives", "vision")


def selection_of(part: str, data: Path) -> Selection:
    """The files of ``data`` that the shipped models of ``part`` name, and what is new, missing or different."""
    if part == "kernels":
        files = [*latency_files(data), *gemm_files(data), *layer_files(data), *attention_files(data)]
        files += [*expert_files(data), *cast_files(data)]
        return select(data, files, DIRECTORY / f"{TRANSFER}.json")
    if part == "scans":
        return select(data, linear_files(data), DIRECTORY / SCANS / f"{TRANSFER}.json")
    if part == "serving":
        return select(data, serving_files(data), DIRECTORY / SERVING / f"{TRANSFER}.json")
    if part == "vision":
        return select(data, timm_files(data), SHARES)
    return select(data, sweep_files(data), CONSTANTS)


def fit_public(data: Path, output: Path | None, only: str | None, progress: Say, all_files: bool = False) -> list[Path]:
    """Writes the models of all parts, or ``only`` one, into ``output`` (collectives into a folder of it; default:
    where they are shipped); returns the files.

    From exactly the files that the shipped models name, or from ``all_files`` that ``data`` has; ``progress`` hears
    which are new. :class:`InputError` where a named one is missing or different, or nothing is there. Of all files,
    collectives are left out where there are no sweeps of them, unless they are all that is wanted.
    """
    files: list[Path] = []
    if _wanted("kernels", only):
        files += fit(data, output or DIRECTORY, progress, _named("kernels", data, progress, all_files))
    if _wanted("scans", only):
        folder = (output or DIRECTORY) / SCANS
        files += fit_scans(data, folder, progress, _named("scans", data, progress, all_files))
    if _wanted("serving", only):
        folder = (output or DIRECTORY) / SERVING
        files += fit_serving(data, folder, progress, _named("serving", data, progress, all_files))
    if _wanted("collectives", only):
        folder = output / "collectives" if output else CALIBRATIONS
        files += fit_collectives(data, folder, progress, _named("collectives", data, progress, all_files))
    if _wanted("vision", only):
        # After the kernels: what has tables of its own is priced by them.
        output_file = output / "vision" / SHARES.name if output else SHARES
        files += fit_steps(data, output_file, progress, _named("vision", data, progress, all_files))
    _need(files, data)
    return files


def validate_public(
    data: Path,
    models: Path | None,
    only: str | None,
    progress: Say = lambda line: None,
    all_files: bool = False,
) -> list[KernelErrors]:
    """Every result of both parts, or of ``only`` one. ``models``: fitted kernels; collectives are fitted anew.

    On those of the files that the shipped models name that are there, or on ``all_files``; ``progress`` hears of
    others.
    """
    if models is not None and not any(models.rglob("*.json")):
        raise InputError(f"--models {models}: holds no fitted models (*.json); `python -m costmodel fit -o` makes them")
    results: list[KernelErrors] = []
    if _wanted("kernels", only):
        present = _present("kernels", data, progress, all_files)
        results += [*validate(data, models or DIRECTORY, present), *validate_attention(data, present)]
    if _wanted("scans", only):
        present = _present("scans", data, progress, all_files)
        results += validate_scans(data, models or DIRECTORY, present)
    if _wanted("serving", only):
        present = _present("serving", data, progress, all_files)
        results += validate_serving(data, models or DIRECTORY, present)
    if _wanted("collectives", only):
        results += validate_collectives(data, wanted=_present("collectives", data, progress, all_files))
    _need(results, data)
    return results


def _named(part: str, data: Path, progress: Say, all_files: bool) -> Wanted:
    if all_files:
        return everything
    chosen = selection_of(part, data)
    if chosen.anything:
        chosen.require()
    for line in chosen.remarks():
        progress(line)
    return chosen.wants


def _present(part: str, data: Path, progress: Say, all_files: bool) -> Wanted:
    if all_files:
        return everything
    chosen = selection_of(part, data)
    for line in chosen.remarks():
        progress(line)
    return chosen.wants


def _need(found: Sequence[object], data: Path) -> None:
    if not found:
        raise InputError(
            f"{data}: no measurements of what is asked; give the folder of the data with --data, or {FETCH} brings them"
        )


def _wanted(part: str, only: str | None) -> bool:
    if only is not None and only not in PARTS:
        raise InputError(f"--only {only}: not known; choose one of {', '.join(PARTS)}")
    return only in (None, part)
