"""A prediction as text for people."""

from __future__ import annotations

import sys
from collections.abc import Mapping

from rich.console import Console
from rich.table import Table

from e2e.prediction import Prediction

ROWS = 12


def render(prediction: Prediction, console: Console | None = None) -> None:
    """Prints the step time, its parts, the critical path, memory, coverage and warnings."""
    out = console or plain_console()
    low, high = prediction.interval_seconds
    out.print(f"{prediction.workload} on {prediction.machine}")
    out.print(
        f"step        {milliseconds(prediction.iteration_seconds)}  "
        f"(80% interval {milliseconds(low)} to {milliseconds(high)})"
    )
    out.print(
        f"phases      forward {milliseconds(prediction.forward_seconds)}, "
        f"backward {milliseconds(prediction.backward_seconds)}, "
        f"optimizer {milliseconds(prediction.optimizer_seconds)}"
    )
    out.print(
        f"GPU         active {milliseconds(prediction.gpu_active_seconds)}, "
        f"idle {milliseconds(prediction.gpu_idle_seconds)}; "
        f"{prediction.host_bound_fraction:.0%} of the critical path is on the host"
    )
    out.print(f"launches    {prediction.kernels} of {prediction.operators} operator calls")
    if prediction.peak_memory_bytes is not None:
        fits = "fits" if prediction.fits else "DOES NOT FIT"
        out.print(
            f"memory      {prediction.peak_memory_bytes / 2**30:.2f} GiB at the peak of "
            f"{prediction.memory_capacity_bytes / 2**30:.0f} GiB: {fits}"
        )
    out.print(
        "host        " + ", ".join(f"{kind} {milliseconds(value)}" for kind, value in prediction.overheads.items())
    )
    sources = ", ".join(f"{share:.0%} {source}" for source, share in prediction.coverage.items())
    out.print(f"coverage    {sources} (share of the device time by source of its price)")
    for title, key in (("operator", "by_operator"), ("bound", "by_bound")):
        _shares(out, f"device time by {title}", prediction.breakdown[key])
    _path(out, prediction)
    for note in prediction.notes:
        out.print(f"note: {note}", soft_wrap=True)
    for warning in prediction.warnings:
        out.print(f"warning: {warning}", soft_wrap=True)


def _shares(out: Console, title: str, parts: Mapping[str, float]) -> None:
    whole = sum(parts.values()) or 1.0
    table = Table(title, "ms", "share", box=None)
    for name, seconds in list(parts.items())[:ROWS]:
        table.add_row(name, f"{seconds * 1e3:.3f}", f"{seconds / whole:.1%}")
    out.print(table)


def _path(out: Console, prediction: Prediction) -> None:
    table = Table("critical path", "operator", "ms", "share", "waits mostly for", box=None)
    for part in prediction.critical_path[:ROWS]:
        share = part.seconds / prediction.iteration_seconds if prediction.iteration_seconds else 0.0
        table.add_row(part.kind, part.name, f"{part.seconds * 1e3:.3f}", f"{share:.1%}", part.waits_for)
    out.print(table)


def milliseconds(seconds: float) -> str:
    """For people."""
    return f"{seconds * 1e3:.3f} ms"


def plain_console() -> Console:
    """Plain lines when standard output is not a terminal."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(highlight=False, width=160, no_color=True)
