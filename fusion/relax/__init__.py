"""ONNX models to canonical Relax. Names are imported on first use: importing the package needs no TVM."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fusion.relax.canonical.canonicalize import Canonicalize
    from fusion.relax.onnx.importer import ImportedModel, import_onnx

# No name here may be that of a submodule: once imported, the submodule would hide it.
_HOMES = {
    "Canonicalize": "canonical.canonicalize",
    "ImportedModel": "onnx.importer",
    "import_onnx": "onnx.importer",
}
__all__ = ["Canonicalize", "ImportedModel", "import_onnx"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
