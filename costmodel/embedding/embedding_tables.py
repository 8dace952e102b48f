"""Embedding tables as data, and the file that lists them.

origin: where these tables are from            # required
defaults: {dim: 64, pooling: 20, dtype: float16, optimizer: rowwise_adagrad}   # optional: any key of a table but rows
tables:
  - {name: user, rows: 40000000, dim: 128, pooling: 1.5}
  - {name: history, rows: 1000000, distribution: {zipf: 1.05}}
  - {name: item, rows: 1000000, count: 8}                              # item_0 ... item_7
  - {name: page, rows: 2000000, distribution: {statistics: stats.npz}} # of the same name there; path from this file
  - {name: shop, rows: 500000, distribution: {histogram: locality_stats_2021.txt, dataset: fbgemm_t856_bs65536.pt}}
model: {bottom: [512, 64], top: [1024, 1]}     # optional, not read here: what surrounds the tables

``dtype`` is that of the rows, ``pooling`` the mean number of lookups per sample, ``distribution`` ``uniform`` (also if
it is left out), ``{zipf: exponent}``, ``{statistics: FILE}`` (statistics or index batches) or ``{histogram: FILE,
dataset: NAME}`` (the first data set if there is no name; its shape stretched over the table's rows).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, ValidationError, model_validator

from costmodel.base.errors import InputError
from costmodel.embedding.popularity import ReuseHistogram, load_statistics, read_histograms
from costmodel.machines.machine_records import Text
from costmodel.machines.record_file import StrictModel, explain, read_mapping
from costmodel.operators.layers import element_bytes
from costmodel.operators.lookups import IndexStatistics, uniform, zipf

Optimizer = Literal["sgd", "rowwise_adagrad", "adagrad", "adam"]
# FP32 values of state per row and per element (FBGEMM's fused optimizers of the same names).
OPTIMIZER_STATE: Mapping[str, tuple[int, int]] = {
    "sgd": (0, 0),
    "rowwise_adagrad": (1, 0),
    "adagrad": (0, 1),
    "adam": (0, 2),
}
DTYPES = ("float32", "float16", "bfloat16", "int8")
_SCALE_AND_BIAS = 8  # bytes, FP32, stored with every row of int8 (FBGEMM: INT8_EMB_ROW_DIM_OFFSET)


def row_bytes(dim: int, dtype: str) -> int:
    """Bytes of a row of ``dim`` values of ``dtype``, including scale and bias of quantised rows."""
    return dim * element_bytes(dtype) + (_SCALE_AND_BIAS if dtype == "int8" else 0)


@dataclass(frozen=True)
class EmbeddingTable:
    """Embedding table of ``rows`` x ``dim`` values of ``dtype``; ``pooling`` rows are summed per sample on average.

    ``statistics``: popularity of the rows, uniform if ``None``. ``optimizer``: applied by the backward kernel.
    ``ValueError`` for sizes below one, an unknown type or optimizer, statistics of another number of rows.
    """

    name: str
    rows: int
    dim: int
    pooling: float
    dtype: str = "float32"
    statistics: IndexStatistics | None = None
    optimizer: Optimizer = "sgd"

    def __post_init__(self) -> None:
        if self.rows < 1 or self.dim < 1 or not self.pooling > 0:
            raise ValueError(f"table {self.name}: rows, dim and pooling must be above zero")
        if self.dtype not in DTYPES:
            raise ValueError(
                f"table {self.name}: dtype {self.dtype!r} is not one of {', '.join(DTYPES)}; choose one of them"
            )
        if self.optimizer not in OPTIMIZER_STATE:
            known = ", ".join(OPTIMIZER_STATE)
            raise ValueError(
                f"table {self.name}: optimizer {self.optimizer!r} is not one of {known}; choose one of them"
            )
        if self.statistics is not None and self.statistics.rows != self.rows:
            raise ValueError(
                f"table {self.name}: statistics of {self.statistics.rows} rows, the table has {self.rows}; correct one"
            )

    @property
    def weight_bytes(self) -> int:
        """Bytes of all rows."""
        return self.rows * row_bytes(self.dim, self.dtype)

    @property
    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state, FP32."""
        per_row, per_element = OPTIMIZER_STATE[self.optimizer]
        return 4 * self.rows * (per_row + per_element * self.dim)

    def indices(self, batch_size: int) -> int:
        """Lookups of a batch, at least one."""
        return max(round(batch_size * self.pooling), 1)

    def popularity(self) -> IndexStatistics:
        """Row statistics of the table, uniform ones by default."""
        return uniform(self.rows) if self.statistics is None else self.statistics


@dataclass(frozen=True)
class TableFile:
    """Content of a ``tables.yaml``. ``model``: the part that is not parsed here, as it stands in the file."""

    origin: str
    tables: tuple[EmbeddingTable, ...]
    model: Mapping[str, Any] = field(default_factory=dict)


def load_tables(path: Path) -> tuple[EmbeddingTable, ...]:
    """Read the tables of the file ``path``, with ``count`` expanded; ``InputError`` names the file and the key."""
    return read_table_file(path).tables


