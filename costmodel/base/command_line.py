"""Conventions shared by all command lines of the project: one-line user errors, fixed exit statuses, the version.

Exit status: 0 success, 1 ``doctor`` found something broken, 2 invalid input or output of the user (one line on
standard error), 130 stopped with Ctrl-C, 143 terminated by SIGTERM, 129 by SIGHUP.
"""

from __future__ import annotations

import functools
import math
import os
import platform
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn, ParamSpec

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException

from costmodel.base.errors import InputError, ProjectError
from costmodel.base.process import Terminated, pass_ending, terminable

DISTRIBUTION = "fusion-costmodel"


def project_version(packages: Path = Path(__file__).parents[2]) -> str:
    """Version of the code: from ``pyproject.toml`` in a checkout, else from the installed metadata."""
    import tomllib

    try:
        project = tomllib.loads((packages / "pyproject.toml").read_text(encoding="utf-8"))["project"]
        # the metadata of an editable install keep the version at the time of installation
        if project["name"] == DISTRIBUTION:
            return str(project["version"])
    except (OSError, KeyError, ValueError):
        pass
    try:
        return metadata.version(DISTRIBUTION)
    except metadata.PackageNotFoundError:
        return "unknown"


def version_line() -> str:
    """Version line, such as ``fusion-costmodel 1.0.0, Python 3.11.9``."""
    return f"{DISTRIBUTION} {project_version()}, Python {platform.python_version()}"


P = ParamSpec("P")
_LONGEST_LINE = 1_200  # longest error line, in characters: a damaged file may hold a name of megabytes
_CLOSE = 0.8  # least similarity of option names that are suggested for an unknown one
_COMPLETION = ("--install-completion", "--show-completion")


class ProgramGroup(TyperGroup):
    """Command group of one program. Reports an invalid command line in one line, like every other user error, and exits
    with status 2.
    """

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **options: Any) -> Any:
        """Run the command named by ``args`` (default: ``sys.argv``)."""
        if options.get("standalone_mode") is False:
            return super().main(args, prog_name, *rest, **options)
        if sys.stdout is None:  # closed by the parent process
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 (as long as the process)
        asked = sys.argv[1:] if args is None else args
        if " " in (prog_name or "") and any(each.startswith(_COMPLETION) for each in asked):
            _one_line(f"{asked[0]}: shells complete commands, not python -m; ask as `{self.name} {asked[0]}`")
            sys.exit(2)
        try:
            status = super().main(args, prog_name, *rest, **{**options, "standalone_mode": False})
        except TyperException as error:
            _tell_usage(error)
            sys.exit(error.exit_code)
        except typer.Abort:
            sys.exit(1)
        except OSError as error:  # of help, on a full disk
            _give_up_output()
            _one_line(f"output: {error.strerror or error}")
            sys.exit(2)
        sys.exit(status if isinstance(status, int) else 0)


def program_name(tool: str) -> str | None:
    """Program name in usage texts: ``python -m TOOL``, or ``None`` (the default) for the console script."""
    return f"python -m {tool}" if Path(sys.argv[0]).name == "__main__.py" else None


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(version_line())
        raise typer.Exit(0)


def version_command(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and end.")
    ] = False,
) -> None:
    """The options of a program itself."""


def guarded(stopped: str = "stopped") -> Callable[[Callable[P, None]], Callable[P, None]]:
    """Decorate a command with error handling. ``stopped``: text printed on Ctrl-C or a terminating signal."""

    def decorate(command: Callable[P, None]) -> Callable[P, None]:
        @functools.wraps(command)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            try:
                _require_finite(kwargs)
                _require_names(kwargs, sys.argv[1:])
                with terminable():
                    try:
                        command(*args, **kwargs)
                        sys.stdout.flush()
                    except Exception as error:
                        pass_ending(error)
                        raise
            except ProjectError as error:
                fail(str(error), error.status)
            except BrokenPipeError:
                _close_output()  # the reader of the pipe has exited
                raise typer.Exit(0) from None
            except OSError as error:
                if error.filename is None:
                    _give_up_output()
                fail(f"{error.filename or 'output'}: {error.strerror or error}")
            except MemoryError:
                fail("out of memory; give the process more of it, or ask for something smaller")
            except KeyboardInterrupt:
                typer.echo(stopped, err=True)
                raise typer.Exit(130) from None
            except Terminated as ended:
                typer.echo(f"{stopped} ({ended})", err=True)
                raise typer.Exit(ended.status) from None

        return run

    return decorate


def _require_finite(values: Mapping[str, Any]) -> None:
    """Raise ``InputError`` for an option that is ``nan`` or infinite, which typer refuses only where there is a
    range.
    """
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise InputError(f"--{name.replace('_', '-')} {value}: give a finite number")


def _require_names(values: Mapping[str, Any], words: Sequence[str]) -> None:
    """Raise ``InputError`` for a path given as an empty string in ``words``, such as an unset shell variable: it would
    be taken for the current folder, and written to.
    """
    given = [*words, *(word.partition("=")[2] for word in words if word.startswith("-") and "=" in word)]
    if "" not in given or any(word and Path(word) == Path() for word in given):
        return
    for name, value in values.items():
        if Path() in (value if isinstance(value, list) else [value]):
            raise InputError(f"{name.strip('_')}: an empty name was given; name a file or a folder (`.` is this one)")


def repeat_options(arguments: Sequence[str], options: Collection[str]) -> list[str]:
    """Expand arguments so that each of ``options`` may take several values, as a shell makes of ``--trace rank*.json``.

    The option is repeated before every value, as typer expects; all words between such an option and the next word that
    begins with a dash are its values.
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


def fail(message: str, status: int = 2) -> NoReturn:
    """Print one line and exit with ``status``."""
    _one_line(message)
    raise typer.Exit(status)


def _one_line(message: str) -> None:
    line = " ".join(message.split())
    if len(line) > _LONGEST_LINE:
        line = f"{line[: _LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 2 :]}"
    # Names may hold unprintable characters: lone surrogates, escape sequences.
    shown = "".join(sign if sign.isprintable() else repr(sign)[1:-1] for sign in line)
    typer.echo(f"error: {shown}", err=True)


def _tell_usage(error: TyperException) -> None:
    """Print the error of a command line in one line; print help, where no command was given, unchanged."""
    if getattr(error, "possibilities", None):  # typer suggests names that share a few letters
        error.possibilities = get_close_matches(error.option_name, error.possibilities, cutoff=_CLOSE)  # type: ignore[attr-defined]
    message = error.format_message().strip()
    if not message:
        return  # help, which is on the screen already
    if "\n" in message and not isinstance(error, typer.BadParameter):
        typer.echo(message, err=True)
        return
    context = getattr(error, "ctx", None)
    hint = f"; {context.command_path} --help lists what there is" if context is not None else ""
    _one_line(message.removesuffix(".").replace("Value error, ", "") + hint)


def _give_up_output() -> None:
    """Drop buffered standard output that cannot be written (a full disk)."""
    try:
        sys.stdout.flush()
    except OSError:
        with suppress(OSError, ValueError):
            _close_output()


def _close_output() -> None:
    """Redirect standard output to the null device, so that its buffer does not raise again at interpreter exit (Python
    docs, SIGPIPE).
    """
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, sys.stdout.fileno())
