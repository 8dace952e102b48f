"""The kernels suite: a row per operator until the time budget is used up."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from costmodel.base.say import Say
from costmodel.base.termination import pass_ending
from costmodel.measure.cases import DRAWS, MeasuredCase, cases_left, kernel_cases
from costmodel.measure.device import largest_tensor_bytes, provenance
from costmodel.measure.device_timing import TimingEffort, profile_call, time_call
from costmodel.measure.failures import failure_line
from costmodel.measure.result_tables import Table
from costmodel.measure.time_budget import SuiteProgress, TimeBudget
from costmodel.operators.any_operator import AnyOperator, dtype_of

TORCH = True
COLUMNS = ("family", "operator", "median_s", "minimum_s", "kernel_s", "launches", "repeats", "calls", "error")
_PROFILED_EVERY = 8


def measure_kernels(
    device: Any, output: Path, budget: TimeBudget, resume: bool, report: Say, most: int | None = None
) -> Path:
    """Write ``output/kernels.csv`` and ``.json``; returns the former. ``most``: limit on the cases, for tests.

    An operator that torch cannot run on ``device`` gives a row with an ``error`` and no time.
    """
    largest = largest_tensor_bytes(device)
    with Table(output, "kernels", COLUMNS, provenance(device) | {"largest_tensor_bytes": largest}, resume) as table:
        done = {row["operator"] for row in table.rows}
        measured = measure_cases(islice(kernel_cases(largest), most), done, device, budget, table, report)
        report(f"{measured} operators measured in {budget.elapsed:.0f} s, {len(done)} known before; {table.path}")
    return table.path


def measure_cases(
    cases: Iterable[MeasuredCase[AnyOperator]],
    done: set[str],
    device: Any,
    budget: TimeBudget,
    table: Table,
    report: Say,
) -> int:
    """Measure each case that is not in ``done``; returns their number. A family's first case is profiled, then every
    eighth.
    """
    progress, counts = SuiteProgress(budget, report), dict.fromkeys(DRAWS, 0)
    for case, text in cases_left(cases, done, budget):
        profiled = counts[case.family] % _PROFILED_EVERY == 0
        counts[case.family] += 1
        table.add(family=case.family, operator=text, **_row(case, device, profiled))
        progress.step(text)
    return progress.done


def _row(case: MeasuredCase[AnyOperator], device: Any, profiled: bool) -> dict[str, Any]:
    """Row of one case; an error of torch becomes the row's error, and the suite continues."""
    try:
        return _measure(case.operator, device, profiled)
    except Exception as error:
        pass_ending(error)
        return {"error": failure_line(case.operator, error, device)}


def _measure(operator: Any, device: Any, profiled: bool) -> dict[str, Any]:
    import torch

    from costmodel.measure.calls.operator_calls import make_call
    from costmodel.measure.calls.sample_tensors import allow_tf32

    allow_tf32(dtype_of(operator) == "tf32")
    torch.manual_seed(0)
    call = make_call(operator, device)
    if call is None:
        return {"error": "no call for this operator"}
    timing = time_call(call, device, TimingEffort())
    row: dict[str, Any] = {"repeats": timing.repeats, "calls": timing.calls}
    row |= {"median_s": f"{timing.median:.4e}", "minimum_s": f"{timing.minimum:.4e}"}
    if profiled:
        profile = profile_call(call, device)
        row["launches"] = profile.launches
        if profile.kernel_seconds:
            row["kernel_s"] = f"{profile.kernel_seconds:.4e}"
    return row
