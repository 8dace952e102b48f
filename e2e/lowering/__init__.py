"""Lowering of framework operators to device work, by a table (docs/extending.md says how to add one), and to host
actions.
"""

from __future__ import annotations

from e2e.lowering.lower_trace import lower, unknown_operators

__all__ = ["lower", "unknown_operators"]
