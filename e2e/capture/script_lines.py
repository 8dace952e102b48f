"""Line of the script that an operator comes from: the innermost frame outside PyTorch, Python's library and this
package, so that a layer of another library (Transformers, timm) is found in its own file.
"""

from __future__ import annotations

import sys
import sysconfig
from functools import cache
from pathlib import Path
from types import FrameType

import torch

_PACKAGES = "site-packages"
# Folders whose frames only carry a call on: PyTorch, this package, Python's library.
_BETWEEN = tuple(
    f"{folder}/" for folder in (Path(torch.__file__).parent, Path(__file__).parents[1], sysconfig.get_path("stdlib"))
)


def script_line() -> str:
    """Return ``FILE:LINE`` of the running line of the script, or an empty string if none is running in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = script_file(frame.f_code.co_filename)
        if file:
            return f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@cache
def script_file(file: str) -> str:
    """Return the name of a script's file for the report, or an empty string for code between it and the operator."""
    if file.startswith("<"):  # generated, frozen
        return ""
    if f"/{_PACKAGES}/" in file:
        return "" if file.startswith(_BETWEEN[:2]) else file.rpartition(f"/{_PACKAGES}/")[2]
    if file.startswith(_BETWEEN):
        return ""
    path = Path(file).absolute()
    folder = Path.cwd()
    return str(path.relative_to(folder)) if folder in path.parents else path.name
