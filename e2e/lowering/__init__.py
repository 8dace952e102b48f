"""Framework operators to device work: a table of small functions, and the host actions around the launches."""

from __future__ import annotations

from e2e.lowering.families.work import LoweringOptions
from e2e.lowering.lower_trace import lower, unknown_operators

__all__ = ["LoweringOptions", "lower", "unknown_operators"]
