"""Command line ``python -m lab.fit``: fits the shipped models to the public tables."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from costmodel.base.output_files import check_writable
from lab.command_line import chosen, program, run
from lab.data.data_folder import data_folder
from lab.fit.public_tables import PARTS, fit_public


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