def read_table_file(path: Path) -> TableFile:
    """Read the whole file ``path``; ``InputError`` names the file and the key."""
    document = read_mapping(path, InputError, "not a file of tables; it must be a mapping with origin and tables")
    try:
        file = _File.model_validate(document)
        sources = _Sources(path.parent)
        tables = tuple(table for each in file.tables for table in _tables(each, file.defaults, sources))
    except ValidationError as error:
        raise InputError(f"{path}: {explain(error)}") from None
    except ValueError as error:
        raise InputError(f"{path}: {error}") from None
    names = [each.name for each in tables]
    twice = next((name for name in names if names.count(name) > 1), None) if len(set(names)) < len(names) else None
    if twice is not None:
        raise InputError(f"{path}: two tables have the name {twice!r}; rename one")
    return TableFile(file.origin, tables, file.model)


_Size = Annotated[int, Field(ge=1, le=2**53)]  # integers that floating point holds exactly
# More tables than any model has; guards memory against a mistyped count.
MOST_COPIES = 100_000


class _Distribution(StrictModel):
    zipf: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    statistics: Text | None = None
    histogram: Text | None = None
    dataset: Text | None = None

    @model_validator(mode="after")
    def _is_one(self) -> _Distribution:
        given = [each for each in (self.zipf, self.statistics, self.histogram) if each is not None]
        if len(given) != 1 or (self.dataset is not None and self.histogram is None):
            raise ValueError("give uniform, {zipf: EXPONENT}, {statistics: FILE} or {histogram: FILE, dataset: NAME}")
        return self


def _distribution(value: object) -> object:
    return None if value == "uniform" else value


class _Defaults(StrictModel):
    dim: _Size | None = None
    pooling: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    dtype: Literal["float32", "float16", "bfloat16", "int8"] | None = None
    optimizer: Optimizer | None = None
    distribution: Annotated[_Distribution | None, BeforeValidator(_distribution)] = None


class _Table(_Defaults):
    name: Text
    rows: _Size
    count: Annotated[int, Field(ge=1, le=MOST_COPIES)] = 1


class _File(StrictModel):
    origin: Text
    defaults: _Defaults = _Defaults()
    tables: Annotated[list[_Table], Field(min_length=1)]
    model: dict[str, Any] = {}


def _tables(entry: _Table, defaults: _Defaults, sources: _Sources) -> list[EmbeddingTable]:
    given = {**defaults.model_dump(exclude_unset=True), **entry.model_dump(exclude_unset=True)}
    missing = [key for key in ("dim", "pooling") if given.get(key) is None]
    if missing:
        raise ValueError(f"table {entry.name}: {missing[0]} is missing; add it there or under defaults")
    names = [entry.name] if entry.count == 1 else [f"{entry.name}_{place}" for place in range(entry.count)]
    return [
        EmbeddingTable(
            name,
            entry.rows,
            given["dim"],
            float(given["pooling"]),
            given.get("dtype") or "float32",
            _statistics(given.get("distribution"), name, entry, sources),
            given.get("optimizer") or "sgd",
        )
        for name in names
    ]


class _Sources:
    """Files named by distributions, relative to the folder of the table file; each is read once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._statistics: dict[str, dict[str, IndexStatistics]] = {}
        self._histograms: dict[str, dict[str, ReuseHistogram]] = {}

    def statistics(self, file: str, table: str, entry: str) -> IndexStatistics:
        """Statistics of ``table``, or of its ``entry`` in the list if the file has only that name."""
        if file not in self._statistics:
            self._statistics[file] = load_statistics(self._directory / file)
        known = self._statistics[file]
        found = known.get(table) or known.get(entry)
        if found is None:
            raise ValueError(f"table {table}: {file} has no statistics of it (known: {', '.join(list(known)[:5])} ...)")
        return found

    def histogram(self, file: str, dataset: str | None) -> ReuseHistogram:
        """Histogram of the data set ``dataset``, by default the first one."""
        if file not in self._histograms:
            self._histograms[file] = read_histograms(self._directory / file)
        known = self._histograms[file]
        if dataset is not None and dataset not in known:
            raise ValueError(f"{file} has no data set {dataset!r} (known: {', '.join(list(known)[:3])} ...)")
        return known[dataset if dataset is not None else next(iter(known))]


def _statistics(given: Mapping[str, Any] | None, name: str, entry: _Table, sources: _Sources) -> IndexStatistics | None:
    if given is None:
        return None
    if given.get("zipf") is not None:
        return zipf(entry.rows, given["zipf"])
    if given.get("histogram") is not None:
        return sources.histogram(given["histogram"], given.get("dataset")).statistics(entry.rows)
    found = sources.statistics(given["statistics"], name, entry.name)
    if found.rows != entry.rows:
        raise ValueError(
            f"table {name}: {given['statistics']} is about {found.rows} rows, the table has {entry.rows}; correct one"
        )
    return found
