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

# Where the command was started; the script may change it.
_FOLDER = Path.cwd()
_PACKAGES = ("site-packages", "dist-packages")
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
def library_folder(file: str) -> Path | None:
    """Return the folder of installed packages that ``file`` is in, or None."""
    for folder in Path(file).parents:
        if folder.name in _PACKAGES or (folder != _FOLDER and next(folder.glob("*.dist-info"), None)):
            return folder
        if folder == _FOLDER:
            break
    return None


@cache
def script_file(file: str) -> str:
    """Return the name of a script's file for the report, or an empty string for code between it and the operator."""
    if file.startswith("<"):  # generated, frozen
        return ""
    if file.startswith(_BETWEEN[:2]):
        return ""
    library = library_folder(file)
    if library is not None:
        return str(Path(file).relative_to(library))
    if file.startswith(_BETWEEN):
        return ""
    path = _FOLDER / file
    return str(path.relative_to(_FOLDER)) if _FOLDER in path.parents else path.name
