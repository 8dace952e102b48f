"""Names under which tensor-parallel communication appears in a capture, and the collective each of them is."""

from __future__ import annotations

MARKERS = {
    "parallel::all_reduce": "all_reduce",
    "parallel::all_gather": "all_gather",
    "parallel::reduce_scatter": "reduce_scatter",
}
