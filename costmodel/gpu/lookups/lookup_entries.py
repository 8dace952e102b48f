"""Embedding operators as arrays: an entry per operator and distinct table, so that thousands are priced at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from costmodel.embedding.embedding_tables import OPTIMIZER_STATE, EmbeddingTable, row_bytes
from costmodel.operators.index_statistics import IndexStatistics
from costmodel.operators.layers import element_bytes
from costmodel.operators.lookups import EmbeddingLookup, TableLookup

KERNELS = ("embedding", "embedding_bag", "table_batched")
# Pooled values and their gradients: FP32 in table-batched kernels, whatever the dtype of the rows (output_dtype of
# FBGEMM and TorchRec); of the rows' dtype in PyTorch's own kernels.
_BATCHED_VALUE = 4.0


@dataclass(frozen=True)
class Entries:
    """Arrays over entries."""

    # Index of the entry's operator.
    operator: np.ndarray
    # Number of identical tables in it.
    copies: np.ndarray
    rows: np.ndarray
    dim: np.ndarray
    indices: np.ndarray
    bags: np.ndarray
    # Bytes of a row with its scale and bias, of one of its values, and of a pooled value.
    row: np.ndarray
    element: np.ndarray
    value: np.ndarray
    index_bytes: np.ndarray
    # Distinct rows if known, else NaN.
    known_unique: np.ndarray
    # Popularity (entries, groups), padded with groups of no rows.
    group_rows: np.ndarray
    group_chance: np.ndarray
    # Index into :data:`KERNELS`.
    kernel: np.ndarray
    backward: np.ndarray
    whole: np.ndarray
    sparse: np.ndarray
    maximum: np.ndarray
    # True if there is a fused optimizer, and its FP32 values of state per row and per element.
    fused: np.ndarray
    state_row: np.ndarray
    state_element: np.ndarray

    @property
    def operators(self) -> int:
        """Number of operators."""
        return int(self.operator[-1]) + 1 if len(self.operator) else 0

    @property
    def pooling(self) -> np.ndarray:
        """Mean number of lookups per bag."""
        return np.asarray(self.indices / np.maximum(self.bags, 1))

    def total(self, values: np.ndarray) -> np.ndarray:
        """Sum over the tables of each operator, identical ones counted."""
        return np.bincount(self.operator, values * self.copies, self.operators)

    def most(self, values: np.ndarray) -> np.ndarray:
        """Largest value of each operator."""
        result = np.zeros(self.operators)
        np.maximum.at(result, self.operator, values)
        return result

    def first(self, values: np.ndarray) -> np.ndarray:
        """Value of the first entry of each operator, for values that all its entries share."""
        return values[np.searchsorted(self.operator, np.arange(self.operators))]


class _Row(NamedTuple):
    """One entry: scalars for the arrays of the same names in :class:`Entries`."""

    operator: int
    copies: int
    rows: int
    dim: int
    indices: int
    bags: float
    row: float
    element: int
    index_bytes: int
    known_unique: float
    kernel: int
    backward: bool
    whole: bool
    sparse: bool
    maximum: bool
    fused: bool
    state_row: int
    state_element: int


def entries_of(operators: Sequence[EmbeddingLookup]) -> Entries:
    """Entries of ``operators``, in order."""
    parts = [(place, each, table, count) for place, each in enumerate(operators) for table, count in each.parts]
    popularity = [(table.statistics, table.rows) for _, _, table, _ in parts]
    return _entries([_row(*part) for part in parts], popularity)


def _row(place: int, operator: EmbeddingLookup, table: TableLookup, copies: int) -> _Row:
    state_row, state_element = OPTIMIZER_STATE.get(operator.fused_optimizer, (0, 0))
    return _Row(
        operator=place,
        copies=copies,
        rows=table.rows,
        dim=table.dim,
        indices=table.indices,
        bags=table.bags,
        row=row_bytes(table.dim, table.dtype),
        element=element_bytes(table.dtype),
        index_bytes=element_bytes(operator.index_dtype),
        known_unique=float("nan") if operator.unique_rows is None else float(operator.unique_rows),
        kernel=KERNELS.index(operator.implementation),
        backward=operator.direction == "backward",
        whole=operator.whole_pass,
        sparse=operator.gradient == "sparse",
        maximum=operator.mode == "max",
        fused=bool(operator.fused_optimizer),
        state_row=state_row,
        state_element=state_element,
    )


def entries_of_tables(tables: Sequence[EmbeddingTable], batches: np.ndarray, backward: bool) -> Entries:
    """Entries of table-batched kernels of one table each: the forward pass, or the whole backward pass."""
    rows = [
        _table_row(place, each, float(batch), backward)
        for place, (each, batch) in enumerate(zip(tables, batches, strict=True))
    ]
    return _entries(rows, [(each.statistics, each.rows) for each in tables])


def _table_row(place: int, table: EmbeddingTable, batch: float, backward: bool) -> _Row:
    state_row, state_element = OPTIMIZER_STATE[table.optimizer]
    return _Row(
        operator=place,
        copies=1,
        rows=table.rows,
        dim=table.dim,
        indices=table.indices(int(batch)),
        bags=batch,
        row=row_bytes(table.dim, table.dtype),
        element=element_bytes(table.dtype),
        index_bytes=8,
        known_unique=float("nan"),
        kernel=KERNELS.index("table_batched"),
        backward=backward,
        whole=backward,
        sparse=False,
        maximum=False,
        fused=backward,
        state_row=state_row,
        state_element=state_element,
    )


def _entries(rows: Sequence[_Row], popularity: Sequence[tuple[IndexStatistics | None, int]]) -> Entries:
    group_rows, group_chance = _groups(popularity)
    matrix = np.array(rows, dtype=float).reshape(len(rows), len(_Row._fields))
    columns: dict[str, np.ndarray] = dict(zip(_Row._fields, matrix.T, strict=True))
    columns |= {name: columns[name].astype(int) for name in ("operator", "kernel")}
    columns |= {name: columns[name].astype(bool) for name in ("backward", "whole", "sparse", "maximum", "fused")}
    batched = columns["kernel"] == KERNELS.index("table_batched")
    value = np.where(batched, _BATCHED_VALUE, columns["element"])
    return Entries(**columns, value=value, group_rows=group_rows, group_chance=group_chance)


def _groups(popularity: Sequence[tuple[IndexStatistics | None, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Rows and probabilities by group, (entries, groups); uniform popularity is one group."""
    width = max((1 if each is None else len(each.group_rows) for each, _ in popularity), default=1)
    rows, chances = np.zeros((len(popularity), width)), np.zeros((len(popularity), width))
    for place, (each, count) in enumerate(popularity):
        if each is None:
            rows[place, 0], chances[place, 0] = count, 1 / count
        else:
            size, chance = each.arrays
            rows[place, : size.shape[1]], chances[place, : size.shape[1]] = size[0], chance[0]
    return rows, chances
