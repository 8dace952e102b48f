"""Names of ONNX nodes in a compiled network. Needs neither ONNX nor TVM."""

from __future__ import annotations

import re

_RESULT = "result "


def identifier(name: str) -> str:
    """``name`` as the name of a Relax variable: letters, digits and underscores."""
    text = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    return text if text and not text[0].isdigit() else f"n_{text}"


def result_name(index: int) -> str:
    """Name of output ``index`` of a network, whose variable has lost its name; it is not a valid identifier."""
    return f"{_RESULT}{index}"


def result_index(name: str) -> int | None:
    """Index in a :func:`result_name`, or None for any other name."""
    return int(name.removeprefix(_RESULT)) if name.startswith(_RESULT) else None
