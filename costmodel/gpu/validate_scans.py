"""How wrong the models of linear attention are: on random rows, on GPUs, and on lengths and shapes left out.

``held-out shapes``, ``left-out GPU``: as :mod:`costmodel.gpu.validate_kernels` says
``lengths from 8k left out``     trees of a GPU that saw shorter sequences alone, on the longer ones
``one width left out``           trees that saw every size of a model but one (heads x widths), on that one, each
                                 in turn
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from costmodel.datasets.named_files import Wanted, everything
from costmodel.gpu.fit_kernels import read_scans, rows_by_family
from costmodel.gpu.kernel_errors import KernelErrors, joined, results_of
from costmodel.gpu.kernel_rows import KernelRows
from costmodel.gpu.residuals.fitted import DIRECTORY
from costmodel.gpu.validate_attention import without_rows
from costmodel.gpu.validate_kernels import validate
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.linear_attention import CausalConvolution, LinearAttention

LONG_SCANS, SIZES = "lengths from 8k left out", "one width left out"
LONG_SCAN_TOKENS = 8192


def validate_scans(data: Path, directory: Path = DIRECTORY, wanted: Wanted = everything) -> list[KernelErrors]:
    """Every result; empty where ``data`` has no tables of linear attention."""
    rows = rows_by_family(read_scans(data, wanted))
    if not rows:
        return []
    predicted = [found for each in rows if (found := without_rows(each, LONG_SCANS, _are_long(each))) is not None]
    for each in rows:
        sizes = [_size(operator) for operator in each.operators]
        for size in dict.fromkeys(sizes):
            out = np.array([one == size for one in sizes])
            found = without_rows(each, SIZES, out, least=1)
            predicted += [] if found is None else [found]
    return [*validate(data, directory, wanted, read_scans), *results_of(joined(predicted))]


def _are_long(rows: KernelRows) -> np.ndarray:
    return np.array([getattr(each, "length", 0) >= LONG_SCAN_TOKENS for each in rows.operators])


def _size(operator: AnyOperator) -> int:
    """What tells models apart: states of a sequence, or channels."""
    if isinstance(operator, CausalConvolution):
        return operator.channels
    return operator.states // operator.batch if isinstance(operator, LinearAttention) else 0
