"""Random lookups that follow index statistics."""

from __future__ import annotations

import math
from typing import Any

import torch

from costmodel.operators.index_statistics import uniform
from costmodel.operators.lookups import TableLookup

TORCH = True


def draw_indices(table: TableLookup, device: Any) -> torch.Tensor:
    """Draw ``table.indices`` independent row numbers, int64, with the probabilities of ``table.statistics``.

    Popular rows are spread over the table: neighbours in popularity are not neighbours in memory.
    """
    statistics = table.statistics or uniform(table.rows)
    sizes = torch.tensor(statistics.group_rows, dtype=torch.float64, device=device)
    shares = torch.tensor(statistics.group_shares, dtype=torch.float64, device=device)
    ends = shares.cumsum(0)
    group = torch.searchsorted(ends, torch.rand(table.indices, dtype=torch.float64, device=device) * ends[-1])
    group = group.clamp(max=len(sizes) - 1)
    within = torch.rand(table.indices, dtype=torch.float64, device=device) * sizes[group]
    rank = ((sizes.cumsum(0) - sizes)[group] + within).long().clamp(max=table.rows - 1)
    return (rank * _stride(table.rows)) % table.rows


def _stride(rows: int) -> int:
    """Step near the golden section of ``rows`` that visits every row once."""
    step = max(int(rows * 0.6180339887), 1)
    while math.gcd(step, rows) != 1:
        step += 1
    return step
