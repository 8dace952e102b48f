"""Command line ``python -m lab.data fetch | list``: fetch the public measurements from their repositories into a
folder.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from costmodel.base.command_line import guarded
from costmodel.base.errors import InputError
from lab.command_line import run
from lab.data.data_folder import FETCH, data_folder, user_data_directory
from lab.data.manifest import Standing, fetch, sources_named, standing

app = typer.Typer(
    help="The public measurements that models are fitted to and checked on.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_SHOWN = 3
_Json = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of text.")]
_Names = Annotated[list[str] | None, typer.Argument(help="Datasets of `data list`; default: all.")]


@app.command("fetch")
@guarded(stopped="stopped; what was fetched stays, the same command goes on from there")
def fetch_command(
    names: _Names = None,
    to: Annotated[Path | None, typer.Option(help="Folder to write; default: the user's data folder.")] = None,
    as_json: _Json = False,
) -> None:
    """Brings the measurements from the repositories, commits and paths of the manifest; needs git and a network."""
    folder = (to or user_data_directory()).resolve()
    progress = Console(stderr=True, highlight=False, markup=False)
    done = fetch(sources_named(names or ()), folder, lambda line: progress.print(line, soft_wrap=True))
    if as_json:
        print(json.dumps({"folder": str(folder), **done.record()}, indent=2))
    else:
        for path, reason in done.failed.items():
            print(f"{path}: {reason}")
        print(f"{folder}: {done.there} files were there, {done.brought} brought, {len(done.failed)} not")
    wrong = [reason for path, reason in done.failed.items() if path not in done.unfetchable]
    if wrong:
        raise InputError(
            f"{len(wrong)} files could not be fetched as the manifest has them; the first: {wrong[0]}; "
            "`python -m lab.data list` names them all"
        )


@app.command("list")
@guarded()
def list_command(
    names: _Names = None,
    data: Annotated[Path | None, typer.Option(help="Folder to look at; default: the one that commands use.")] = None,
    as_json: _Json = False,
) -> None:
    """What is there of each dataset, what is missing, what differs from the manifest, and what was checked of it."""
    folder = data_folder(data)
    found = [standing(source, folder) for source in sources_named(names or ())]
    if as_json:
        print(json.dumps({"folder": str(folder), "datasets": [each.record() for each in found]}, indent=2))
        return
    console = Console(highlight=False, markup=False, width=None if sys.stdout.isatty() else 1000, no_color=True)
    table = Table("dataset", "there", "missing", "different", "fetched", "origin checked", "licence", box=None)
    for each in found:
        table.add_row(*_row(each))
    console.print(f"folder: {folder}", soft_wrap=True)
    console.print(table)
    for line in (line for each in found for line in _remarks(each)):
        console.print(line, soft_wrap=True)


def _row(each: Standing) -> tuple[str, ...]:
    record = each.record()
    checked = ", ".join(f"{'no' if name == 'false' else name} {count}" for name, count in record["checked"].items())
    counts = (f"{record['there']} of {record['files']}", str(len(each.missing)), str(len(each.different)))
    return (each.source.name, *counts, _fetched(record), checked, each.source.licence)


def _fetched(record: dict[str, Any]) -> str:
    if not record["derived"]:
        return "yes"
    return "no" if record["derived"] == record["files"] else f"all but {record['derived']}"


def _remarks(each: Standing) -> list[str]:
    lines = []
    for what, files in (("missing", each.missing), ("different", each.different)):
        if files and each.there:
            names = ", ".join(file.path for file in files[:_SHOWN])
            lines.append(f"{each.source.name}: {what}: {names}{' ...' if len(files) > _SHOWN else ''} ({FETCH})")
    for what, text in (("not fetched", each.source.made), ("origin not fully checked", each.source.reason)):
        lines += [f"{each.source.name}: {what}: {text}"] if text else []
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Run the named command; return its exit status."""
    return run(app, "lab.data", arguments)


if __name__ == "__main__":
    sys.exit(main())
