"""Output of a sweep: a table, a plot, a JSON record, and an HTML page.

The self-contained page has the fastest ways over the number of GPUs and a table of all ways.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from costmodel.pages.charts import PALETTE, inline_chart, picture, place_labels, set_logarithmic, set_tip
from costmodel.pages.document import render, write_page
from e2e.report.tables import milliseconds, number_text
from e2e.report.text_report import plain_console
from e2e.sweeps.sweep_driver import DAY, RunPlan, SweepResult
from e2e.sweeps.sweep_results import SweepRow

_NAMES = ("GPU", "GPUs", "parallel")
COLUMNS = (*_NAMES, "step", "80 % interval", "samples/s", "tokens/s/GPU", "MFU", "exposed", "bubble", "memory")


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
    for column in _NAMES:
        table.add_column(column, overflow="fold")
    for column in (*COLUMNS[len(_NAMES) :], *plan_columns(sweep.plan)):
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
    with picture(path, 8, 5) as (axes,):
        _draw_frontier(axes, sweep)
        axes.set_title(sweep.request.model)
        axes.grid(alpha=0.3)


# Most dots of slower ways for each GPU and number of GPUs, the fastest first.
_MOST_DOTS = 40


def _draw_frontier(axes: Any, sweep: SweepResult) -> None:
    labels: list[tuple[str, tuple[float, float]]] = []
    dots: Counter[tuple[str, int]] = Counter()
    ran = [row for row in sweep.rows if row.status == "ok"]
    for row in ran:
        dots[row.gpu, row.gpus] += 1
        if 1 < dots[row.gpu, row.gpus] <= _MOST_DOTS:
            (dot,) = axes.plot(row.gpus, row.samples_per_second or 0.0, ".", color=_colour(sweep, row.gpu), alpha=0.35)
            set_tip(dot, _tip(row))
    for line in _lines(ran).values():
        _draw_line(axes, sweep, line, [row.samples_per_second or 0.0 for row in line])
        labels += [(short_way(row.parallel), (row.gpus, row.samples_per_second or 0.0)) for row in line]
    set_logarithmic(axes, "xy")
    _finish(axes, sweep, "samples per second")
    place_labels(axes, labels)


def _draw_efficiency(axes: Any, sweep: SweepResult) -> None:
    """Draw tokens per second and GPU of the fastest ways, which shows the parallel efficiency."""
    for line in _lines(row for row in sweep.rows if row.status == "ok").values():
        _draw_line(axes, sweep, line, [row.tokens_per_second_per_gpu or 0.0 for row in line])
    set_logarithmic(axes, "x")
    _finish(axes, sweep, "tokens/s per GPU")
    axes.set_ylim(bottom=0.0)


def _draw_line(axes: Any, sweep: SweepResult, line: Sequence[SweepRow], values: Sequence[float]) -> None:
    """Draw one line of a GPU, with a tip at each point."""
    colour = _colour(sweep, line[0].gpu)
    axes.plot([row.gpus for row in line], values, color=colour, label=line[0].gpu)
    for row, value in zip(line, values, strict=True):
        (dot,) = axes.plot(row.gpus, value, "o", color=colour)
        set_tip(dot, _tip(row))


def _finish(axes: Any, sweep: SweepResult, label: str) -> None:
    axes.set(xlabel="GPUs", ylabel=label)
    # The requested numbers of GPUs, those without results included.
    ticks = sorted({row.gpus for row in sweep.rows})
    axes.set_xticks(ticks, [f"{count:,}" for count in ticks])
    if axes.get_legend_handles_labels()[0]:
        axes.legend()


def _lines(ran: Iterable[SweepRow]) -> dict[str, list[SweepRow]]:
    """Fastest ways of each GPU, by number of GPUs."""
    lines: dict[str, list[SweepRow]] = defaultdict(list)
    for (gpu, _), row in sorted(fastest(list(ran)).items(), key=lambda item: item[0][1]):
        lines[gpu].append(row)
    return lines


def write_sweep_page(sweep: SweepResult, path: Path) -> None:
    """Write the page; raises ``OutputError`` if it cannot be written."""
    write_page(path, sweep_page(sweep))


def sweep_page(sweep: SweepResult) -> str:
    """Return the HTML text."""
    ran = [row for row in sweep.rows if row.status == "ok"]
    model = Path(sweep.request.model).name
    curve = bool(ran) and len({row.gpus for row in sweep.rows}) > 1
    titles = "Samples per second over the number of GPUs", "Tokens per second and GPU over the number of GPUs"
    return render(
        "e2e.sweeps/sweep.html",
        title=f"{model}: sweep",
        heading=f"{model}: {len(sweep.rows)} ways to run it",
        answer=_answer(ran, sweep.plan),
        question=_question(sweep),
        frontier=inline_chart(titles[0], lambda axes: _draw_frontier(axes, sweep), 5.0) if curve else None,
        efficiency=inline_chart(titles[1], lambda axes: _draw_efficiency(axes, sweep)) if curve else None,
        columns=(*COLUMNS, *plan_columns(sweep.plan)),
        ways=[(*_cells(row), *plan_cells(sweep.plan, row)) for row in ran],
        rest=[
            (row.gpu, f"{row.gpus:,}", row.parallel, row.status, row.reason) for row in sweep.rows if row.status != "ok"
        ],
    )


def fastest(rows: Sequence[SweepRow]) -> dict[tuple[str, int], SweepRow]:
    """Map (GPU, number of GPUs) to the first, i.e. fastest, of the ranked ``rows``."""
    best: dict[tuple[str, int], SweepRow] = {}
    for row in rows:
        best.setdefault((row.gpu, row.gpus), row)
    return best


def short_way(parallel: str) -> str:
    """Shorten ``parallel`` to a label, without micro-batches, which all ways have."""
    return ",".join(part for part in parallel.split(",") if not part.startswith("micro")) or parallel


def _answer(ran: Sequence[SweepRow], plan: RunPlan) -> list[str]:
    if not ran:
        return ["None of them runs."]
    best = ran[0]
    run = "; ".join(f"{name}: {told}" for name, told in zip(plan_columns(plan), plan_cells(plan, best), strict=True))
    step = milliseconds(best.iteration_seconds or 0)
    return [
        f"{number_text(best.samples_per_second or 0.0)} samples/s",
        f"by {best.gpus} x {best.gpu}, {best.way}: a step of {step}",
        *([run] if run else []),
    ]


def _question(sweep: SweepResult) -> str:
    asked = sweep.request
    sizes = [f"micro-batches of {', '.join(map(str, asked.sizes))}"]
    if asked.global_batch is not None:
        sizes.append(f"{asked.global_batch} sequences in a step")
    if asked.sequence_length is not None:
        sizes.append(f"{asked.sequence_length} tokens each")
    counts = Counter(row.status for row in sweep.rows)
    told = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    how = [f"{name} {value}" for name in ("recipe", "dtype", "attention", "stack") if (value := getattr(asked, name))]
    return f"{', '.join([*sizes, *(how or ['recipe plain'])])}. {told}."


def _colour(sweep: SweepResult, gpu: str) -> str:
    gpus = list(dict.fromkeys(row.gpu for row in sweep.rows))
    return PALETTE[gpus.index(gpu) % len(PALETTE)]


def _tip(row: SweepRow) -> str:
    step = milliseconds(row.iteration_seconds or 0.0)
    rate = number_text(row.samples_per_second or 0.0)
    return f"{row.gpus:,} x {row.gpu}, {row.parallel}: {step}, {rate} samples/s"
