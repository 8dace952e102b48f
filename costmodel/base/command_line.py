"""What all command lines of the project do alike: errors of the user are one line, exit statuses are fixed.

Exit status: 0 done, 2 the user's input or output is at fault (one line on standard error), 130 stopped with Ctrl-C.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection, Sequence
from typing import ParamSpec

import typer

from costmodel.base.errors import ProjectError

P = ParamSpec("P")


def guarded(stopped: str = "stopped") -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorator of a command. ``stopped``: what Ctrl-C prints."""

    def decorate(command: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(command)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                command(*args, **kwargs)
                sys.stdout.flush()
            except ProjectError as error:
                fail(str(error))
            except BrokenPipeError:
                _close_output()  # the reader of a pipe left: nobody to tell
                raise typer.Exit(0) from None
            except OSError as error:
                fail(f"{error.filename or 'output'}: {error.strerror or error}")
            except KeyboardInterrupt:
                typer.echo(stopped, err=True)
                raise typer.Exit(130) from None

        return run

    return decorate


def repeated(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """Arguments in which each of ``options`` may have several values, as a shell makes of ``--trace rank*.json``.

    The option is put before every value, as typer wants it; so what follows such an option up to the next one that
    begins with a dash is a value of it.
    """
    found: list[str] = []
    current: str | None = None
    for argument in arguments:
        if argument.startswith("-"):
            current = argument if argument in options else None
        elif current is not None and found[-1] != current:
            found.append(current)
        found.append(argument)
    return found


def fail(message: str) -> None:
    """Prints one line and ends with status 2."""
    typer.echo(f"error: {' '.join(message.split())}", err=True)
    raise typer.Exit(2)


def _close_output() -> None:
    """What is still in the buffer must not raise again when the interpreter ends (Python docs, SIGPIPE)."""
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
