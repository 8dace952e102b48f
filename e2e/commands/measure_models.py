"""Models suite: step times of the built-in workloads, measured on the present device.

Each case is timed over many steps without the profiler, with a wait only at the end of a sample, then traced for a few
steps (Kineto). DLRM runs with ``nn.EmbeddingBag`` tables: the table-batched operator is not part of torch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from costmodel.base.errors import OutputError
from costmodel.base.say import Say
from costmodel.base.termination import pass_ending
from costmodel.measure.device import open_device, provenance
from costmodel.measure.failures import failure_line, release_memory
from costmodel.measure.overhead_suite import step_seconds, traced_seconds
from costmodel.measure.result_tables import Table
from costmodel.measure.time_budget import SuiteProgress, TimeBudget
from e2e.commands.model_cases import CASES, CPU_CASES, ModelCase

COLUMNS = (
    *("model", "mode", "dtype", "attention", "batch_size", "sequence_length"),
    *("median_s", "minimum_s", "samples", "steps", "profiled_s", "peak_memory_bytes", "trace", "error"),
)
SAMPLES, TRACED_STEPS = 7, 2
_SAMPLE_SECONDS, _MOST_STEPS = 0.5, 50
_SECONDS_OF_A_CASE = 20.0


def measure_models(
    device_name: str,
    output: Path,
    minutes: float,
    resume: bool,
    report: Say,
    cases: tuple[ModelCase, ...] | None = None,
) -> Path:
    """Write ``output/models.csv``, ``.json`` and a trace for every case marked so; return the path of the table.

    A case that does not fit the memory, or that this device cannot run, is a row with an ``error``.
    """
    budget = TimeBudget(minutes)
    device = open_device(device_name)
    chosen = cases or (CASES if device.type == "cuda" else CPU_CASES)
    with Table(output, "models", COLUMNS, provenance(device), resume) as table:
        done = {tuple(row[name] for name in COLUMNS[:6]) for row in table.rows}
        progress = SuiteProgress(budget, report, len(chosen))
        for case in chosen:
            if case.key() not in done and budget.left(_SECONDS_OF_A_CASE if device.type == "cuda" else 0.0):
                table.add(**case.record(), **_row(case, device, output))
            progress.step(case.name())
        report(f"models measured in {budget.elapsed:.0f} s; {table.path}")
    return table.path


def _row(case: ModelCase, device: Any, output: Path) -> dict[str, Any]:
    """Return the row of a case; errors of torch or transformers become its result, and the suite continues."""
    try:
        return _measure(case, device, output)
    except OutputError:
        raise
    except Exception as error:
        pass_ending(error)
        return {"error": failure_line(case.name(), error, device)}
    finally:
        release_memory(device)


def _measure(case: ModelCase, device: Any, output: Path) -> dict[str, Any]:
    import torch

    from costmodel.measure.calls.sample_tensors import allow_tf32
    from e2e.commands.model_steps import real_step

    allow_tf32(case.dtype == "tf32")
    torch.manual_seed(0)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    step = _without_gradients(real_step(case, device)) if case.mode == "inference" else real_step(case, device)
    step_seconds(step, device, 2)
    once = step_seconds(step, device, 2)
    steps = max(min(int(_SAMPLE_SECONDS / once), _MOST_STEPS), 2)
    samples = [step_seconds(step, device, steps) for _ in range(SAMPLES)]
    row: dict[str, Any] = {"samples": SAMPLES, "steps": steps}
    row |= {"median_s": f"{statistics.median(samples):.5e}", "minimum_s": f"{min(samples):.5e}"}
    if device.type == "cuda":
        row["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    if case.traced:
        row["trace"] = f"models-{case.name()}.json.gz"
        row["profiled_s"] = f"{traced_seconds(step, device, TRACED_STEPS, output / row['trace'], shapes=True):.5e}"
    return row


def _without_gradients(step: Callable[[], Any]) -> Callable[[], Any]:
    import torch

    def run() -> Any:
        with torch.no_grad():
            return step()

    return run
