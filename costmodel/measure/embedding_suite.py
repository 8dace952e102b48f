"""The embedding suite: a row per kernel and batch, with the statistics of the batch, until the time budget is
used up.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.base.say import Say
from costmodel.base.termination import pass_ending
from costmodel.measure.cases import MeasuredCase, cases_left
from costmodel.measure.device import largest_tensor_bytes, provenance
from costmodel.measure.device_timing import TimingEffort, time_call
from costmodel.measure.embedding_cases import embedding_cases
from costmodel.measure.failures import failure_line, release_memory
from costmodel.measure.result_tables import Table
from costmodel.measure.time_budget import SuiteProgress, TimeBudget
from costmodel.operators.index_statistics import REUSE_EDGES
from costmodel.operators.lookups import EmbeddingLookup

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
    from costmodel.measure.calls.table_batch import triton_runs_on

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

    from costmodel.measure.calls.embedding_calls import make_embedding_call

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
