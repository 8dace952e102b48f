"""Embedding operators as arrays: an entry per operator and different table, so that thousands are priced at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from costmodel.embedding.lookups import EmbeddingLookup
from costmodel.embedding.statistics import IndexStatistics
from costmodel.embedding.tables import OPTIMIZER_STATE, EmbeddingTable, row_bytes
from costmodel.operators import element_bytes

KERNELS = ("embedding", "embedding_bag", "table_batched")
# Pooled values and their gradients: FP32 in table-batched kernels, whatever the rows are (output_dtype of FBGEMM and
# TorchRec); of the rows' type in PyTorch's own.
_BATCHED_VALUE = 4.0


@dataclass(frozen=True)
class Entries:
    """Arrays over entries. ``operator``: the place of the entry's operator; ``copies``: tables alike in it.

    ``group_rows``, ``group_chance`` (entries, groups): popularity, padded with groups of no rows. ``known_unique``:
    distinct rows where they are known, else NaN. ``kernel``: place in :data:`KERNELS`. ``state_row``,
    ``state_element``: FP32 numbers of a fused optimizer, ``fused`` whether there is one. Sizes in bytes: ``row`` of one
    with its scale and bias, ``element`` of one of its values, ``value`` of a pooled one.
    """

    operator: np.ndarray
    copies: np.ndarray
    rows: np.ndarray
    dim: np.ndarray
    indices: np.ndarray
    bags: np.ndarray
    row: np.ndarray
    element: np.ndarray
    value: np.ndarray
    index_bytes: np.ndarray
    known_unique: np.ndarray
    group_rows: np.ndarray
    group_chance: np.ndarray
    kernel: np.ndarray
    backward: np.ndarray
    whole: np.ndarray
    sparse: np.ndarray
    maximum: np.ndarray
    fused: np.ndarray
    state_row: np.ndarray
    state_element: np.ndarray

    @property
    def operators(self) -> int:
        """How many operators there are."""
        return int(self.operator[-1]) + 1 if len(self.operator) else 0

    @property
    def pooling(self) -> np.ndarray:
        """Mean lookups of a bag."""
        return np.asarray(self.indices / np.maximum(self.bags, 1))

    def total(self, values: np.ndarray) -> np.ndarray:
        """Sum over the tables of each operator, alike ones counted."""
        return np.bincount(self.operator, values * self.copies, self.operators)

    def most(self, values: np.ndarray) -> np.ndarray:
        """Largest value of each operator."""
        result = np.zeros(self.operators)
        np.maximum.at(result, self.operator, values)
        return result

    def first(self, values: np.ndarray) -> np.ndarray:
        """Value of the first entry of each operator: what all of them share."""
        return values[np.searchsorted(self.operator, np.arange(self.operators))]


def entries_of(operators: Sequence[EmbeddingLookup]) -> Entries:
    """Entries of ``operators``, in order."""
    rows = []
    popularity: list[tuple[IndexStatistics | None, int]] = []
    for place, each in enumerate(operators):
        flags = _flags(each)
        known = float("nan") if each.unique_rows is None else float(each.unique_rows)
        for table, count in each.parts:
            counts = (table.rows, table.dim, table.indices, table.bags)
            sizes = (row_bytes(table.dim, table.dtype), element_bytes(table.dtype), element_bytes(each.index_dtype))
            rows.append((place, count, *counts, *sizes, known, *flags))
            popularity.append((table.statistics, table.rows))
    return _entries(np.array(rows, dtype=float).reshape(len(rows), 18), popularity)


def entries_of_tables(tables: Sequence[EmbeddingTable], batches: np.ndarray, backward: bool) -> Entries:
    """Entries of table-batched kernels of one table each: the forward pass, or all of the backward pass."""
    rows = [
        (place, 1, each.rows, each.dim, each.indices(int(batch)), batch)
        + (row_bytes(each.dim, each.dtype), element_bytes(each.dtype))
        + (8, float("nan"), KERNELS.index("table_batched"), backward, backward, False, False, backward)
        + OPTIMIZER_STATE[each.optimizer]
        for place, (each, batch) in enumerate(zip(tables, batches, strict=True))
    ]
    popularity = [(each.statistics, each.rows) for each in tables]
    return _entries(np.array(rows, dtype=float).reshape(len(rows), 18), popularity)


def _flags(operator: EmbeddingLookup) -> tuple[float, ...]:
    kernel = KERNELS.index(operator.implementation)
    backward, sparse = operator.direction == "backward", operator.gradient == "sparse"
    fused = bool(operator.fused_optimizer)
    state = OPTIMIZER_STATE.get(operator.fused_optimizer, (0, 0))
    return (kernel, backward, operator.whole_pass, sparse, operator.mode == "max", fused, *state)


def _entries(columns: np.ndarray, popularity: Sequence[tuple[IndexStatistics | None, int]]) -> Entries:
    group_rows, group_chance = _groups(popularity)
    names = ("copies", "rows", "dim", "indices", "bags", "row", "element", "index_bytes", "known_unique")
    values = {name: columns[:, place] for place, name in enumerate(names, 1)}
    kernel = columns[:, 10].astype(int)
    flags = {
        name: columns[:, place].astype(bool)
        for place, name in enumerate(("backward", "whole", "sparse", "maximum", "fused"), 11)
    }
    return Entries(
        operator=columns[:, 0].astype(int),
        kernel=kernel,
        value=np.where(kernel == KERNELS.index("table_batched"), _BATCHED_VALUE, columns[:, 7]),
        group_rows=group_rows,
        group_chance=group_chance,
        state_row=columns[:, 16],
        state_element=columns[:, 17],
        **values,
        **flags,
    )


def _groups(popularity: Sequence[tuple[IndexStatistics | None, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows and chances by group, (entries, groups); even popularity is one group."""
    width = max((1 if each is None else len(each.group_rows) for each, _ in popularity), default=1)
    rows, chances = np.zeros((len(popularity), width)), np.zeros((len(popularity), width))
    for place, (each, count) in enumerate(popularity):
        if each is None:
            rows[place, 0], chances[place, 0] = count, 1 / count
        else:
            size, chance = each.arrays
            rows[place, : size.shape[1]], chances[place, : size.shape[1]] = size[0], chance[0]
    return rows, chances
