"""Reader of the GEMM tables of aiconfigurator (ai-dynamo/aiconfigurator, Apache-2.0): ``gemm/gemm_perf.parquet``.

Inference layout (weights transposed), milliseconds of kernel time without the gap of a launch. Here the BF16 rows;
those in FP8 are read by :mod:`costmodel.datasets.scaled_tables`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from costmodel.base.errors import InputError
from costmodel.datasets.csv_table import KernelTable
from costmodel.datasets.data_folder import BROUGHT
from costmodel.datasets.named_files import Wanted, everything
from costmodel.datasets.parquet_table import MACHINES, read_columns
from costmodel.operators.device_work import Gemm

_COLUMNS = ("gemm_dtype", "m", "n", "k", "latency")


def gemm_files(data: Path) -> list[Path]:
    """The GEMM table of every known system under ``data/aiconfigurator`` that has one."""
    files = (data / "aiconfigurator" / name / "gemm" / "gemm_perf.parquet" for name in MACHINES)
    return [path for path in files if path.exists()]


def read_aiconfigurator(data: Path, wanted: Wanted = everything) -> Iterator[KernelTable]:
    """The BF16 rows of the wanted ones of :func:`gemm_files`.

    ``InputError`` where there is none or one is malformed, ``MissingDependencyError`` without pyarrow.
    """
    files = [path for path in gemm_files(data) if wanted(path)]
    if not files:
        raise InputError(f"{data / 'aiconfigurator'}: no GEMM tables; {BROUGHT}")
    for path in files:
        yield read_table(path, MACHINES[path.parent.parent.name])


def read_table(path: Path, machine: str) -> KernelTable:
    """The BF16 rows of one file."""
    dtype, m, n, k, latency = read_columns(path, _COLUMNS, "a GEMM table")
    rows = [place for place, name in enumerate(dtype) if name == "bfloat16" and latency[place] > 0]
    operators = tuple(Gemm(1, int(m[i]), int(n[i]), int(k[i]), "bfloat16", transpose_b=True) for i in rows)
    seconds = np.array([latency[i] for i in rows], dtype=float) * 1e-3
    return KernelTable("gemm-bf16", machine, operators, seconds, np.ones(len(rows), dtype=bool), str(path))
