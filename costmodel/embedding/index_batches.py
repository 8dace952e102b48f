"""Index batches: the lookups of real batches, per table, and their statistics.

File (``.npz``), arrays per table: ``NAME.indices`` (lookups,) integers, one or more batches after each other;
``NAME.offsets`` first position of each bag, (bags,), or (bags + 1,) with the end, as in ``nn.EmbeddingBag``; optionally
``NAME.rows`` (), default the largest index + 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from costmodel.base.broken_archives import BROKEN_ARCHIVE
from costmodel.base.errors import InputError
from costmodel.base.foreign_files import open_arrays
from costmodel.base.plain_json import MALFORMED
from costmodel.embedding.popularity_fit import CountBin, statistics_of_counts
from costmodel.operators.index_statistics import IndexStatistics

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
        raise InputError(f"{path}: no array NAME.indices; see costmodel/embedding/index_batches.py for the form")
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
