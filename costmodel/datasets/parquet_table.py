"""Columns of a .parquet file of aiconfigurator, and the machines that its folders are of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from costmodel.base.errors import InputError, MissingDependencyError
from costmodel.datasets.data_folder import AGAIN

MACHINES = {"a100_sxm": "a100-sxm-80gb", "h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "l40s": "l40s"}


def read_columns(path: Path, names: Sequence[str], what: str) -> list[np.ndarray]:
    """The columns ``names``, arrays of one length; ``InputError`` says that ``path`` is not ``what``."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingDependencyError("reading .parquet tables needs pyarrow: pip install pyarrow") from None
    try:
        table = pyarrow.parquet.read_table(path, columns=list(names))
        return [table[name].to_numpy(zero_copy_only=False) for name in names]
    except (OSError, KeyError, ValueError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: not {what} ({' '.join(str(error).split())}); {AGAIN}") from None


def files_of(data: Path, kind: str, name: str) -> Iterator[Path]:
    """Files ``name`` in the folders ``kind`` of the known systems below ``data``, in a fixed order."""
    for system in MACHINES:
        yield from sorted((data / "aiconfigurator" / system / kind).glob(f"*/*/{name}"))


def machine_of(path: Path, data: Path) -> str:
    """The machine that the file ``path`` below ``data`` is of."""
    return MACHINES[path.relative_to(data / "aiconfigurator").parts[0]]
