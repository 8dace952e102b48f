"""Reader of the GEMM tables of aiconfigurator (ai-dynamo/aiconfigurator, Apache-2.0): ``gemm/gemm_perf.parquet``.

Inference layout (weights transposed), milliseconds of kernel time without the gap of a launch. Here the BF16 rows;
those in FP8 are read by :mod:`costmodel.datasets.scaled_tables`.

Shapes are a grid: powers of two and some between them along m, n and k. Rows that something disturbed stand out from
it: less than half as fast as their neighbours (:func:`disturbed`). Of products of 50 us and more these are 2 % of
H100's in BF16 (2048 x 8192 x 16384: 233 TFLOP/s, between 874 and 851) and none to 0.1 % of the other systems'.
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
# Below so many seconds sizes decide more than rates; of so many neighbours two may be disturbed themselves.
_LONG_SECONDS, _NEIGHBOURS, _SLOW = 50e-6, 4, 0.5


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
    counted = ~disturbed(m[rows], n[rows], k[rows], seconds)
    return KernelTable("gemm-bf16", machine, operators, seconds, counted, str(path))


def disturbed(m: np.ndarray, n: np.ndarray, k: np.ndarray, seconds: np.ndarray) -> np.ndarray:
    """Which products (rows,) of a grid of sizes took more than twice as long for their arithmetic as the median of
    their neighbours: the next sizes along each axis. Short ones, and those with few neighbours, are left in peace.
    """
    on_axes = [np.unique(each, return_inverse=True)[1].tolist() for each in (m, n, k)]
    places = list(zip(*on_axes, strict=True))
    rates = m.astype(float) * n * k / seconds
    fastest: dict[tuple[int, ...], float] = {}
    for place, rate in zip(places, rates, strict=True):
        fastest[place] = max(rate, fastest.get(place, 0.0))
    found = np.zeros(len(rates), dtype=bool)
    for row in np.flatnonzero(seconds >= _LONG_SECONDS):
        around = [
            fastest[near]
            for axis in range(3)
            for step in (-1, 1)
            if (near := (*places[row][:axis], places[row][axis] + step, *places[row][axis + 1 :])) in fastest
        ]
        found[row] = len(around) >= _NEIGHBOURS and rates[row] < _SLOW * float(np.median(around))
    return found
