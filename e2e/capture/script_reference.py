"""Reference to the user's step: ``FILE.py:FUNCTION``, or the function itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

StepFunction = str | Callable[..., Any]


def script_name(script: StepFunction) -> str:
    """Return ``FILE.py:FUNCTION`` of either form: for messages, and as the name of the workload."""
    if isinstance(script, str):
        return script
    function = inspect.unwrap(getattr(script, "func", script))  # of functools.partial, of decorators
    code = getattr(function, "__code__", None)
    return f"{code.co_filename if code else '<python>'}:{getattr(function, '__name__', type(function).__name__)}"


def script_folder(script: StepFunction) -> Path | None:
    """Return the folder whose modules belong to the script; None for a function, which is imported already."""
    return Path(script.rpartition(":")[0]).resolve().parent if isinstance(script, str) else None
