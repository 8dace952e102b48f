"""Embedding tables, the file that lists them, and the popularity of their rows, estimated from batches of lookups.

The file of tables (.yaml):

origin: where these tables are from            # required
defaults: {dim: 64, pooling: 20, dtype: float16, optimizer: rowwise_adagrad}   # optional: any key of a table but rows
tables:
  - {name: user, rows: 40000000, dim: 128, pooling: 1.5}
  - {name: history, rows: 1000000, distribution: {zipf: 1.05}}
  - {name: item, rows: 1000000, count: 8}                              # item_0 ... item_7
  - {name: page, rows: 2000000, distribution: {indices: batches.npz}}  # of the same name there; path from this file
model: {bottom: [512, 64], top: [1024, 1]}     # optional, not read here: what surrounds the tables

``dtype`` is that of the rows, ``pooling`` the mean number of lookups per sample, ``distribution`` ``uniform`` (also if
it is left out), ``{zipf: exponent}`` or ``{indices: FILE}``.

The lookups of one or more batches after each other (.npz):

NAME.indices (lookups,) integers; NAME.offsets, first position of each bag, (bags,), or (bags + 1,) with the end, as in
``nn.EmbeddingBag``; optionally NAME.rows (), default the largest index + 1

**From the counts of a batch to popularity**: a mixture of Poisson rates, by maximum likelihood. A row of rate r
(lookups per batch) is accessed a Poisson number of times. The number of rows accessed once, twice, ... determines
the distribution of rates (the nonparametric maximum likelihood estimate of Laird, JASA 73, 1978, on a grid, by
expectation maximisation), and with it the distinct rows of a smaller or larger batch. For frequently accessed rows
the count itself is the rate. If the table's size is known, rows never accessed count too; if not, only rows that
could have been seen are found (zero-truncated), and larger batches are extrapolated from them alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field, ValidationError, model_validator

from costmodel.base.errors import InputError
from costmodel.base.input_files import BROKEN_ARCHIVE, MALFORMED, open_arrays
from costmodel.machines.machine_records import Text
from costmodel.machines.record_file import StrictModel, explain_problems, read_mapping
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


def read_table_file(path: Path) -> TableFile:
    """Read the whole file ``path``; ``InputError`` names the file and the key."""
    document = read_mapping(path, InputError, "not a file of tables; it must be a mapping with origin and tables")
    try:
        file = _File.model_validate(document)
        sources = _Sources(path.parent)
        tables = tuple(table for each in file.tables for table in _tables(each, file.defaults, sources))
    except ValidationError as error:
        raise InputError(f"{path}: {explain_problems(error)}") from None
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
    indices: Text | None = None

    @model_validator(mode="after")
    def _is_one(self) -> _Distribution:
        if (self.zipf is None) == (self.indices is None):
            raise ValueError("give uniform, {zipf: EXPONENT} or {indices: FILE}")
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
            _popularity(given.get("distribution"), name, entry, sources),
            given.get("optimizer") or "sgd",
        )
        for name in names
    ]


class _Sources:
    """Files named by distributions, relative to the folder of the table file; each is read once."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._known: dict[str, dict[str, IndexStatistics]] = {}

    def statistics(self, file: str, table: str, entry: str) -> IndexStatistics:
        """Statistics of ``table``, or of its ``entry`` in the list if the file has only that name."""
        if file not in self._known:
            self._known[file] = load_statistics(self._directory / file)
        known = self._known[file]
        found = known.get(table) or known.get(entry)
        if found is None:
            raise ValueError(f"table {table}: {file} has no indices of it (known: {', '.join(list(known)[:5])} ...)")
        return found


def _popularity(given: Mapping[str, Any] | None, name: str, entry: _Table, sources: _Sources) -> IndexStatistics | None:
    if given is None:
        return None
    if given.get("zipf") is not None:
        return zipf(entry.rows, given["zipf"])
    return on_rows(sources.statistics(given["indices"], name, entry.name), entry.rows, name)


_MIXED_BELOW = 64  # counts up to here are modelled by the mixture: above, a count is its rate within 13 %
_RATES_PER_DOUBLING, _SLOWEST, _SLOWEST_TRUNCATED = 4, 1 / 64, 1 / 8
_ROUNDS = 4000
_NEGLIGIBLE = 1e-9


