"""Cases of the embedding suite: torch's kernels and table-batched ones, over sizes, reuse and number of tables.

Every kind of case has its own random generator, and kinds alternate: a run cut short is smaller, not biased.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from costmodel.measure.cases import MeasuredCase
from costmodel.operators.index_statistics import IndexStatistics, zipf
from costmodel.operators.layers import element_bytes
from costmodel.operators.lookups import EmbeddingLookup, TableLookup

SEED = 20240923
EXPONENTS = (None, None, 0.6, 0.9, 1.05, 1.2)  # None: uniform lookups
DIMS = (8, 16, 32, 64, 64, 128, 128, 256)
POOLINGS = (1, 1, 2, 5, 10, 20, 50, 100)
DTYPES = ("float32", "float32", "float16", "bfloat16")
TABLES = (1, 2, 4, 8, 16, 32)
_TABLE_TENSORS = 4  # largest table, in units of the largest tensor
_LARGEST_INDICES = 1 << 23
_DIGITS = 6  # digits of statistics in rows of the table

LookupDraw = Callable[[random.Random, int], EmbeddingLookup]


def _table(rng: random.Random, largest: int, bags: int, dtype: str) -> TableLookup:
    """A table and a batch whose output and indices fit ``largest`` bytes; the table may be a few times that."""
    dim, pooling = rng.choice(DIMS), rng.choice(POOLINGS)
    size = element_bytes(dtype)
    bags = max(min(bags, largest // (2 * dim * size)), 1)
    pooling = max(min(pooling, largest // (32 * bags), _LARGEST_INDICES // bags), 1)
    most = max(_TABLE_TENSORS * largest // (4 * dim * size), 64)
    rows = _log_uniform(rng, 32, most)
    return TableLookup(rows, dim, bags * pooling, bags, dtype, popularity(rows, rng.choice(EXPONENTS)))


def popularity(rows: int, exponent: float | None) -> IndexStatistics | None:
    """Zipf statistics with few digits, so that a row of the table is short; ``None`` for uniform lookups."""
    if exponent is None:
        return None
    exact = zipf(rows, exponent)
    shares = [round(each, _DIGITS) for each in exact.group_shares[1:]]
    return replace(exact, group_shares=(1.0 - sum(shares), *shares))


def _log_uniform(rng: random.Random, low: int, high: int) -> int:
    return int(min(max(round(low * (high / low) ** rng.random()), low), high))


def _bags(rng: random.Random) -> int:
    return _log_uniform(rng, 16, 65536)


def _torch(rng: random.Random, largest: int, kernel: Any) -> EmbeddingLookup:
    table = _table(rng, largest, _bags(rng), rng.choice(DTYPES))
    if kernel == "embedding":
        table = replace(table, bags=table.indices)
        if table.indices * table.dim * element_bytes(table.dtype) > largest:
            table = replace(table, indices=table.bags // 100 + 1, bags=table.bags // 100 + 1)
    backward = rng.random() < 0.6
    mode: Any = rng.choice(("sum", "sum", "mean", "max")) if kernel == "embedding_bag" else "sum"
    sparse = backward and mode != "max" and rng.random() < 0.35
    return EmbeddingLookup(
        table.rows,
        table.dim,
        table.indices,
        table.bags,
        dtype=table.dtype,
        direction="backward" if backward else "forward",
        statistics=table.statistics,
        kernel=kernel,
        gradient="sparse" if sparse else "dense",
        whole_pass=backward,
        mode=mode,
    )


def _batched(rng: random.Random, largest: int) -> EmbeddingLookup:
    count, bags, dtype = rng.choice(TABLES), _bags(rng), rng.choice(DTYPES)
    share = max(largest // count, 1024)
    first = _table(rng, share, bags, dtype)
    alike = rng.random() < 0.4
    rest = (first if alike else _of_bags(_table(rng, share, first.bags, dtype), first.bags) for _ in range(count - 1))
    tables = [first, *rest]
    optimizer = rng.choice(("", "sgd", "rowwise_adagrad"))
    direction: Any = "backward" if optimizer else "forward"
    return EmbeddingLookup.of(tables, direction, optimizer, whole_pass=bool(optimizer))


def _of_bags(table: TableLookup, bags: int) -> TableLookup:
    """The same table with ``bags`` bags, since all tables of a kernel have equally many."""
    pooling = max(min(table.indices // table.bags, _LARGEST_INDICES // bags), 1)
    return replace(table, indices=bags * pooling, bags=bags)


DRAWS: dict[str, tuple[LookupDraw, int]] = {
    "embedding": (lambda rng, largest: _torch(rng, largest, "embedding"), 3),
    "embedding_bag": (lambda rng, largest: _torch(rng, largest, "embedding_bag"), 4),
    "table_batched": (_batched, 6),
}


def embedding_cases(largest_bytes: int, batched: bool, seed: int = SEED) -> Iterator[MeasuredCase[EmbeddingLookup]]:
    """Endless sequence of distinct cases, deterministic for a seed; ``batched``: include the Triton kernels."""
    kinds = [name for name, (_, weight) in DRAWS.items() for _ in range(weight) if batched or name != "table_batched"]
    generators = {name: random.Random(f"{seed}-{name}") for name in DRAWS}
    order, seen = random.Random(seed), set()
    while True:
        order.shuffle(kinds)
        for kind in kinds:
            operator = DRAWS[kind][0](generators[kind], largest_bytes)
            if operator not in seen:
                seen.add(operator)
                yield MeasuredCase(kind, operator)
