"""Reader of our own measurements, ``calibration/<machine>/measured/*.csv.gz``, made by ``python -m costmodel measure``,
and of some published ones in the same form (``*.csv``, whose column ``source`` names each origin).

Rows carry the operator as a record (:mod:`costmodel.operators.serialization`) and seconds by CUDA events over
back-to-back kernels, without launch gaps. Operators without a learned model stay in the table, unread.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.collectives.calibration import DIRECTORY
from costmodel.gpu.own_gpu import read_rows
from costmodel.operators.attention import Attention
from costmodel.operators.device_work import Elementwise, Gemm, Normalization, Softmax
from costmodel.operators.layers import Conv2d
from costmodel.operators.lookups import EmbeddingLookup
from lab.data.kernel_table import KernelTable

_TENSOR_DTYPES = ("bfloat16", "float16")


def _gemm(operator: Gemm) -> str:
    if operator.dtype in _TENSOR_DTYPES:
        return "gemm-bf16"
    return "bmm" if operator.batch > 1 else "linear"


_NAMES: Mapping[type, Callable[[Any], str]] = {
    Gemm: _gemm,
    Conv2d: lambda operator: "conv",
    Elementwise: lambda operator: "add",  # one family: any of its names
    Normalization: lambda operator: "ln",
    Softmax: lambda operator: "softmax",
    EmbeddingLookup: lambda operator: "embedding",
    Attention: lambda operator: f"{operator.kernel}-{operator.phase}",
}


def read_measured(directory: Path = DIRECTORY) -> Iterator[KernelTable]:
    """Yield the tables of every machine under ``directory``, by the name of their family; empty if there are none.
    ``InputError`` for a malformed file.
    """
    for path in sorted([*directory.glob("*/measured/*.csv.gz"), *directory.glob("*/measured/*.csv")]):
        yield from read_table(path, path.parent.parent.name)


def read_table(path: Path, machine: str) -> Iterator[KernelTable]:
    """Yield the rows of one file on ``machine``, a table per family; rows with an error are skipped."""
    groups: dict[str, list[tuple[Any, float]]] = defaultdict(list)
    for operator, seconds in read_rows(path):
        name_of = _NAMES.get(type(operator))
        if name_of is not None:
            groups[name_of(operator)].append((operator, seconds))
    for name, rows in sorted(groups.items()):
        times = np.array([each for _, each in rows])
        yield KernelTable(
            name, machine, tuple(each for each, _ in rows), times, np.ones(len(rows), dtype=bool), str(path)
        )