@dataclass(frozen=True)
class CountBin:
    """``rows`` rows that were accessed ``above`` < count <= ``up_to`` times, ``mean`` times on average."""

    above: float
    up_to: float
    rows: float
    mean: float


def statistics_of_counts(bins: Sequence[CountBin], rows: int | None, origin: str) -> IndexStatistics:
    """Row popularity estimated from the counts of one batch; ``rows`` of the table, ``None`` if unknown.

    ``ValueError`` if no row was accessed, or more rows than the table has.
    """
    touched = [each for each in bins if each.rows > 0]
    unique = sum(each.rows for each in touched)
    if not unique:
        raise ValueError("no row is looked up; give batches with indices")
    if rows is not None and unique > rows * (1 + 1e-9):
        raise ValueError(f"{unique:.0f} different rows are looked up in a table of {rows}; correct its rows")
    often = [each for each in touched if each.above >= _MIXED_BELOW]
    seldom = [each for each in touched if each.above < _MIXED_BELOW]
    group_rows, rates = [each.rows for each in often], [each.mean for each in often]
    unseen = None if rows is None else max(rows - unique, 0.0)
    if seldom:
        grid, weight = _mixture(seldom, unseen)
        group_rows += weight.tolist()
        rates += grid.tolist()
    return _statistics(np.array(group_rows), np.array(rates), rows, origin)


def _mixture(bins: Sequence[CountBin], unseen: float | None) -> tuple[np.ndarray, np.ndarray]:
    """Rates and number of rows of each, preserving the total lookups of the bins."""
    slowest = _SLOWEST_TRUNCATED if unseen is None else _SLOWEST
    fastest = max(max(each.up_to for each in bins if np.isfinite(each.up_to)), 2.0)
    count = int(np.ceil(_RATES_PER_DOUBLING * np.log2(fastest / slowest))) + 1
    grid = np.geomspace(slowest, fastest, count)
    observed = np.array([each.rows for each in bins])
    likely = _bin_chances(bins, grid)
    missed = np.exp(-grid)
    if unseen is None:
        weight = _expectation_maximisation(likely / (1 - missed), observed) / (1 - missed)
    else:
        never = np.concatenate([[1.0], missed])  # a rate of 0: rows that are never accessed
        likely = np.vstack([never, np.hstack([np.zeros((len(bins), 1)), likely])])
        weight = _expectation_maximisation(likely, np.concatenate([[unseen], observed]))[1:]
    lookups = sum(each.rows * each.mean for each in bins)
    kept = weight > _NEGLIGIBLE * weight.sum()
    grid, weight = grid[kept], weight[kept]
    return grid * (lookups / (grid * weight).sum()), weight


def _bin_chances(bins: Sequence[CountBin], rates: np.ndarray) -> np.ndarray:
    """Probability that a row of each rate falls into each bin, (bins, rates)."""
    from scipy.special import pdtr

    return np.array([pdtr(each.up_to, rates) - pdtr(each.above, rates) for each in bins])


def _expectation_maximisation(likely: np.ndarray, observed: np.ndarray) -> np.ndarray:
    """Rows of each component, with the same sum as ``observed``; ``likely`` (bins, components) has probabilities as
    columns.
    """
    weight = np.full(likely.shape[1], observed.sum() / likely.shape[1])
    for _ in range(_ROUNDS):
        expected = np.maximum(likely @ weight, 1e-300)
        weight = weight * (likely.T @ (observed / expected))
    return np.asarray(weight)


def _statistics(group_rows: np.ndarray, rates: np.ndarray, rows: int | None, origin: str) -> IndexStatistics:
    order = np.argsort(-rates)
    group_rows, rates = group_rows[order], rates[order]
    total = rows if rows is not None else int(np.ceil(group_rows.sum()))
    group_rows = group_rows * min(1.0, total / group_rows.sum())  # rounding
    shares = group_rows * rates
    shares = shares / shares.sum()
    return IndexStatistics(total, tuple(group_rows.tolist()), tuple(shares.tolist()), origin)


_SINGLE_COUNTS = 64  # counts up to here have bins of their own, then eight per doubling
_BINS_PER_DOUBLING = 8


