"""Programs of the laboratory: one command each, with the conventions of the tools' command lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import typer
from typer.exceptions import TyperException

from costmodel.base.command_line import guarded
from costmodel.base.errors import InputError

Row = TypeVar("Row")


def program(command: Callable[..., None], stopped: str = "stopped") -> typer.Typer:
    """Make the command line of one command. ``stopped``: text printed on Ctrl-C."""
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(guarded(stopped)(command))
    return app


def run(app: typer.Typer, name: str, arguments: Sequence[str] | None = None) -> int:
    """Run ``app`` as ``python -m NAME``; return its exit status, 2 with one line for a user's mistake."""
    try:
        status = app(arguments, prog_name=f"python -m {name}", standalone_mode=False)
    except TyperException as error:
        print(f"error: {error.format_message()}; `python -m {name} --help` lists what there is", file=sys.stderr)
        return error.exit_code
    return status if isinstance(status, int) else 0


def chosen(names: Sequence[str], known: Sequence[str]) -> list[str]:
    """Those of ``known`` that are in ``names``, in their order; all for empty ``names``; ``InputError`` for an unknown
    one.
    """
    for name in names:
        if name not in known:
            raise InputError(f"{name}: not known; choose of {', '.join(known)}")
    return [name for name in known if name in names or not names]


def show_progress(place: int, total: int, name: str) -> None:
    """Say which of ``total`` rows is at work, in one line of a terminal; nothing elsewhere."""
    if sys.stderr.isatty():
        text = f"{place} of {total}: {name[:100]}" if place < total else ""
        print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)


def with_progress(rows: Sequence[Row], name_of: Callable[[Row], str]) -> Iterator[Row]:
    """Yield ``rows`` and show which one is at work."""
    for place, row in enumerate(rows):
        show_progress(place, len(rows), name_of(row))
        yield row
    show_progress(len(rows), len(rows), "")
