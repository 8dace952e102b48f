"""Fits to public tables, part by part: GPU kernels, linear attention and serving engines separately, collectives, and
factors from whole steps of image models.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from costmodel.base.errors import InputError, Say
from costmodel.collectives.calibration import DIRECTORY as CALIBRATIONS
from costmodel.collectives.physics import FILE as CONSTANTS
from costmodel.gpu.families.family import SHARES
from costmodel.gpu.fitted import DIRECTORY, SCANS, SERVING, TRANSFER
from lab.data.aiconfigurator import attention_files, cast_files, expert_files, gemm_files, linear_files, serving_files
from lab.data.collective_sweeps import sweep_files
from lab.data.data_folder import FETCH, Wanted, everything
from lab.data.profiled_kernels import latency_files, layer_files
from lab.data.selection import Selection, select
from lab.data.timm_steps import timm_files
from lab.fit.collectives import fit_collectives
from lab.fit.image_steps import fit_steps
from lab.fit.kernels import fit, fit_scans, fit_serving

PARTS = ("kernels", "scans", "serving", "collectives", "vision")


def selection_of(part: str, data: Path) -> Selection:
    """Files of ``data`` that the shipped models of ``part`` name, and new, missing or different ones."""
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


def fit_public(
    data: Path, output: Path | None, parts: Sequence[str], progress: Say, all_files: bool = False
) -> list[Path]:
    """Write the models of ``parts`` to ``output`` (collectives to a subfolder; default: the shipped files); returns the
    files.

    Uses exactly the files that the shipped models name, or ``all_files`` in ``data``; ``progress`` receives the new
    ones. :class:`InputError` if a named one is missing or different, or none exists. With ``all_files``, collectives
    are skipped if there are no sweeps.
    """
    files: list[Path] = []

    def wanted(part: str) -> Wanted:
        return wanted_files(part, data, progress, all_files, whole=True)

    if "kernels" in parts:
        files += fit(data, output or DIRECTORY, progress, wanted("kernels"))
    if "scans" in parts:
        folder = (output or DIRECTORY) / SCANS
        files += fit_scans(data, folder, progress, wanted("scans"))
    if "serving" in parts:
        folder = (output or DIRECTORY) / SERVING
        files += fit_serving(data, folder, progress, wanted("serving"))
    if "collectives" in parts:
        folder = output / "collectives" if output else CALIBRATIONS
        files += fit_collectives(data, folder, progress, wanted("collectives"))
    if "vision" in parts:
        # After the kernels: operators with tables of their own are priced by them.
        output_file = output / "vision" / SHARES.name if output else SHARES
        files += fit_steps(data, output_file, progress, wanted("vision"))
    if not files:
        raise InputError(
            f"{data}: no measurements of what is asked; give the folder of the data with --data, or {FETCH} brings them"
        )
    return files


def wanted_files(part: str, data: Path, progress: Say, all_files: bool = False, *, whole: bool = False) -> Wanted:
    """Choose the files that the shipped models of ``part`` name, or ``all_files``; ``progress`` receives the others."""
    if all_files:
        return everything
    chosen = selection_of(part, data)
    if whole and chosen.anything:
        chosen.require()
    for line in chosen.remarks():
        progress(line)
    return chosen.wants
