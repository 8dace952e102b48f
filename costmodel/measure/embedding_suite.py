"""The embedding suite: a row per kernel and batch, with the statistics of the batch, until the time budget is used up.

Cases are torch's kernels and table-batched ones, over sizes, reuse and number of tables. Every kind of case has its
own random generator, and kinds alternate: a run cut short is smaller, not biased.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.errors import Say
from costmodel.base.process import pass_ending
from costmodel.measure.device import (
    TimingEffort,
    failure_line,
    largest_tensor_bytes,
    provenance,
    release_memory,
    time_call,
)
from costmodel.measure.kernel_suite import MeasuredCase, cases_left
from costmodel.measure.runs import SuiteProgress, Table, TimeBudget
from costmodel.operators.layers import element_bytes
from costmodel.operators.lookups import REUSE_EDGES, EmbeddingLookup, IndexStatistics, TableLookup, zipf

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


TORCH = True
_CPU_SHARE = 32  # a CPU accumulates dense gradients a hundred times more slowly
COLUMNS = (
    ("family", "operator", "lookups", "unique_rows", "most_popular", "reuse_factors")
    + ("median_s", "minimum_s", "repeats", "calls", "error")
)  # fmt: skip


def measure_embeddings(
    device: Any, output: Path, budget: TimeBudget, resume: bool, report: Say, most: int | None = None
) -> Path:
    """Write ``output/embedding.csv`` and ``.json``; returns the former. ``most``: limit on the cases, for tests.

    Without Triton or a GPU the table-batched kernels are skipped, which a line reports.
    """
    from costmodel.measure.embedding_calls import triton_runs_on

    largest, batched = (
        largest_tensor_bytes(device) // (1 if device.type == "cuda" else _CPU_SHARE),
        triton_runs_on(device),
    )
    if not batched:
        report("Triton kernels need a GPU and `pip install triton`: table-batched lookups are left out")
    origin = provenance(device) | {"largest_tensor_bytes": largest, "triton": _triton_version() if batched else None}
    with Table(output, "embedding", COLUMNS, origin, resume) as table:
        done = {row["operator"] for row in table.rows}
        cases = islice(embedding_cases(largest, batched), most)
        measured = measure_cases(cases, done, device, budget, table, report)
        report(f"{measured} lookups measured in {budget.elapsed:.0f} s, {len(done)} known before; {table.path}")
    return table.path


def measure_cases(
    cases: Iterable[MeasuredCase[EmbeddingLookup]],
    done: set[str],
    device: Any,
    budget: TimeBudget,
    table: Table,
    report: Say,
) -> int:
    """Measure each case that is not in ``done``; returns their number."""
    progress = SuiteProgress(budget, report)
    for case, text in cases_left(cases, done, budget):
        table.add(family=case.family, operator=text, **_row(case, device))
        progress.step(f"{case.family}, {case.operator.indices} lookups")
    return progress.done


def _row(case: MeasuredCase[EmbeddingLookup], device: Any) -> dict[str, Any]:
    """Row of one case; an error of torch or Triton becomes the row's error, and the suite continues."""
    try:
        row = _measure(case.operator, device)
    except Exception as error:
        pass_ending(error)
        return {"error": failure_line(f"{case.family} lookup", error, device)}
    release_memory(device)
    return row


def _measure(operator: EmbeddingLookup, device: Any) -> dict[str, Any]:
    import torch

    from costmodel.measure.embedding_calls import make_embedding_call

    torch.manual_seed(0)
    call, lookups = make_embedding_call(operator, device)
    timing = time_call(call, device, TimingEffort())
    times = {"median_s": f"{timing.median:.4e}", "minimum_s": f"{timing.minimum:.4e}"}
    return {**_batch_statistics(lookups), **times, "repeats": timing.repeats, "calls": timing.calls}


def _batch_statistics(lookups: Iterable[Any]) -> dict[str, Any]:
    """Statistics of a batch, all tables together: lookups, distinct rows, lookups of the most popular row, and the
    share of the distinct rows in each of the 17 bins of the reuse factor.
    """
    counts = [each.unique(return_counts=True)[1].cpu().numpy() for each in lookups]
    together = np.concatenate(counts)
    edges = np.array(REUSE_EDGES) + 0.5
    shares = np.histogram(together, edges)[0] / len(together)
    return {
        "lookups": int(together.sum()),
        "unique_rows": len(together),
        "most_popular": int(together.max()),
        "reuse_factors": " ".join(f"{share:.4g}" for share in shares),
    }


def _triton_version() -> str:
    from importlib import metadata

    return metadata.version("triton")
