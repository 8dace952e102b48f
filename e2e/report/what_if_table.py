"""Table of what-if questions, for text and HTML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.table import Table

from e2e.explain.what_if_row import WhatIfRow

_PARTS = ("host", "device", "communication")


def what_if_cells(rows: Sequence[WhatIfRow]) -> tuple[list[str], list[list[str]]]:
    """Return head and rows, one per question: step time, gain, and composition of the critical path."""
    resized = any(row.gain_per_sample is not None for row in rows)
    head = ["what if", "step", "80% interval", "gain (80%)", *(["per sample"] if resized else [])]
    head += [*(f"path: {name}" for name in _PARTS), "longest on it"]
    return head, [_cells(row, rows[0], resized) for row in rows]


def what_if_remarks(rows: Sequence[WhatIfRow]) -> Iterator[str]:
    """Yield the rows that cannot be told apart, each pair once."""
    if not rows:
        return
    if rows[0].gain_interval is None:
        yield "the step is too large to be simulated again for every cause of error: its gains have no intervals"
        return
    for place, row in enumerate(rows):
        others = [each.question for each in rows[place + 1 :] if each.question in row.alike]
        if others:
            yield f"not told apart (80 %): {row.question} and {', '.join(others)}"


def what_if_warnings(rows: Sequence[WhatIfRow]) -> Iterator[str]:
    """Yield the warnings of each answer, prefixed with its question."""
    for row in rows:
        for warning in row.warnings:
            yield f"{row.question}: {warning}"


def render_what_if(out: Console, rows: Sequence[WhatIfRow]) -> None:
    """Print the table and its warnings, if anything was asked."""
    if not rows:
        return
    head, lines = what_if_cells(rows)
    table = Table(*head, box=None)
    for column in table.columns:
        column.overflow = "fold"
    for line in lines:
        table.add_row(*line)
    out.print(table)
    for remark in what_if_remarks(rows):
        out.print(remark, soft_wrap=True, markup=False)
    for warning in what_if_warnings(rows):
        out.print(f"warning: {warning}", soft_wrap=True)


def _cells(row: WhatIfRow, first: WhatIfRow, resized: bool) -> list[str]:
    low, high = row.interval_seconds
    cells = [
        row.question + (" (DOES NOT FIT)" if row.fits is False else ""),
        f"{row.iteration_seconds * 1e3:.3f} ms",
        f"{low * 1e3:.3f} to {high * 1e3:.3f}",
        # With another number of samples, the gain per sample matters.
        "" if row is first else _gain(row.gain, row.gain_interval if row.gain_per_sample is None else None),
    ]
    if resized:
        cells.append("" if row.gain_per_sample is None else _gain(row.gain_per_sample, row.gain_per_sample_interval))
    cells += [_share(first.shares[name], row.shares[name], row is first) for name in _PARTS]
    longest = row.longest.seconds / (sum(row.path_seconds.values()) or 1.0)
    return [*cells, f"{row.longest.kind} of {row.longest.name}, {longest:.0%}"]


def _gain(gain: float, interval: tuple[float, float] | None) -> str:
    return f"{gain:.2f}x" if interval is None else f"{gain:.2f}x ({interval[0]:.2f}-{interval[1]:.2f})"


def _share(before: float, now: float, first: bool) -> str:
    return f"{before:.0%}" if first else f"{before:.0%} -> {now:.0%}"
