"""The table of what-if questions as text."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from e2e.explain.what_if_row import WhatIfRow

_PARTS = ("host", "device", "communication")


def render_what_if(out: Console, rows: Sequence[WhatIfRow]) -> None:
    """Prints a line per question: the step, what is gained, where the critical path is then and was before."""
    if not rows:
        return
    resized = any(row.gain_per_sample is not None for row in rows)
    head = ["what if", "step", "80% interval", "gain", *(["per sample"] if resized else [])]
    table = Table(*head, *(f"path: {name}" for name in _PARTS), "longest on it", box=None)
    for column in table.columns:
        column.overflow = "fold"
    before = rows[0].shares
    for row in rows:
        low, high = row.interval_seconds
        cells = [
            row.question + (" (DOES NOT FIT)" if row.fits is False else ""),
            f"{row.iteration_seconds * 1e3:.3f} ms",
            f"{low * 1e3:.3f} to {high * 1e3:.3f}",
            "" if row is rows[0] else f"{row.gain:.2f}x",
        ]
        if resized:
            cells.append("" if row.gain_per_sample is None else f"{row.gain_per_sample:.2f}x")
        cells += [_share(before[name], row.shares[name], row is rows[0]) for name in _PARTS]
        longest = row.longest.seconds / (sum(row.path_seconds.values()) or 1.0)
        table.add_row(*cells, f"{row.longest.kind} of {row.longest.name}, {longest:.0%}")
    out.print(table)
    for row in rows:
        for warning in row.warnings:
            out.print(f"warning: {row.question}: {warning}", soft_wrap=True)


def _share(before: float, now: float, first: bool) -> str:
    return f"{before:.0%}" if first else f"{before:.0%} -> {now:.0%}"
