"""A sweep for people: a table, a plot; for programs: one record."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from costmodel.base.pictures import picture
from e2e.report.text_report import milliseconds, plain_console
from e2e.sweeps.sweep_driver import SweepResult
from e2e.sweeps.sweep_results import SweepRow


def sweep_record(sweep: SweepResult) -> dict[str, Any]:
    """The JSON document."""
    rows = []
    for row in sweep.rows:
        record = asdict(row)
        record["interval_seconds"] = None if row.interval_seconds is None else list(row.interval_seconds)
        rows.append(record)
    return {"question": vars(sweep.request), "rows": rows}


def render_sweep(sweep: SweepResult, top: int, console: Console | None = None) -> None:
    """The ``top`` fastest of every GPU and number of GPUs, then what does not run and why."""
    out = console or plain_console()
    table = Table(box=None, pad_edge=False)
    for column in ("GPU", "GPUs", "parallel"):
        table.add_column(column, overflow="fold")
    for column in ("step", "80 % interval", "samples/s", "tokens/s/GPU", "exposed", "bubble", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for row in _best(sweep, top):
        table.add_row(*_cells(row))
    out.print(table)
    for status in ("does not fit", "not possible", "failed"):
        found = [row for row in sweep.rows if row.status == status]
        if found:
            first = found[0]
            out.print(
                f"{status}: {len(found)} (such as {first.gpus} x {first.gpu}, {first.parallel}: {first.reason})",
                soft_wrap=True,
            )


def _best(sweep: SweepResult, top: int) -> list[SweepRow]:
    groups: dict[tuple[str, int], list[SweepRow]] = defaultdict(list)
    for row in sweep.rows:
        if row.status == "ok" and len(groups[row.gpu, row.gpus]) < top:
            groups[row.gpu, row.gpus].append(row)
    return [row for _, group in sorted(groups.items(), key=lambda item: (item[0][1], item[0][0])) for row in group]


def _cells(row: SweepRow) -> tuple[str, ...]:
    assert row.iteration_seconds is not None and row.interval_seconds is not None
    low, high = row.interval_seconds
    memory = "" if row.peak_memory_bytes is None else f"{row.peak_memory_bytes / 2**30:.1f} GiB"
    return (
        row.gpu,
        str(row.gpus),
        row.parallel,
        milliseconds(row.iteration_seconds),
        f"{milliseconds(low)} to {milliseconds(high)}",
        f"{row.samples_per_second:.4g}",
        f"{row.tokens_per_second_per_gpu:.4g}",
        milliseconds(row.exposed_seconds or 0.0),
        milliseconds(row.bubble_seconds or 0.0),
        memory,
    )


def write_plot(sweep: SweepResult, path: Path) -> None:
    """Samples per second over the number of GPUs: the fastest way of each GPU as a line, the others as points."""
    with picture(path, 8, 5) as (axes,):
        for machine in dict.fromkeys(row.gpu for row in sweep.rows):
            rows = [row for row in sweep.rows if row.gpu == machine and row.status == "ok"]
            best: dict[int, SweepRow] = {}
            for row in rows:
                best.setdefault(row.gpus, row)
            line = sorted(best)
            (drawn,) = axes.plot(line, [best[count].samples_per_second or 0.0 for count in line], "o-", label=machine)
            rest = [row for row in rows if best[row.gpus] is not row]
            axes.plot([row.gpus for row in rest], [row.samples_per_second or 0.0 for row in rest], ".",
                      color=drawn.get_color(), alpha=0.35)  # fmt: skip
            for count in line:
                label = best[count].parallel.split(",micro")[0]
                axes.annotate(label, (count, best[count].samples_per_second or 0.0), xytext=(4, 6),
                              textcoords="offset points", fontsize=7)  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="samples per second", title=sweep.request.model)
        ticks = sorted({row.gpus for row in sweep.rows})
        axes.set_xticks(ticks, [str(count) for count in ticks], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
