"""Programs of the laboratory: one command each, with the conventions of the tools' command lines."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import typer
from typer.exceptions import TyperException

from costmodel.base.command_line import guarded
from costmodel.base.errors import InputError


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
