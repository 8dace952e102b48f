"""Reader of the GEMM tables of aiconfigurator (ai-dynamo/aiconfigurator, Apache-2.0): ``gemm/gemm_perf.parquet``.

Inference layout (weights transposed), milliseconds of kernel time without the gap of a launch. FP8 rows are left out:
no framework that we predict runs them in training.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from costmodel.datasets.table import KernelTable
from costmodel.device_operators import Gemm
from costmodel.errors import InputError, MissingDependencyError

MACHINES = {"a100_sxm": "a100-sxm-80gb", "h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "l40s": "l40s"}
_COLUMNS = ("gemm_dtype", "m", "n", "k", "latency")


def read_aiconfigurator(data: Path) -> Iterator[KernelTable]:
    """The BF16 GEMM table of every system under ``data/aiconfigurator``.

    ``InputError`` where there is none or one is malformed, ``MissingDependencyError`` without pyarrow.
    """
    files = {name: data / "aiconfigurator" / name / "gemm" / "gemm_perf.parquet" for name in MACHINES}
    present = {name: path for name, path in files.items() if path.exists()}
    if not present:
        raise InputError(f"{data / 'aiconfigurator'}: no GEMM tables; give the folder of the data with --data")
    for name, path in present.items():
        yield read_table(path, MACHINES[name])


def read_table(path: Path, machine: str) -> KernelTable:
    """The BF16 rows of one file."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingDependencyError("reading .parquet tables needs pyarrow: pip install pyarrow") from None
    try:
        table = pyarrow.parquet.read_table(path, columns=list(_COLUMNS))
        dtype, m, n, k, latency = (table[name].to_pylist() for name in _COLUMNS)
    except (OSError, KeyError, ValueError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: not a GEMM table ({' '.join(str(error).split())}); fetch the file again") from None
    rows = [place for place, name in enumerate(dtype) if name == "bfloat16" and latency[place] > 0]
    operators = tuple(Gemm(1, int(m[i]), int(n[i]), int(k[i]), "bfloat16", transpose_b=True) for i in rows)
    seconds = np.array([latency[i] for i in rows], dtype=float) * 1e-3
    return KernelTable("gemm-bf16", machine, operators, seconds, np.ones(len(rows), dtype=bool), str(path))
