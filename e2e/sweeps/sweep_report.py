"""Output of a sweep: a table, a plot, a JSON record, and an HTML page.

The self-contained page has the fastest ways over the number of GPUs and a table of all ways.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.console import Console
from rich.table import Table

from costmodel.pages.charts import PALETTE, Axis, Chart, around, bytes_text, picture, plain_number
from costmodel.pages.document import (
    Cell,
    Html,
    NumberCell,
    contents,
    document,
    joined,
    legend,
    section,
    table,
    tag,
    write_page,
)
from e2e.report.tables import number_text
from e2e.report.text_report import milliseconds, plain_console
from e2e.sweeps.sweep_driver import DAY, RunPlan, SweepResult
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


# Most dots of slower ways for each GPU and number of GPUs, the fastest first.
_MOST_DOTS = 40


def write_sweep_page(sweep: SweepResult, path: Path) -> None:
    """Write the page; raises ``OutputError`` if it cannot be written."""
    write_page(path, sweep_page(sweep))


def sweep_page(sweep: SweepResult) -> str:
    """Return the HTML text; names are escaped."""
    ran = [row for row in sweep.rows if row.status == "ok"]
    rest = [row for row in sweep.rows if row.status != "ok"]
    parts: list[tuple[str, str, Html | None]] = [
        ("frontier", "Samples per second over GPUs", _frontier(sweep, ran)),
        ("efficiency", "Tokens per second and GPU over GPUs", _efficiency(sweep, ran)),
        ("ways", "All that run", _ways(ran, sweep.plan) if ran else None),
        ("rest", "What does not run, and why", _refused(rest) if rest else None),
    ]
    there = [(name, title, content) for name, title, content in parts if content is not None]
    model = Path(sweep.request.model).name
    body = [
        tag("h1", f"{model}: {len(sweep.rows)} ways to run it"),
        _answer(ran, sweep.plan),
        _question(sweep),
        contents([(name, title) for name, title, _ in there]),
        *(section(title, content, identifier=name) for name, title, content in there),
    ]
    return document(f"{model}: sweep", body)


def fastest(rows: Sequence[SweepRow]) -> dict[tuple[str, int], SweepRow]:
    """Map (GPU, number of GPUs) to the first, i.e. fastest, of the ranked ``rows``."""
    best: dict[tuple[str, int], SweepRow] = {}
    for row in rows:
        best.setdefault((row.gpu, row.gpus), row)
    return best


def short_way(parallel: str) -> str:
    """Shorten ``parallel`` to a label, without micro-batches, which all ways have."""
    return ",".join(part for part in parallel.split(",") if not part.startswith("micro")) or parallel


def _answer(ran: Sequence[SweepRow], plan: RunPlan) -> Html:
    if not ran:
        return tag("p", "None of them runs.", class_="answer")
    best = ran[0]
    run = "; ".join(f"{name}: {told}" for name, told in zip(plan_columns(plan), plan_cells(plan, best), strict=True))
    return joined(
        (
            tag("p", f"{_rate(best.samples_per_second)} samples/s", class_="answer"),
            tag(
                "p",
                f"by {best.gpus} x {best.gpu}, {best.way}: a step of {milliseconds(best.iteration_seconds or 0)}",
            ),
            tag("p", run) if run else None,
        )
    )


def _question(sweep: SweepResult) -> Html:
    asked = sweep.request
    sizes = [f"micro-batches of {', '.join(map(str, asked.sizes))}"]
    if asked.global_batch is not None:
        sizes.append(f"{asked.global_batch} sequences in a step")
    if asked.sequence_length is not None:
        sizes.append(f"{asked.sequence_length} tokens each")
    counts = Counter(row.status for row in sweep.rows)
    told = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    how = [f"{name} {value}" for name in ("recipe", "dtype", "attention", "stack") if (value := getattr(asked, name))]
    return tag("p", f"{', '.join([*sizes, *(how or ['recipe plain'])])}. {told}.", class_="soft")


def _frontier(sweep: SweepResult, ran: Sequence[SweepRow]) -> Html | None:
    """Chart of samples per second: the fastest ways of every GPU as a line with labels, the others as faint dots.

    ``None`` if there is only one number of GPUs.
    """
    rates = [row.samples_per_second for row in ran if row.samples_per_second]
    if not rates or _one_count(sweep):
        return None
    chart = Chart(
        _gpus_axis(sweep, ran),
        Axis("samples per second", *around(rates, logarithmic=True), logarithmic=True),
        height=420.0,
    )
    colours = _colours(sweep)
    best = fastest(ran)
    dots: Counter[tuple[str, int]] = Counter()
    for row in ran:
        dots[row.gpu, row.gpus] += 1
        if best[row.gpu, row.gpus] is not row and dots[row.gpu, row.gpus] <= _MOST_DOTS:
            chart.points([(row.gpus, row.samples_per_second or 0.0, _told(row))], colours[row.gpu], 2.5, faint=True)
    for gpu, colour in colours.items():
        line = [row for (name, _), row in sorted(best.items(), key=lambda item: item[0][1]) if name == gpu]
        chart.line([(row.gpus, row.samples_per_second or 0.0) for row in line], colour)
        chart.points(((row.gpus, row.samples_per_second or 0.0, _told(row)) for row in line), colour)
        for row in line:
            chart.label(row.gpus, row.samples_per_second or 0.0, short_way(row.parallel), colour)
    return joined((chart.svg("Samples per second over the number of GPUs"), legend(colours)))


def _efficiency(sweep: SweepResult, ran: Sequence[SweepRow]) -> Html | None:
    """Chart of tokens per second and GPU of the fastest ways, which shows the parallel efficiency."""
    best = fastest(ran)
    rates = [row.tokens_per_second_per_gpu for row in best.values() if row.tokens_per_second_per_gpu]
    if not rates or _one_count(sweep):
        return None
    chart = Chart(_gpus_axis(sweep, ran), Axis("tokens/s per GPU", *around(rates, from_zero=True)))
    colours = _colours(sweep)
    for gpu, colour in colours.items():
        line = [row for (name, _), row in sorted(best.items(), key=lambda item: item[0][1]) if name == gpu]
        points = [(row.gpus, row.tokens_per_second_per_gpu or 0.0) for row in line]
        chart.line([(float(x), y) for x, y in points], colour)
        chart.points(((row.gpus, row.tokens_per_second_per_gpu or 0.0, _told(row)) for row in line), colour)
    return joined((chart.svg("Tokens per second and GPU over the number of GPUs"), legend(colours)))


def _one_count(sweep: SweepResult) -> bool:
    return len({row.gpus for row in sweep.rows}) == 1


def _gpus_axis(sweep: SweepResult, ran: Sequence[SweepRow]) -> Axis:
    """Axis with the requested numbers of GPUs as ticks, those without results included."""
    counts = sorted({row.gpus for row in sweep.rows})
    low, high = around([float(count) for count in counts], logarithmic=True)
    return Axis("GPUs", low, high, logarithmic=True, ticks=counts, told=lambda value: f"{value:,.0f}")


def _ways(ran: Sequence[SweepRow], plan: RunPlan) -> Html:
    rows: list[Sequence[Cell]] = []
    for row in ran:
        low, high = row.interval_seconds or (0.0, 0.0)
        memory = row.peak_memory_bytes
        rows.append(
            (
                row.gpu,
                NumberCell(f"{row.gpus:,}", row.gpus),
                row.way,
                NumberCell(milliseconds(row.iteration_seconds or 0.0), row.iteration_seconds or 0.0),
                NumberCell(f"{milliseconds(low)} to {milliseconds(high)}", low),
                NumberCell(_rate(row.samples_per_second), row.samples_per_second or 0.0),
                NumberCell(_rate(row.tokens_per_second_per_gpu), row.tokens_per_second_per_gpu or 0.0),
                NumberCell("" if row.mfu is None else f"{row.mfu:.1%}", row.mfu or 0.0),
                NumberCell(milliseconds(row.exposed_seconds or 0.0), row.exposed_seconds or 0.0),
                NumberCell(milliseconds(row.bubble_seconds or 0.0), row.bubble_seconds or 0.0),
                NumberCell("" if memory is None else bytes_text(memory), memory or 0),
                *_of_run(plan, row),
            )
        )
    head = (
        "GPU",
        "GPUs",
        "parallel",
        "step",
        "80 % interval",
        "samples/s",
        "tokens/s/GPU",
        "MFU",
        "exposed",
        "bubble",
        "memory",
        *plan_columns(plan),
    )
    return table(head, rows, shown=25)


def _of_run(plan: RunPlan, row: SweepRow) -> list[NumberCell]:
    """Cells with days and cost of the training run."""
    seconds, cost = plan.seconds(row), plan.cost(row)
    found = [] if seconds is None else [seconds]
    numbers = [*found, *([] if cost is None else [cost])]
    return [NumberCell(text, number) for text, number in zip(plan_cells(plan, row), numbers, strict=True)]


def _refused(rest: Sequence[SweepRow]) -> Html:
    rows = [(row.gpu, NumberCell(f"{row.gpus:,}", row.gpus), row.parallel, row.status, row.reason) for row in rest]
    return table(("GPU", "GPUs", "parallel", "", "why"), rows)


def _colours(sweep: SweepResult) -> dict[str, str]:
    gpus = dict.fromkeys(row.gpu for row in sweep.rows)
    return {gpu: PALETTE[place % len(PALETTE)] for place, gpu in enumerate(gpus)}


def _told(row: SweepRow) -> str:
    step = milliseconds(row.iteration_seconds or 0.0)
    return f"{row.gpus:,} x {row.gpu}, {row.parallel}: {step}, {_rate(row.samples_per_second)} samples/s"


def _rate(value: float | None) -> str:
    return "" if value is None else plain_number(value)
