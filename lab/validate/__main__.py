"""Command line ``python -m lab.validate``: predicted against measured times, section by section."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from lab.command_line import program, run
from lab.data.data_folder import data_folder
from lab.validate.sections import SECTIONS, Asked, run_sections


def validate_command(
    sections: Annotated[
        list[str] | None,
        typer.Argument(help=f"Of {', '.join(SECTIONS)}; default: all whose measurements are there."),
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="Folder of the measurements; default: $COSTMODEL_DATA, else what was fetched.")
    ] = None,
    only: Annotated[str, typer.Option(help="Cases whose GPU/case contains this; of kernels: machine/family.")] = "",
    models: Annotated[Path | None, typer.Option(help="Folder of fitted kernels; default: the shipped ones.")] = None,
    all_files: Annotated[
        bool, typer.Option("--all", help="Every table of kernels there, not those alone that the shipped models name.")
    ] = False,
    sealed: Annotated[
        bool,
        typer.Option("--sealed", help="Training steps kept unseen until a release is judged, alone; ask them once."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")] = False,
) -> None:
    """Predict what was measured in the data folder and report the errors."""
    asked = Asked(data_folder(data), only, models, all_files)
    ran = run_sections(asked, sections or (), sealed=sealed)
    if as_json:
        print(json.dumps({name: section.record() for name, section in ran.items()}, indent=2))
    else:
        for section in ran.values():
            section.render()


app = program(validate_command)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status."""
    return run(app, "lab.validate", arguments)


if __name__ == "__main__":
    sys.exit(main())
