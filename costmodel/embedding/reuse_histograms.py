"""Reader of the index-reuse histograms of facebookresearch/dlrm_datasets (MIT), ``locality_stats_*.txt``.

A file has sections, each about one data set of many tables:

    fbgemm_t856_bs65536_0.pt                      856 tables, 65,536 samples
    Avg # of indices: 468084223                   lookups of the batch in all tables
    Avg # of unique cols: 61644628                distinct rows among them
    Histogram of col sizes:                       share of the distinct rows by how often the batch touches them
    (0, 1]: 0.473                                 ... 17 bins; the last is (32768+
    Ratio of index distribution at different column sizes:     share of the lookups that go to these rows
    (0, 1]: 0.069

The numbers are rounded to three digits: where a bin's rows are too few to be printed, they follow from its lookups.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from costmodel.base.errors import InputError
from costmodel.base.foreign_files import read_text
from costmodel.embedding.popularity_fit import CountBin, statistics_of_counts
from costmodel.operators.index_statistics import REUSE_BINS, REUSE_EDGES, IndexStatistics

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
