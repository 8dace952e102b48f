"""TVM imported without PyTorch: ``tvm_ffi`` imports it wherever it is installed, which doubles the time of a start."""

from __future__ import annotations

import sys


def import_tvm_alone() -> None:
    """Imports ``tvm``; for processes that never use PyTorch, which they may import afterwards all the same."""
    if "torch" in sys.modules or "tvm" in sys.modules:
        import tvm

        return
    sys.modules["torch"] = None  # type: ignore[assignment]  # Python's way to hide a module
    try:
        import tvm  # noqa: F401
    finally:
        del sys.modules["torch"]
