"""Errors of libraries, compilers and the file system as one line: messages without addresses in the library, and the
reasons of write failures.
"""

from __future__ import annotations

import errno
import re
import shutil
import tempfile
from pathlib import Path

# Lines of stack traces and source locations, irrelevant to the user.
_STACK = re.compile(
    r"^(Traceback \(most recent call last\)|File ['\"]|Stack trace|During handling of|The above exception"
    r"|\[bt\]|\d+: 0x|at (/|0x)|\^+$|\d+: tvm::|\.\.\. and \d+ more|at <unknown>)"
)
_LOCATION = re.compile(r"\[?\d\d:\d\d:\d\d\]? \S+:\d+: ")
# An operator of Relax, and a number, in TVM's long form.
_OPERATOR = re.compile(r'ir\.Op\(.*?\bname="([\w.]+)".*?support_level=\d+\)')
_NUMBER = re.compile(r"\bT\.int64\((-?\d+)\)")
_CHECK = re.compile(r"(\w*Error: )?Check failed: ?\(.*?\) is false:? ?")


def sentence(error: BaseException | str) -> str:
    """Message of ``error`` as one line, or its type without a message. Stack traces and failed conditions are
    removed.
    """
    lines: list[str] = []
    quoted = False  # source line that a stack trace shows below "File ..."
    for line in (each.strip() for each in str(error).splitlines()):
        if quoted and not re.match(r"^\w*(Error|Exception)\b", line) and not _STACK.match(line):
            quoted = False
            continue
        quoted = line.startswith(('File "', "File '"))
        if line and not _STACK.match(line):
            lines.append(_CHECK.sub("", _LOCATION.sub("", line)).strip())
    text = _NUMBER.sub(r"\1", _OPERATOR.sub(r"\1", " ".join(line for line in lines if line)))
    if text:
        return text
    # Only a condition of the library's own code.
    return "an internal check failed" if str(error).strip() else _kind(error)


def _kind(error: BaseException | str) -> str:
    return "no message" if isinstance(error, str) else type(error).__name__


# A disk with less free space counts as full after a failed write of a library.
_LEAST_FREE_BYTES = 2**20


def write_failure(path: Path, error: Exception) -> str:
    """Reason why a library could not be written, also for errors of compiler and linker."""
    if isinstance(error, OSError) and error.errno != errno.ENOSPC:
        return os_reason(error)
    folders = [
        path if path.is_dir() else path.parent,
        Path(tempfile.gettempdir()),
    ]  # object files are linked in the temporary folder
    full = next((folder for folder in folders if _is_full(folder)), None)
    if full is not None or isinstance(error, OSError) or "no space left" in str(error).lower():
        return f"no space left on {full or folders[0]}; free some and run again"
    return sentence(error)


def _is_full(folder: Path) -> bool:
    try:
        return shutil.disk_usage(folder).free < _LEAST_FREE_BYTES
    except OSError:
        return False


def os_reason(error: OSError) -> str:
    """Reason given by the system, with advice if the disk is full."""
    if error.errno == errno.ENOSPC:
        return "no space left on the disk; free some and run again"
    return error.strerror or str(error)
