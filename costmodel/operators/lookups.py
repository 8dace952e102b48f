"""Operator records of embedding lookups, like those of :mod:`costmodel.operators.device_work`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from costmodel.operators.counted_work import CountedWork
from costmodel.operators.index_statistics import IndexStatistics, uniform
from costmodel.operators.layers import element_bytes

Direction = Literal["forward", "backward"]


@dataclass(frozen=True)
class TableLookup:
    """Lookups of one table: ``indices`` lookups into ``rows`` x ``dim`` values, pooled to ``bags`` outputs.

    ``statistics``: row popularity; uniform if ``None``.
    """

    rows: int
    dim: int
    indices: int
    bags: int
    dtype: str = "float32"
    statistics: IndexStatistics | None = None

    def unique_rows(self) -> float:
        """Expected number of distinct rows."""
        return (self.statistics or uniform(self.rows)).unique_rows(self.indices)


@dataclass(frozen=True)
class EmbeddingLookup(CountedWork):
    """Lookup of table rows by index: ``indices`` lookups into ``rows`` x ``dim``; ``bags`` pooled outputs (``bags ==
    indices``: not pooled, ``nn.Embedding``).
    """

    rows: int
    dim: int
    indices: int
    bags: int
    # Number of identical tables in one kernel (table-batched).
    tables: int = 1
    dtype: str = "float32"
    direction: Direction = "forward"
    # Distinct rows per table, if known; else derived from `statistics`.
    unique_rows: int | None = None
    # Optimizer of a backward kernel that updates the rows itself (a key of
    # ``costmodel.embedding.embedding_tables.OPTIMIZER_STATE``).
    fused_optimizer: str = ""
    # Row popularity; uniform if None.
    statistics: IndexStatistics | None = None
    # Tables of any sizes (:meth:`of`); the preceding fields are then the sums (``dim``: the widest).
    mixed: tuple[TableLookup, ...] = ()
    # ``auto``: derived from the other fields.
    kernel: Literal["auto", "embedding", "embedding_bag", "table_batched"] = "auto"
    # For an unfused backward pass: ``dense`` like the table or ``sparse`` (a row per lookup).
    gradient: Literal["dense", "sparse"] = "dense"
    # Backward pass from end to end, with clearing the gradient and sorting the indices; else only its last step, with
    # separate operators for the rest.
    whole_pass: bool = False
    # Mode of the pooling.
    mode: Literal["sum", "mean", "max"] = "sum"
    index_dtype: Literal["int64", "int32"] = "int64"

    @classmethod
    def of(
        cls,
        tables: Sequence[TableLookup],
        direction: Direction = "forward",
        fused_optimizer: str = "",
        whole_pass: bool = False,
    ) -> EmbeddingLookup:
        """Lookup of any tables in one table-batched kernel."""
        rows, indices, bags = (sum(getattr(each, name) for each in tables) for name in ("rows", "indices", "bags"))
        return cls(
            rows,
            max(each.dim for each in tables),
            indices,
            bags,
            len(tables),
            tables[0].dtype,
            direction,
            fused_optimizer=fused_optimizer,
            mixed=tuple(tables),
            kernel="table_batched",
            whole_pass=whole_pass,
        )

    @property
    def parts(self) -> tuple[tuple[TableLookup, int], ...]:
        """Every distinct table and its count."""
        if self.mixed:
            return tuple((each, 1) for each in self.mixed)
        table = TableLookup(self.rows, self.dim, self.indices, self.bags, self.dtype, self.statistics)
        return ((table, self.tables),)

    @property
    def implementation(self) -> Literal["embedding", "embedding_bag", "table_batched"]:
        """Kernel type: several tables or a fused optimizer need a table-batched one; without pooling, a plain one."""
        if self.kernel != "auto":
            return self.kernel
        if self.tables > 1 or self.fused_optimizer:
            return "table_batched"
        return "embedding" if self.bags == self.indices else "embedding_bag"

    @property
    def flops(self) -> int:
        return sum(count * each.indices * each.dim for each, count in self.parts)

    @property
    def read_bytes(self) -> int:
        forward, size = self.direction == "forward", 0
        for each, count in self.parts:
            values = self._touched(each) if forward else each.bags
            index_bytes = each.indices * element_bytes(self.index_dtype)
            size += count * (values * each.dim * element_bytes(each.dtype) + index_bytes)
        return size

    @property
    def write_bytes(self) -> int:
        forward, size = self.direction == "forward", 0
        for each, count in self.parts:
            values = each.bags if forward else self._touched(each)
            size += count * values * each.dim * element_bytes(each.dtype)
        return size

    def _touched(self, table: TableLookup) -> int:
        """Rows that cross the chip's border: the distinct ones if known, else those of every lookup."""
        if self.unique_rows is not None:
            return self.unique_rows
        return table.indices if table.statistics is None else round(table.unique_rows())
