"""Conversion of ONNX models to canonical Relax. Names are imported on first use: importing the package needs no TVM."""

from __future__ import annotations

from typing import TYPE_CHECKING

from costmodel.base.lazy_names import lazy_names

if TYPE_CHECKING:
    from fusion.relax.canonical.canonicalize import Canonicalize
    from fusion.relax.onnx.importer import ImportedModel, import_onnx

# No name here may equal the name of a submodule: once imported, the submodule would hide it.
_HOMES = {
    "Canonicalize": "fusion.relax.canonical.canonicalize",
    "ImportedModel": "fusion.relax.onnx.importer",
    "import_onnx": "fusion.relax.onnx.importer",
}
__all__ = ["Canonicalize", "ImportedModel", "import_onnx"]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_names(__name__, _HOMES)
