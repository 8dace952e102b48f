"""Line of the script that an operator comes from: the innermost frame outside PyTorch, Python's library and this
package, so that a layer of another library (Transformers, timm) is found in its own file.
"""

from __future__ import annotations

import ast
import linecache
import sys
import sysconfig
import traceback
from collections.abc import Iterable
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
    frame = _script_frame()
    return f"{script_file(frame.f_code.co_filename)}:{frame.f_lineno}" if frame is not None else ""


def _script_frame() -> FrameType | None:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not script_file(frame.f_code.co_filename):
        frame = frame.f_back
    return frame


def flag_of_running_line() -> bool | None:
    """Return the value of a flag, which the running line of the script reads, with which it raises no error; None if
    it raises none, or not by one flag.
    """
    frame = _script_frame()
    return _without_error(frame.f_code.co_filename, frame.f_lineno) if frame is not None else None


@cache
def _without_error(file: str, line: int) -> bool | None:
    for node in ast.walk(script_tree(file)):
        if isinstance(node, (ast.If, ast.Assert)) and node.lineno <= line <= (node.test.end_lineno or line):
            raises = isinstance(node, ast.If) and isinstance(node.body[-1], ast.Raise)
            return _operand(node.test, not raises) if raises or isinstance(node, ast.Assert) else None
    return None


@cache
def script_tree(file: str) -> ast.AST:
    """Return the syntax tree of ``file``; an empty module if it cannot be parsed."""
    try:
        return ast.parse("".join(linecache.getlines(file)))
    except SyntaxError:
        return ast.Module([], [])


def _operand(test: ast.expr, wanted: bool) -> bool | None:
    """Return the value that every operand of ``test`` has if it is ``wanted``; None if they differ."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return _operand(test.operand, not wanted)
    if isinstance(test, ast.BoolOp):
        found = {_operand(each, wanted) for each in test.values}
        return found.pop() if len(found) == 1 else None
    return wanted


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


def users_line(frames: Iterable[traceback.FrameSummary]) -> str:
    """Return ``FILE:LINE`` of the innermost of ``frames`` that is the user's own code, else of the innermost one of a
    library, as for programs that are modules of packages; empty if there is neither.
    """
    named = [each for each in reversed(list(frames)) if script_file(each.filename)]
    for frame in named:
        if library_folder(frame.filename) is None:
            return f"{frame.filename}:{frame.lineno}"
    return f"{script_file(named[0].filename)}:{named[0].lineno}" if named else ""
