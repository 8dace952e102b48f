"""Output of a sweep: a table and a plot, and a JSON record."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from costmodel.base.pictures import picture
from e2e.report.fact_lines import number_text
from e2e.report.text_report import milliseconds, plain_console
from e2e.sweeps.run_plan import DAY, RunPlan
from e2e.sweeps.sweep_driver import SweepResult
from e2e.sweeps.sweep_results import SweepRow

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

# Candidate positions of a plot label: the side of the text at the point, and the direction from there.
_SIDES: tuple[tuple[Literal["left", "right", "center"], int], ...] = (("left", 1), ("right", -1), ("center", 0))
_LEVELS: tuple[tuple[Literal["bottom", "top"], int], ...] = (("bottom", 1), ("top", -1))


def sweep_record(sweep: SweepResult) -> dict[str, Any]:
    """Return the JSON document."""
    rows = []
    for row in sweep.rows:
        record = asdict(row)
        record["run_seconds"], record["cost"] = sweep.plan.seconds(row), sweep.plan.cost(row)
        record["interval_seconds"] = None if row.interval_seconds is None else list(row.interval_seconds)
        rows.append(record)
    plan = {"tokens": sweep.plan.tokens, "deadline_seconds": sweep.plan.deadline}
    return {"question": {**vars(sweep.request), **plan}, "too_large": sweep.too_large, "left": sweep.left, "rows": rows}


def render_sweep(sweep: SweepResult, top: int, console: Console | None = None) -> None:
    """Print the ``top`` fastest of every GPU and number of GPUs, then the ways that do not run and the reasons."""
    out = console or plain_console()
    table = Table(box=None, pad_edge=False)
    for column in ("GPU", "GPUs", "parallel"):
        table.add_column(column, overflow="fold")
    for column in ("step", "80 % interval", "samples/s", "tokens/s/GPU", "MFU", "exposed", "bubble", "memory"):
        table.add_column(column, justify="right", no_wrap=True)
    for column in plan_columns(sweep.plan):
        table.add_column(column, justify="right", no_wrap=True)
    for row in _best(sweep, top):
        table.add_row(*_cells(row), *plan_cells(sweep.plan, row))
    out.print(table)
    if sweep.too_large or sweep.left:
        out.print(
            f"not predicted: {sweep.too_large} ways cannot fit, {sweep.left} look slower (--tries)", soft_wrap=True
        )
    for status in ("may not fit", "does not fit", "not possible", "failed"):
        found = [row for row in sweep.rows if row.status == status]
        if found:
            first = found[0]
            out.print(
                f"{status}: {len(found)} (such as {first.gpus} x {first.gpu}, {first.parallel}: {first.reason})",
                soft_wrap=True,
            )


def plan_columns(plan: RunPlan) -> tuple[str, ...]:
    """Additional columns for the training run."""
    days = () if plan.tokens is None else ("days",)
    return days if plan.prices is None else (*days, "cost of the run" if plan.tokens else "cost of 1M tokens")


def plan_cells(plan: RunPlan, row: SweepRow) -> tuple[str, ...]:
    """Cells of the :func:`plan_columns`."""
    seconds, cost = plan.seconds(row), plan.cost(row)
    days = () if seconds is None else (f"{seconds / DAY:.1f}" + (" (late)" if plan.late(row) else ""),)
    return days if cost is None else (*days, number_text(cost))


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
        row.way,
        milliseconds(row.iteration_seconds),
        f"{milliseconds(low)} to {milliseconds(high)}",
        number_text(row.samples_per_second or 0.0),
        f"{row.tokens_per_second_per_gpu:,.0f}",
        "" if row.mfu is None else f"{row.mfu:.1%}",
        milliseconds(row.exposed_seconds or 0.0),
        milliseconds(row.bubble_seconds or 0.0),
        memory,
    )


def write_plot(sweep: SweepResult, path: Path) -> None:
    """Plot samples per second over the number of GPUs: the fastest way of each GPU as a line, the others as points."""
    labels: list[tuple[str, tuple[float, float]]] = []
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
            labels += [
                (best[count].parallel.split(",micro")[0], (count, best[count].samples_per_second or 0.0))
                for count in line
            ]
        axes.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="samples per second", title=sweep.request.model)
        ticks = sorted({row.gpus for row in sweep.rows})
        axes.set_xticks(ticks, [str(count) for count in ticks], minor=False)
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
        place_labels(axes.figure, axes, labels)


def place_labels(figure: Figure, axes: Axes, labels: Sequence[tuple[str, tuple[float, float]]]) -> list[Annotation]:
    """Place texts beside their points without overlapping other texts and points; leave out those without room."""
    from matplotlib.transforms import Bbox

    figure.draw_without_rendering()
    points = [axes.transData.transform(point) for _, point in labels]
    taken = [Bbox.from_extents(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    placed: list[Annotation] = []
    for text, point in labels:
        for away, (side, across), (level, up) in product((5, 12, 22), _SIDES, _LEVELS):
            note = axes.annotate(text, point, xytext=(away * across, away * up), textcoords="offset points", fontsize=7,
                                 ha=side, va=level)  # fmt: skip
            note.set_in_layout(False)  # the layout must not move after these measurements
            box = note.get_window_extent()
            inside = (
                axes.bbox.x0 <= box.x0 and box.x1 <= axes.bbox.x1 and axes.bbox.y0 <= box.y0 and box.y1 <= axes.bbox.y1
            )
            if inside and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                placed.append(note)
                break
            note.remove()
    return placed
