"""Measured kernels of one GPU, and their splits into rows to fit, select and report on; readers of .parquet files and
of our own measurements.

Our own are ``calibration/<machine>/measured/*.csv.gz``, made by ``python -m costmodel measure``, and some published
ones in the same form (``*.csv``, whose column ``source`` names each origin). Rows carry the operator as a record
(:mod:`costmodel.operators.any_operator`) and seconds by CUDA events over back-to-back kernels, without launch gaps.
Operators without a learned model stay in the table, unread.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from costmodel.base.errors import InputError, MissingDependencyError
from costmodel.collectives.calibration import DIRECTORY
from costmodel.gpu.own_gpu import read_rows
from costmodel.operators.any_operator import AnyOperator
from costmodel.operators.attention import Attention
from costmodel.operators.device_work import Elementwise, Gemm, Normalization, Softmax
from costmodel.operators.layers import Conv2d
from costmodel.operators.lookups import EmbeddingLookup
from lab.data.data_folder import AGAIN

Split = Literal["fit", "select", "report"]
_SHARES: tuple[tuple[Split, int], ...] = (("fit", 70), ("select", 85), ("report", 100))


@dataclass(frozen=True)
class KernelTable:
    """Kernel times of ``operators`` on ``machine``, in ``seconds``. ``name``: such as ``bmm``, ``add``.

    ``counted``: rows dominated by the kernel rather than the host. ``source``: the file, for messages.
    """

    name: str
    machine: str
    operators: tuple[AnyOperator, ...]
    seconds: np.ndarray
    counted: np.ndarray
    source: str

    def only(self, mask: np.ndarray) -> KernelTable:
        """The rows where ``mask`` is true."""
        kept = tuple(each for each, keep in zip(self.operators, mask, strict=True) if keep)
        return KernelTable(self.name, self.machine, kept, self.seconds[mask], self.counted[mask], self.source)

    def splits(self) -> np.ndarray:
        """Name of the split of every row."""
        return np.array([split_of(each) for each in self.operators])


def split_of(operator: AnyOperator) -> Split:
    """Split of an operator: 70 % ``fit``, 15 % ``select``, 15 % ``report``, by a checksum of the shape: the same on
    every GPU.
    """
    place = zlib.crc32(repr(operator).encode()) % 100
    return next(name for name, end in _SHARES if place < end)


def sample(table: KernelTable, rows: int) -> KernelTable:
    """At most ``rows`` rows, spread evenly over the table; deterministic."""
    if len(table.operators) <= rows:
        return table
    mask = np.zeros(len(table.operators), dtype=bool)
    mask[np.linspace(0, len(mask) - 1, rows).astype(int)] = True
    return table.only(mask)


def counted_only(tables: Sequence[KernelTable]) -> list[KernelTable]:
    """The counted rows of each table; empty tables are dropped."""
    return [kept for kept in (each.only(each.counted) for each in tables) if kept.operators]


MACHINES = {"a100_sxm": "a100-sxm-80gb", "h100_sxm": "h100-sxm", "h200_sxm": "h200-sxm", "l40s": "l40s"}


def read_columns(path: Path, names: Sequence[str], what: str) -> list[np.ndarray]:
    """Read the columns ``names``, arrays of one length; ``InputError`` says that ``path`` is not ``what``."""
    table = read_parquet(path, what, names)
    return [table[name].to_numpy(zero_copy_only=False) for name in names]


def read_parquet(path: Path, what: str, names: Sequence[str] | None = None) -> Any:
    """Read the columns ``names``, or all, as a table of Arrow; ``InputError`` says that ``path`` is not ``what``."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingDependencyError("reading .parquet tables needs pyarrow: pip install pyarrow") from None
    try:
        table = pyarrow.parquet.read_table(path, columns=names and list(names))
        for name in names or ():
            table[name]
        return table
    except (OSError, KeyError, ValueError, pyarrow.ArrowException) as error:
        raise InputError(f"{path}: not {what} ({' '.join(str(error).split())}); {AGAIN}") from None


def files_of(data: Path, kind: str, name: str) -> Iterator[Path]:
    """Files ``name`` in the folders ``kind`` of the known systems below ``data``, in a fixed order."""
    for system in MACHINES:
        yield from sorted((data / "aiconfigurator" / system / kind).glob(f"*/*/{name}"))


def machine_of(path: Path, data: Path) -> str:
    """Machine of the file ``path`` below ``data``."""
    return MACHINES[path.relative_to(data / "aiconfigurator").parts[0]]


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
        yield from read_own_table(path, path.parent.parent.name)


def read_own_table(path: Path, machine: str) -> Iterator[KernelTable]:
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
