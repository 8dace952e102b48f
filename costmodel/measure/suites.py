"""Suites by name; entry point of the command line."""

from __future__ import annotations

from pathlib import Path

from costmodel.base.errors import InputError, Say
from costmodel.measure.collective_suite import measure_collectives
from costmodel.measure.device import open_device
from costmodel.measure.embedding_suite import measure_embeddings
from costmodel.measure.kernel_suite import measure_kernels
from costmodel.measure.overhead_suite import measure_overheads
from costmodel.measure.runs import TimeBudget

SUITES = {
    "kernels": measure_kernels,
    "overheads": measure_overheads,
    "embedding": measure_embeddings,
    "collectives": measure_collectives,
}


def measure(suite: str, device: str, output: Path, minutes: float, resume: bool, report: Say) -> Path:
    """Run ``suite`` for about ``minutes`` at most; returns its table. Measurements are kept if it is interrupted."""
    if suite not in SUITES:
        raise InputError(f"--suite {suite}: not known; choose one of {', '.join(SUITES)}")
    budget = TimeBudget(minutes)
    opened = open_device(device)  # loads PyTorch
    budget.restart()
    return SUITES[suite](opened, output, budget, resume, report)
