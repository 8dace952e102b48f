"""Programs that a program starts: in its own place (``os.exec``), where the capture goes on with them, or beside it,
which is told if it takes no step itself.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn
from unittest.mock import patch

from costmodel.base.errors import InputError, ModelError
from e2e.capture.launcher import Launch, parse_command

Start = Callable[[Launch], Sequence[str]]


@contextmanager
def started_programs(command: Start) -> Iterator[list[str]]:
    """Context in which Python programs that take the place of this one are captured by ``command``. Yields the commands
    of those started beside it.
    """
    begin, replace_process = subprocess.Popen.__init__, os.execve
    beside: list[str] = []

    def started(self: Any, args: Any, *rest: Any, **more: Any) -> None:
        words = shlex.split(args) if isinstance(args, str) else [os.fspath(word) for word in args]
        if _launch(words) is not None:
            beside.append(shlex.join(words))
        begin(self, args, *rest, **more)

    def execute(path: Any, args: Sequence[str], environment: Mapping[str, str] | None = None) -> NoReturn:
        launch = _launch(list(args))
        if launch is None:
            raise ModelError(f"the program becomes {shlex.join(args)}, which is no program of Python; give its command")
        sys.stdout.flush()
        sys.stderr.flush()
        replace_process(sys.executable, command(launch), dict(environment or os.environ))

    with ExitStack() as stack:
        stack.enter_context(patch.object(subprocess.Popen, "__init__", started))
        for name in ("execv", "execve", "execvp", "execvpe"):
            stack.enter_context(patch.object(os, name, execute))
        yield beside


def _launch(words: list[str]) -> Launch | None:
    """Return the program of a command, or None if it is none of Python's."""
    try:
        return parse_command(words)
    except (InputError, OSError, ValueError):
        return None
