"""Names of ONNX nodes as they are found again in a compiled network. Needs neither ONNX nor TVM."""

from __future__ import annotations

import re

_RESULT = "result "


def identifier(name: str) -> str:
    """``name`` as a Relax variable: letters, digits and underscores."""
    text = re.sub(r"\W+", "_", name, flags=re.ASCII).strip("_")
    return text if text and not text[0].isdigit() else f"n_{text}"


def result_name(index: int) -> str:
    """What stands for the output ``index`` of a network, whose variable has lost its name; no identifier is so."""
    return f"{_RESULT}{index}"


def result_index(name: str) -> int | None:
    """The index in a :func:`result_name`, ``None`` for any other name."""
    return int(name.removeprefix(_RESULT)) if name.startswith(_RESULT) else None
