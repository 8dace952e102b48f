"""Row popularity of embedding tables: from files of statistics, batches of indices and published histograms.

Statistics of tables on disk, ``.json`` for people, ``.npz`` for many tables; and the lookups of real batches
(``.npz``), one or more batches after each other:

statistics .json   {"format": 1, "tables": {NAME: {"rows", "group_rows", "group_shares", "origin"}}}
statistics .npz    NAME.rows (), NAME.group_rows (groups,), NAME.group_shares (groups,), NAME.origin (text)
batches    .npz    NAME.indices (lookups,) integers; NAME.offsets, first position of each bag, (bags,), or (bags + 1,)
                   with the end, as in ``nn.EmbeddingBag``; optionally NAME.rows (), default the largest index + 1

**Histograms**: ``locality_stats_*.txt`` of facebookresearch/dlrm_datasets (MIT). A file has sections, each about one
data set of many tables:

    fbgemm_t856_bs65536_0.pt                      856 tables, 65,536 samples
    Avg # of indices: 468084223                   lookups of the batch in all tables
    Avg # of unique cols: 61644628                distinct rows among them
    Histogram of col sizes:                       share of the distinct rows by how often the batch touches them
    (0, 1]: 0.473                                 ... 17 bins; the last is (32768+
    Ratio of index distribution at different column sizes:     share of the lookups that go to these rows
    (0, 1]: 0.069

The numbers are rounded to three digits: where a bin's rows are too few to be printed, they follow from its lookups.

**From the counts of a batch to popularity**: a mixture of Poisson rates, by maximum likelihood. A row of rate r
(lookups per batch) is accessed a Poisson number of times. The number of rows accessed once, twice, ... determines
the distribution of rates (the nonparametric maximum likelihood estimate of Laird, JASA 73, 1978, on a grid, by
expectation maximisation), and with it the distinct rows of a smaller or larger batch. For frequently accessed rows
the count itself is the rate. If the table's size is known, rows never accessed count too; if not, only rows that
could have been seen are found (zero-truncated), and larger batches are extrapolated from them alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import InputError, OutputError
from costmodel.base.input_files import BROKEN_ARCHIVE, MALFORMED, decoded, open_arrays, read_text
from costmodel.base.output_files import write_whole
from costmodel.operators.lookups import REUSE_BINS, REUSE_EDGES, IndexStatistics

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
        raise InputError(f"{path}: no array NAME.indices; see costmodel/embedding/popularity.py for the form")
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


_NAME = re.compile(r"\S*_t(?P<tables>\d+)_bs(?P<batch>\d+)\S*\.pt")
_COUNT = re.compile(r"Avg # of (indices|unique cols): (\d+)")
_BIN = re.compile(r"\((\d+)(?:, (\d+)\]|\+): ([0-9.]+)")
_RELIABLE = 0.01  # shares from here on are known to 5 %


@dataclass(frozen=True)
class ReuseHistogram:
    """One data set: ``tables`` together have ``lookups`` of ``unique`` distinct rows in a batch of ``batch_size``.

    ``unique_shares``, ``lookup_shares``: by bin of ``REUSE_EDGES``, (17,).
    """

    name: str
    tables: int
    batch_size: int
    lookups: int
    unique: int
    unique_shares: tuple[float, ...]
    lookup_shares: tuple[float, ...]

    @property
    def pooling(self) -> float:
        """Mean number of lookups per sample and table."""
        return self.lookups / (self.tables * self.batch_size)

    def statistics(self, rows: int | None = None) -> IndexStatistics:
        """Row popularity in the mean table of the data set, stretched to ``rows`` rows if given."""
        bins = [each for each in map(self._bin, range(REUSE_BINS)) if each is not None]
        found = statistics_of_counts(bins, None, f"dlrm_datasets {self.name}")
        return found if rows is None else found.resized(rows)

    def _bin(self, place: int) -> CountBin | None:
        above, up_to = REUSE_EDGES[place], REUSE_EDGES[place + 1]
        lookups = self.lookup_shares[place] * self.lookups / self.tables
        rows = self.unique_shares[place] * self.unique / self.tables
        if lookups <= 0:
            return None
        typical = (above * min(up_to, 4 * above)) ** 0.5 if above else 1.0
        mean = lookups / rows if self.unique_shares[place] >= _RELIABLE else typical
        mean = min(max(mean, above + 1), up_to)
        return CountBin(above, up_to, lookups / mean, mean)


def read_histograms(path: Path) -> dict[str, ReuseHistogram]:
    """Read every data set of the file ``path`` by name; ``InputError`` names a missing or malformed file."""
    try:
        lines = read_text(path, "table").splitlines()
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its path and permissions") from None
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: no text ({error.reason}); fetch the file again") from None
    found = {}
    for name, section in _sections(lines):
        try:
            found[name] = _histogram(name, section)
        except ValueError as error:
            raise InputError(f"{path}: {name}: {error}; fetch the file again") from None
    if not found:
        raise InputError(f"{path}: no data set (a line such as fbgemm_t856_bs65536_0.pt); give a locality_stats file")
    return found


def _sections(lines: Sequence[str]) -> Iterator[tuple[str, list[str]]]:
    starts = [place for place, line in enumerate(lines) if _NAME.fullmatch(line.strip())]
    ends = [*starts, len(lines)][1:]
    for start, end in zip(starts, ends, strict=True):
        yield lines[start].strip(), list(lines[start + 1 : end])


def _histogram(name: str, section: Sequence[str]) -> ReuseHistogram:
    counts = {match[1]: int(match[2]) for line in section if (match := _COUNT.match(line))}
    shares = [float(match[3]) for line in section if (match := _BIN.match(line))]
    if set(counts) != {"indices", "unique cols"} or len(shares) != 2 * REUSE_BINS:
        raise ValueError(f"needs two counts and two histograms of {REUSE_BINS} bins, has {len(counts)}, {len(shares)}")
    match = _NAME.fullmatch(name)
    assert match is not None
    sizes = (int(match["tables"]), int(match["batch"]), counts["indices"], counts["unique cols"])
    return ReuseHistogram(name, *sizes, tuple(shares[:REUSE_BINS]), tuple(shares[REUSE_BINS:]))


_FORMAT = 1
_FIELDS = ("rows", "group_rows", "group_shares", "origin")
_WANTED = f"every table needs {', '.join(_FIELDS)}, or indices and offsets of its batches (.npz)"


def save_statistics(statistics: Mapping[str, IndexStatistics], path: Path) -> None:
    """Write the tables' statistics in the format of the suffix of ``path``; ``OutputError`` on failure, ``InputError``
    for another suffix.
    """
    check_suffix(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".json":
            record = {"format": _FORMAT, "tables": {name: to_record(each) for name, each in statistics.items()}}
            write_whole(path, json.dumps(record, indent=1) + "\n")
        else:
            arrays: dict[str, Any] = {
                f"{name}.{key}": np.array(value)
                for name, each in statistics.items()
                for key, value in to_record(each).items()
            }
            np.savez_compressed(path, **arrays)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another place") from None


def load_statistics(path: Path) -> dict[str, IndexStatistics]:
    """Read statistics by table from a file of :func:`save_statistics`, or compute them from the batches in an ``.npz``.

    ``InputError`` names a file that is missing, malformed or of another kind.
    """
    check_suffix(path)
    try:
        records = _read_json(path) if path.suffix == ".json" else _read_npz(path)
        return {name: _named(name, record) for name, record in records.items()}
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror or error}); check its path and permissions"
        ) from None
    except (*MALFORMED, *BROKEN_ARCHIVE) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else error
        raise InputError(f"{path}: no statistics of tables: {what}; {_WANTED}") from None


def to_record(statistics: IndexStatistics) -> dict[str, Any]:
    """JSON-able content of ``statistics``."""
    return {name: getattr(statistics, name) for name in _FIELDS}


def from_record(record: Mapping[str, Any]) -> IndexStatistics:
    """Inverse of :func:`to_record`; ``KeyError``, ``TypeError`` or ``ValueError`` for anything else."""
    rows, shares = (tuple(float(each) for each in record[name]) for name in ("group_rows", "group_shares"))
    return IndexStatistics(int(record["rows"]), rows, shares, str(record["origin"]))


def _named(name: str, record: Any) -> IndexStatistics:
    try:
        if not isinstance(record, Mapping):
            raise ValueError("is not a mapping; write one of names")
        return from_record(record)
    except KeyError as error:
        raise ValueError(f"table {name!r} lacks {error}; add it") from None
    except MALFORMED as error:
        raise ValueError(f"table {name!r}: {error}") from None


def check_suffix(path: Path) -> None:
    """Raise ``InputError`` unless the suffix is ``.json`` or ``.npz``."""
    if path.suffix not in (".json", ".npz"):
        raise InputError(f"{path}: statistics are kept in .json or .npz; give such a file")


def _read_json(path: Path) -> dict[str, Any]:
    record = decoded(read_text(path, "record"))
    if record.get("format") != _FORMAT:
        raise ValueError(f"format {record.get('format')!r}, known: {_FORMAT}")
    if not isinstance(record["tables"], dict):
        raise ValueError("tables is not a mapping of names; write each table's under its name")
    return dict(record["tables"])


def _read_npz(path: Path) -> dict[str, Any]:
    records: dict[str, dict[str, Any]] = {}
    with open_arrays(path) as content:
        if any(key.endswith(".indices") for key in content.files):
            batches = load_batches(path).items()
            return {name: to_record(statistics_of_batch(each, f"{path.name}: {name}")) for name, each in batches}
        for key in content.files:
            name, dot, part = key.rpartition(".")
            if not dot:
                raise ValueError(f"array {key!r} names no table; call it TABLE.indices or so")
            records.setdefault(name, {})[part] = content[key]
    return records
