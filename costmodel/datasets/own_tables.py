"""Reader of our own measurements, ``calibration/<machine>/measured/*.csv.gz``, made by ``python -m costmodel measure``,
and of a few published ones in the same form (``*.csv``, whose column ``source`` says where each is from).

Rows carry the operator as a record (:mod:`costmodel.operators.serialization`) and seconds by CUDA events over kernels
back to back, without the gap of a launch. Operators that no learned model is fitted to yet stay in the table, unread.
"""

from __future__ import annotations

import csv
import gzip
import io
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError
from costmodel.base.foreign_files import counted, read_text
from costmodel.base.plain_json import MALFORMED, decoded
from costmodel.datasets.csv_table import KernelTable
from costmodel.operators.attention import Attention
from costmodel.operators.device_work import Elementwise, Gemm, Normalization, Softmax
from costmodel.operators.layers import Conv2d
from costmodel.operators.lookups import EmbeddingLookup
from costmodel.operators.serialization import from_record

from costmodel.collectives.calibration import DIRECTORY
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
    """The tables of every machine under ``directory``, by the name of the family they belong to; none if there are
    none. ``InputError`` for a malformed file.
    """
    for path in sorted([*directory.glob("*/measured/*.csv.gz"), *directory.glob("*/measured/*.csv")]):
        yield from read_table(path, path.parent.parent.name)


def read_table(path: Path, machine: str) -> Iterator[KernelTable]:
    """The rows of one file on ``machine``, a table per family; rows with an error are left out."""
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


def read_rows(path: Path) -> Iterator[tuple[Any, float]]:
    """Operators and seconds of the rows without an error; ``InputError`` for a malformed file."""
    try:
        table = csv.DictReader(io.StringIO(read_text(path, "table"), newline=""))
        if not {"operator", "median_s", "error"} <= set(table.fieldnames or ()):
            raise ValueError("no columns operator, median_s, error")
        rows = list(counted(table, "table"))
        pairs = [(from_record(decoded(row["operator"])), float(row["median_s"])) for row in rows if not row["error"]]
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(f"{path}: cannot be read ({error}); compress the measured table again") from None
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"{path}: cannot be read ({reason}); check its path and permissions") from None
    except MALFORMED as error:
        raise InputError(f"{path}: not a table of `python -m costmodel measure` ({error!r})") from None
    if not all(seconds > 0 for _, seconds in pairs):
        raise InputError(f"{path}: times that are not above zero; measure again")
    yield from pairs
