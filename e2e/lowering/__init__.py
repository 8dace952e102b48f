"""Framework operators to device work, by a table (docs/extending.md says how to add one), and host actions."""

from __future__ import annotations

from e2e.lowering.families.work import LoweringOptions
from e2e.lowering.lower_trace import lower, unknown_operators

__all__ = ["LoweringOptions", "lower", "unknown_operators"]