@dataclass(frozen=True)
class IndexBatch:
    """Lookups of one table: ``indices`` (lookups,) into ``rows`` rows; bag b spans ``offsets[b]`` to ``offsets[b +
    1]``.
    """

    indices: np.ndarray
    offsets: np.ndarray
    rows: int

    @property
    def pooling(self) -> float:
        """Mean number of lookups per bag."""
        return len(self.indices) / max(len(self.offsets) - 1, 1)


def load_batches(path: Path) -> dict[str, IndexBatch]:
    """Read the batches of the file ``path`` by table; ``InputError`` names the file, the table and the error."""
    try:
        with open_arrays(path) as content:
            arrays = {key: content[key] for key in content.files}
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror or error}); check its path and permissions"
        ) from None
    except (*MALFORMED, *BROKEN_ARCHIVE) as error:
        raise InputError(
            f"{path}: not an .npz of index batches ({error}); save NAME.indices and NAME.offsets with numpy.savez"
        ) from None
    names = [key.removesuffix(".indices") for key in arrays if key.endswith(".indices")]
    if not names:
        raise InputError(f"{path}: no array NAME.indices; see costmodel/gpu/embedding_tables.py for the form")
    return {name: _batch(path, name, arrays) for name in names}


def statistics_of_batch(batch: IndexBatch, origin: str = "index batch") -> IndexStatistics:
    """Row popularity estimated from the lookups of ``batch``."""
    counts = np.unique(batch.indices, return_counts=True)[1].astype(float)
    last = max(float(counts.max()), 2.0)
    octaves = max(int(np.ceil(_BINS_PER_DOUBLING * np.log2(last / _SINGLE_COUNTS))), 0) if last > _SINGLE_COUNTS else 0
    wide = np.unique(np.ceil(np.geomspace(_SINGLE_COUNTS, last, octaves + 1)))[1:] if octaves else np.zeros(0)
    edges = np.concatenate([np.arange(min(_SINGLE_COUNTS, int(last)) + 1, dtype=float), wide])
    place = np.searchsorted(edges, counts) - 1
    rows = np.bincount(place, minlength=len(edges) - 1)
    lookups = np.bincount(place, counts, len(edges) - 1)
    bins = [
        CountBin(edges[each], edges[each + 1], float(rows[each]), float(lookups[each] / rows[each]))
        for each in np.flatnonzero(rows)
    ]
    return statistics_of_counts(bins, batch.rows, origin)


def _batch(path: Path, name: str, arrays: Mapping[str, np.ndarray]) -> IndexBatch:
    indices = arrays[f"{name}.indices"]
    offsets = arrays.get(f"{name}.offsets", np.arange(len(indices) + 1) if indices.ndim == 1 else indices)
    for what, array in (("indices", indices), ("offsets", offsets)):
        if array.ndim != 1 or not np.issubdtype(array.dtype, np.integer) or not array.size:
            raise InputError(f"{path}: {name}.{what} must be a list of integers that is not empty")
    if offsets[-1] != len(indices):
        offsets = np.append(offsets, len(indices))
    if offsets[0] != 0 or (np.diff(offsets) < 0).any():
        raise InputError(f"{path}: {name}.offsets must ascend from 0 to the number of indices ({len(indices)})")
    told = arrays.get(f"{name}.rows")
    if told is not None and (told.size != 1 or not np.issubdtype(told.dtype, np.integer)):
        raise InputError(f"{path}: {name}.rows must be a whole number")
    rows = int(indices.max()) + 1 if told is None else int(told.reshape(())[()])
    if indices.min() < 0 or indices.max() >= rows:
        raise InputError(f"{path}: {name}.indices must be from 0 to {rows - 1}, found {indices.min()}, {indices.max()}")
    return IndexBatch(indices, offsets, rows)


def load_statistics(path: Path) -> dict[str, IndexStatistics]:
    """Row popularity by table, from the batches in the file ``path``; ``InputError`` as in :func:`load_batches`."""
    return {name: statistics_of_batch(each, f"{path.name}: {name}") for name, each in load_batches(path).items()}


def on_rows(statistics: IndexStatistics, rows: int, table: str) -> IndexStatistics:
    """Return ``statistics`` for a table of ``rows`` rows: batches tell rows only up to their largest index.

    ``ValueError`` names the ``table`` if it has fewer rows.
    """
    if statistics.rows > rows:
        raise ValueError(f"table {table}: has indices of {statistics.rows} rows, the table has {rows}; correct one")
    return replace(statistics, rows=rows)
