"""Ways to cut an embedding table over GPUs, and placements of the pieces.

Names are those of TorchRec (torchrec/distributed/types.py): ``table-wise`` whole on one rank; ``column-wise`` equal
blocks of columns on different ranks; ``row-wise`` equal blocks of rows, one per rank; ``data-parallel`` a copy on every
rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

if TYPE_CHECKING:
    from costmodel.gpu.embedding_tables import EmbeddingTable

PlacementKind = Literal["table-wise", "column-wise", "row-wise", "data-parallel"]
KINDS: tuple[PlacementKind, ...] = get_args(PlacementKind)
# Kinds whose pieces are placed on chosen ranks; the others are on all ranks.
PLACED: tuple[PlacementKind, ...] = ("table-wise", "column-wise")

# Narrower rows use less than a 128-byte line of memory in FP32 (an L2 line of NVIDIA GPUs).
MINIMUM_COLUMNS = 32
MOST_GPUS = 65536  # limit of a plan
# FBGEMM's table-batched kernels read rows as vectors of four (`D % 4 == 0` in split_table_batched_embeddings_ops).
COLUMN_MULTIPLE = 4


@dataclass(frozen=True)
class Rules:
    """Constraints on placements: least columns of a column-wise block, allowed kinds."""

    minimum_columns: int = MINIMUM_COLUMNS
    kinds: tuple[PlacementKind, ...] = KINDS


@dataclass(frozen=True)
class Option:
    """``table`` (by number) cut into ``shards`` pieces, without a choice of ranks.

    One piece per rank for kinds on all ranks.
    """

    table: int
    kind: PlacementKind
    shards: int

    @property
    def placed(self) -> bool:
        """True if ranks are to be chosen."""
        return self.kind in PLACED


@dataclass(frozen=True)
class TablePlacement:
    """Placement of ``table`` (by name). ``ranks``: of each block of columns or rows, in order, or of the copies."""

    table: str
    kind: PlacementKind
    ranks: tuple[int, ...]


def enumerate_options(tables: Sequence[EmbeddingTable], ranks: int, rules: Rules | None = None) -> list[Option]:
    """Enumerate all ways to cut each table, in order of tables, table-wise first."""
    rules = rules or Rules()
    return [option for place, table in enumerate(tables) for option in _of_table(place, table, ranks, rules)]


def _of_table(place: int, table: EmbeddingTable, ranks: int, rules: Rules) -> Iterable[Option]:
    if "table-wise" in rules.kinds:
        yield Option(place, "table-wise", 1)
    if "column-wise" in rules.kinds:
        for blocks in column_blocks(table.dim, ranks, rules.minimum_columns):
            yield Option(place, "column-wise", blocks)
    if "row-wise" in rules.kinds and 1 < ranks <= table.rows:
        yield Option(place, "row-wise", ranks)
    if "data-parallel" in rules.kinds and ranks > 1:
        yield Option(place, "data-parallel", ranks)


def column_blocks(dim: int, ranks: int, minimum: int) -> list[int]:
    """Possible numbers of equal blocks of columns: at least ``minimum`` wide, a multiple of four, one per rank."""
    return [
        count
        for count in range(2, min(ranks, dim // minimum) + 1)
        if dim % count == 0 and dim // count % COLUMN_MULTIPLE == 0
    ]
