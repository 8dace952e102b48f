"""Suites by name; entry point of the command line."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, Say
from costmodel.measure.collective_suite import measure_collectives
from costmodel.measure.device import open_device
from costmodel.measure.kernel_suite import measure_kernels
from costmodel.measure.runs import TimeBudget


def measure_overheads(device: Any, output: Path, budget: TimeBudget, resume: bool, report: Say) -> Path:
    """Run the overheads suite, whose models PyTorch defines: it is loaded now."""
    from costmodel.measure import overhead_suite

    return overhead_suite.measure_overheads(device, output, budget, resume, report)


SUITES: dict[str, Callable[[Any, Path, TimeBudget, bool, Say], Path]] = {
    "kernels": measure_kernels,
    "overheads": measure_overheads,
    "embedding": partial(measure_kernels, name="embedding"),
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
