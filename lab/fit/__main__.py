"""Command line ``python -m lab.fit``: fits to public tables, part by part: GPU kernels, linear attention and serving
engines separately, collectives, and factors from whole steps of image models.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from costmodel.base.errors import InputError, Say
from costmodel.base.output_files import check_writable
from costmodel.collectives.calibration import DIRECTORY as CALIBRATIONS
from costmodel.collectives.engine_reduce import FILE as ENGINE_REDUCES
from costmodel.gpu.families.family import SHARES
from costmodel.gpu.fitted import DIRECTORY, ENGINES, SCANS, SERVING
from lab.command_line import chosen, program, run
from lab.data.data_folder import FETCH, Wanted, data_folder
from lab.data.selection import PARTS, wanted_files
from lab.fit.collectives import fit_collectives, fit_engine_reduces
from lab.fit.image_steps import fit_steps
from lab.fit.kernels import fit, fit_engines, fit_scans, fit_serving


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
    if "engine-kernels" in parts:
        folder = (output or DIRECTORY) / ENGINES
        files += fit_engines(data, folder, progress, wanted("engine-kernels"))
    if "collectives" in parts:
        folder = output / "collectives" if output else CALIBRATIONS
        files += fit_collectives(data, folder, progress, wanted("collectives"))
    if "engine-reduces" in parts:
        # After the collectives, to which engines hand large messages.
        output_file = output / "collectives" / ENGINE_REDUCES.name if output else ENGINE_REDUCES
        files += fit_engine_reduces(data, output_file, progress, wanted("engine-reduces"))
    if "vision" in parts:
        # After the kernels: operators with tables of their own are priced by them.
        output_file = output / "vision" / SHARES.name if output else SHARES
        files += fit_steps(data, output_file, progress, wanted("vision"))
    if not files:
        raise InputError(
            f"{data}: no measurements of what is asked; give the folder of the data with --data, or {FETCH} brings them"
        )
    return files


def fit_command(
    parts: Annotated[list[str] | None, typer.Argument(help=f"Of {', '.join(PARTS)}; default: all.")] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of the measurements; default: $COSTMODEL_DATA, else what was fetched.")
    ] = None,
    output: Annotated[
        Path | None, typer.Option("-o", "--output", help="Folder to write; default: the one that is shipped.")
    ] = None,
    all_files: Annotated[
        bool, typer.Option("--all", help="Use every file there, not those alone that the shipped models name.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Fit the models of GPU kernels, collectives and image models to the public tables."""
    wanted = chosen(parts or (), PARTS)
    if output is not None:
        check_writable(output / "fitted.json", "-o", makes_folder=True)
    progress = partial(Console(stderr=True, highlight=False, markup=False).print, soft_wrap=True)
    files = fit_public(data_folder(data), output, wanted, progress, all_files)
    records = [{"file": str(path), "bytes": path.stat().st_size} for path in files]
    if as_json:
        print(json.dumps({"files": records}, indent=2))
        return
    for record in records:
        print(f"{record['file']}  {record['bytes']} B")


app = program(fit_command, "stopped; the same command goes on with what is fitted")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run(app, "lab.fit", arguments)


if __name__ == "__main__":
    sys.exit(main())
