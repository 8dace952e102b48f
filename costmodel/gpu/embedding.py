"""Embedding lookups: gathered rows through L2 or DRAM, whichever takes longer.

Of the rows that a batch touches, the distinct ones come from DRAM once; repeated ones hit L2 as far as those fit it
(the heuristic of Lin et al., HiPC 2022, made continuous). A row shorter than a sector moves a whole sector.
Backward sorts the indices first (four passes of a radix sort over 64-bit pairs), then adds up gradients row by row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from costmodel.device_operators import EmbeddingLookup
from costmodel.gpu.family import Analysis, Family, safe_log2
from costmodel.gpu.rates import dram_bandwidth, kernel_floor, l2_bandwidth, l2_bytes
from costmodel.machine_records import USABLE_SHARE, Machine
from costmodel.operators import element_bytes

_SECTOR_BYTES = 32
_SORT_PASSES = 4
# Random rows of a few sectors open a DRAM page each: share of the streaming bandwidth that remains.
_RANDOM_ROW_SHARE = 0.75


class Embedding(Family):
    """Table lookups, pooled or not, forward and backward."""

    name = "embedding"

    def analyse(self, operators: Sequence[EmbeddingLookup], machine: Machine) -> Analysis:
        rows = [_seconds(each, machine) for each in operators]
        dram, l2 = (np.array(column, dtype=float) for column in zip(*rows, strict=True))
        launch = np.array([kernel_floor(machine) * (1 if each.direction == "forward" else 3) for each in operators])
        features = {
            "dim": safe_log2(np.array([each.dim for each in operators])),
            "indices": safe_log2(np.array([each.indices for each in operators])),
        }
        return Analysis(
            np.maximum(dram, l2) + launch, {"memory:DRAM": dram, "memory:L2": l2, "launch": launch}, features
        )

    def covers(self, operator: EmbeddingLookup) -> bool:
        return False  # no measured tables yet


def expected_unique_rows(rows: int, indices: int) -> float:
    """Distinct rows among ``indices`` drawn evenly from ``rows``: rows * (1 - (1 - 1/rows)^indices)."""
    if rows <= 1:
        return float(min(rows, indices))
    return -rows * math.expm1(indices * math.log1p(-1 / rows))


def _seconds(operator: EmbeddingLookup, machine: Machine) -> tuple[float, float]:
    """DRAM and L2 seconds."""
    row = max(operator.dim * element_bytes(operator.dtype), _SECTOR_BYTES)
    known = operator.unique_rows
    unique = expected_unique_rows(operator.rows, operator.indices) if known is None else float(known)
    distinct = operator.tables * unique * row
    gathered = operator.tables * operator.indices * row
    hit = min(1.0, USABLE_SHARE * l2_bytes(machine) / distinct) if distinct else 1.0
    missed = distinct + (gathered - distinct) * (1 - hit)
    pooled = operator.tables * operator.bags * operator.dim * element_bytes(operator.dtype)
    indices = operator.tables * operator.indices * 8
    random_rate = _RANDOM_ROW_SHARE * dram_bandwidth(machine)
    if operator.direction == "forward":
        return missed / random_rate + (pooled + indices) / dram_bandwidth(machine), gathered / l2_bandwidth(machine)
    sorting = 2 * _SORT_PASSES * 2 * indices / dram_bandwidth(machine)
    updates = distinct * (3 if operator.fused_optimizer else 1) / random_rate
    return updates + gathered / dram_bandwidth(machine) + sorting, 2 * gathered / l2_bandwidth(machine)
