"""Framework operators to device work: a table of small functions, and the host actions around the launches."""

from __future__ import annotations

from e2e.lowering.lower import lower, unknown_operators
from e2e.lowering.work import LoweringOptions

__all__ = ["LoweringOptions", "lower", "unknown_operators"]
