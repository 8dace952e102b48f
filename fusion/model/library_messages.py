"""What a library's exception says, whole and in one line, without the library's own addresses."""

from __future__ import annotations

import re

# Lines of stacks and of source locations: they tell where a library failed, not what is wrong.
_STACK = re.compile(
    r"^(Traceback \(most recent call last\)|File ['\"]|Stack trace|During handling of|The above exception"
    r"|\[bt\]|\d+: 0x|at (/|0x)|\^+$|\d+: tvm::|\.\.\. and \d+ more|at <unknown>)"
)
_LOCATION = re.compile(r"\[?\d\d:\d\d:\d\d\]? \S+:\d+: ")
# An operator of Relax, and a number, as TVM writes them out in full.
_OPERATOR = re.compile(r'ir\.Op\(.*?\bname="([\w.]+)".*?support_level=\d+\)')
_NUMBER = re.compile(r"\bT\.int64\((-?\d+)\)")
_CHECK = re.compile(r"(\w*Error: )?Check failed: ?\(.*?\) is false:? ?")


def sentence(error: BaseException | str) -> str:
    """All that ``error`` says as one line; its kind if it says nothing. Stacks and failed conditions are left out."""
    lines: list[str] = []
    quoted = False  # the source line that a stack shows below "File ..."
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
    # Nothing but a condition of the library's own code.
    return "an internal check failed" if str(error).strip() else _kind(error)


def _kind(error: BaseException | str) -> str:
    return "no message" if isinstance(error, str) else type(error).__name__
