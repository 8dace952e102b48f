"""Report of a prediction as one self-contained HTML page, laid out by ``predict.html``.

It has the answer, a picture of the timeline, tables of the critical path and of operators, the composition of time and
memory, and for several GPUs ranks, collectives and stragglers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from costmodel.pages.charts import PALETTE, inline_chart
from costmodel.pages.document import render, write_page
from e2e.explain.breakdowns import phase_spans
from e2e.explain.critical_path import HOST_KINDS, task_kind, wait_kind
from e2e.explain.predictor import PredictionResult
from e2e.explain.rank_figures import RankFigures
from e2e.report import tables
from e2e.report.timeline_export import call_of
from e2e.step.arrays import Floats
from e2e.step.execution_graph import Await, RankGraph, Synchronize
from e2e.step.memory import ROLES

# Kind of a piece of the timeline -> its label and colour.
KINDS: dict[str, tuple[str, str]] = {
    "forward": ("forward", "#6a9fd4"),
    "backward": ("backward", "#b5649a"),
    "optimizer": ("optimizer", "#b08c2a"),
    "other": ("other", "#777777"),
    "compute": ("kernel limited by arithmetic", "#228833"),
    "memory": ("kernel limited by memory", "#2a9d8f"),
    "kernel": ("kernel", "#4c9f50"),
    "copy": ("copy", "#7a8b99"),
    "collective transfer": ("collective transfer", "#4477aa"),
    "collective wait": ("waiting in a collective", "#cc7a29"),
    "bubble": ("waiting in a pipeline", "#b8a11f"),
    "host": ("host", "#8d6aa8"),
    "synchronisation": ("host waits", "#c2556b"),
    "idle": ("idle", "#9aa3ad"),
    "late start": ("late start", "#9aa3ad"),
}
_HOST_COLOURS = ("#8d6aa8", "#b79ac9", "#6b4a86", "#5e3b78", "#c9b6d6", "#a583bb", *PALETTE)
MEMORY_COLOURS = {
    "parameters": "#4477aa",
    "gradients": "#aa3377",
    "optimizer_state": "#997700",
    "inputs": "#777777",
    "activations": "#228833",
    "temporary": "#66ccee",
    "buffers": "#ee7733",
    "cache": "#882255",
    "reserve": "#c9ced6",
}
# Components of a rank's step, with their colours in the bars.
RANK_PARTS = {
    "compute": "#228833",
    "exposed transfer": "#4477aa",
    "waiting for ranks": "#cc7a29",
    "pipeline bubble": "#b8a11f",
    "idle": "#9aa3ad",
}
# Size of the timeline: ranks shown, columns, rows of pixels of a lane and of the gap below it.
MOST_RANKS = 4
_COLUMNS, _LANE, _GAP = 1800, 7, 2
# Largest number of moments in a chart of memory; among neighbours the fullest is drawn.
_MOST_MOMENTS = 400
# Smallest change, relative to the peak, that counts as the beginning of a step.
_WORTH_SHOWING = 0.002
_GIB = 2.0**30


def write_report(result: PredictionResult, path: Path) -> None:
    """Write the page; raises ``OutputError`` if it cannot be written."""
    write_page(path, render_page(result))


def render_page(result: PredictionResult) -> str:
    """Return the HTML text."""
    prediction = result.prediction
    longest = prediction.longest_computing.rank
    rank = next(each for each in result.graph.ranks if each.rank == longest)
    several = len(prediction.ranks) > 1
    ranks = _shown_ranks(result)
    lanes = list(timeline_lanes(result, ranks))
    used = {kind for _, lane in lanes for kind, (begins, ends) in lane.items() if (ends > begins).any()}
    return render(
        "e2e.report/predict.html",
        tables=tables,
        prediction=prediction,
        title=tables.title(prediction),
        heading=_joined([*tables.option_lines(prediction), *tables.speed_lines(prediction)]),
        figures=_joined(tables.figure_lines(prediction)),
        distinct=len(prediction.ranks),
        longest=longest,
        colours={kind: colour for kind, (_, colour) in KINDS.items()},
        path_colours=_path_colours(prediction.attribution),
        timeline=_timeline(result, lanes),
        timeline_key=dict(text for kind, text in KINDS.items() if kind in used),
        shown_ranks=len(ranks),
        # With several ranks, the path across them may never be on this one; the rank's own path shows what delays it.
        operators=_operators(rank, result, several),
        modules=tables.share_rows(tables.module_seconds(rank)),
        **_memory(result),
        rank_colours=RANK_PARTS,
        rank_bars=[_rank_bar(each) for each in prediction.ranks],
    )


def _joined(lines: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Convert lines of the text report to facts; a line without a name continues the previous one."""
    found: dict[str, str] = {}
    for name, text in lines:
        if name:
            found[name] = text
        else:
            last = next(reversed(found))
            found[last] = f"{found[last]} ({text})"
    return found


def _path_colours(kinds: Iterable[str]) -> dict[str, str]:
    """Colours of the timeline; kinds of host time, which share one there, get different ones."""
    others = iter(_HOST_COLOURS)
    return {kind: KINDS[kind][1] if kind in KINDS else next(others, "#777777") for kind in kinds}


def _operators(rank: RankGraph, result: PredictionResult, several: bool) -> list[tuple[str, ...]]:
    rows = tables.operator_rows(rank, result.paths[rank.rank] if several else result.path)
    whole = sum(row.device_seconds for row in rows) or 1.0
    return [
        (
            tables.short_kernel_name(row.name),
            f"{row.launches:,}",
            f"{row.device_seconds * 1e3:.3f}",
            f"{row.device_seconds / whole:.1%}",
            f"{row.host_seconds * 1e3:.3f}",
            f"{row.path_seconds * 1e3:.3f}",
            row.bound,
        )
        for row in rows
    ]


# --- timeline -----------------------------------------------------------------------------------

# Begins and ends of pieces by kind, in seconds.
Lane = dict[str, tuple[Floats, Floats]]


def _shown_ranks(result: PredictionResult) -> list[int]:
    """Return the rank that computes longest, then those on the critical path, then others, as many as are shown."""
    longest = result.prediction.longest_computing.rank
    wanted = dict.fromkeys([longest, *result.path.by_rank, *(rank.rank for rank in result.graph.ranks)])
    return list(wanted)[:MOST_RANKS]


def timeline_lanes(result: PredictionResult, ranks: Sequence[int]) -> Iterator[tuple[str, Lane]]:
    """Yield the lanes of the critical path, and of phases, threads and streams of ``ranks``, with their names."""
    path = result.path.segments
    yield "critical path", _lane((_path_kind(each.kind), each.start, each.start + each.seconds) for each in path)
    graphs = {rank.rank: place for place, rank in enumerate(result.graph.ranks)}
    for number in ranks:
        rank, layout = result.graph.ranks[graphs[number]], result.timeline.layouts[graphs[number]]
        name = f"rank {number}, " if len(graphs) > 1 else ""
        yield f"{name}phases", _lane(phase_spans(rank, result.timeline, result.iteration))
        # Everything within the window is shown, whichever iteration it belongs to: the host is ahead of the device.
        part = slice(layout.offset, layout.offset + result.timeline.iterations * layout.nodes)
        start, ready, end = (
            of[part].reshape(result.timeline.iterations, layout.nodes)
            for of in (result.timeline.start, result.timeline.ready, result.timeline.end)
        )
        for thread, actions in rank.threads.items():
            first = layout.threads[thread][0]
            waits = np.array([isinstance(action, Synchronize | Await) for action in actions], dtype=bool)
            of = np.arange(first, first + len(actions))
            yield (
                f"{name}thread {thread}",
                {
                    kind: (start[:, of[chosen]].ravel(), end[:, of[chosen]].ravel())
                    for kind, chosen in (("host", ~waits), ("synchronisation", waits))
                },
            )
        kinds = np.array([[_path_kind(wait_kind(task)), _path_kind(task_kind(task))] for task in rank.tasks])
        for stream in np.unique(layout.streams).tolist():
            lane: Lane = {}
            for column, (begins, ends) in enumerate(((start, ready), (ready, end))):
                for kind in np.unique(kinds[layout.streams == stream, column]).tolist():
                    tasks = layout.actions + np.flatnonzero((layout.streams == stream) & (kinds[:, column] == kind))
                    lane[kind] = begins[:, tasks].ravel(), ends[:, tasks].ravel()
            yield f"{name}stream {stream}", lane


def _path_kind(kind: str) -> str:
    if kind == "synchronisation":
        return kind
    return "host" if kind in HOST_KINDS else kind if kind in KINDS else "kernel"


def _lane(spans: Iterable[tuple[str, float, float]]) -> Lane:
    found: dict[str, list[tuple[float, float]]] = {}
    for kind, begin, end in spans:
        found.setdefault(kind, []).append((begin, end))
    return {kind: (np.array(pairs)[:, 0], np.array(pairs)[:, 1]) for kind, pairs in found.items()}


def covered_share(begins: Floats, ends: Floats, edges: Floats) -> Floats:
    """Share of each interval between ``edges`` that pieces, which do not overlap, cover."""
    order = np.argsort(begins, kind="stable")
    corners = np.column_stack((begins[order], ends[order])).ravel()
    sums = np.cumsum(np.diff(corners, prepend=corners[:1]) * (np.arange(len(corners)) % 2))
    return np.diff(np.interp(edges, corners, sums)) / np.diff(edges)


def _timeline(result: PredictionResult, lanes: Sequence[tuple[str, Lane]]) -> str:
    """Chart with a strip for each lane, whose pixels have the colour of the kind that covers most of them."""
    low, high = result.timeline.window(result.iteration)
    edges = np.linspace(low, max(high, low + 1e-9), _COLUMNS + 1)
    kinds = list(KINDS)
    colours = np.array([[int(colour[place : place + 2], 16) for place in (1, 3, 5)] for _, colour in KINDS.values()])
    image = np.zeros((len(lanes), _LANE + _GAP, _COLUMNS, 4), dtype=np.uint8)
    for strip, (_, lane) in zip(image, lanes, strict=True):
        shares = np.zeros((len(kinds), _COLUMNS))
        for kind, (begins, ends) in lane.items():
            if len(begins):
                shares[kinds.index(kind)] = covered_share(begins, ends, edges)
        strip[:_LANE, :, :3] = colours[shares.argmax(axis=0)]
        strip[:_LANE, :, 3] = np.where(shares.any(axis=0), 255 * shares.sum(axis=0).clip(0.2, 1.0), 0)

    def draw(axes: Any) -> None:
        whole = (high - low) * 1e3
        axes.imshow(image.reshape(-1, _COLUMNS, 4), aspect="auto", interpolation="none",
                    extent=(0.0, whole or 1.0, len(lanes), 0))  # fmt: skip
        axes.set_yticks(np.arange(len(lanes)) + _LANE / (_LANE + _GAP) / 2, [name for name, _ in lanes])
        axes.set(xlabel="ms from the start of the step")
        axes.tick_params(axis="y", length=0)
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)

    return inline_chart("Timeline of the step", draw, 0.6 + 0.24 * len(lanes))


# --- memory and ranks ---------------------------------------------------------------------------


def _memory(result: PredictionResult) -> dict[str, Any]:
    """Values of the section of memory; without ``peaks`` nothing is known."""
    known = [rank for rank in result.prediction.ranks if rank.memory_breakdown]
    if not known:
        return {"peaks": []}
    fullest = max(known, key=lambda rank: rank.peak_memory_bytes or 0).rank
    course = memory_course(result, fullest)
    peaks = []
    for rank in known:
        parts: dict[str, int] = {role: (rank.memory_breakdown or {}).get(role, 0) for role in ROLES}
        fits = ", does not fit" if rank.fits is False else ""
        name = f"rank {rank.rank}" if len(known) > 1 else "peak"
        peaks.append((name, parts, f"{(rank.peak_memory_bytes or 0) / _GIB:.3g} GiB{fits}"))
    return {
        "fullest": fullest,
        "memory_chart": None if course is None else _memory_chart(*course),
        "peaks": peaks,
        "memory_colours": MEMORY_COLOURS,
        "memory_key": {
            tables.MEMORY_ROLES.get(role, role): colour
            for role, colour in MEMORY_COLOURS.items()
            if any(parts[role] for _, parts, _ in peaks)
        },
    }


def host_seconds(result: PredictionResult, number: int) -> dict[int, float]:
    """Map calls to their host times on rank ``number``, in seconds from the start of the step (negative: before it)."""
    timeline, low = result.timeline, result.timeline.window(result.iteration)[0]
    found: dict[int, float] = {}
    for rank, layout in zip(result.graph.ranks, timeline.layouts, strict=True):
        if rank.rank != number:
            continue
        for node, action in enumerate(rank.actions(), start=layout.offset + result.iteration * layout.nodes):
            call = call_of(action, rank)
            if call is not None:
                found.setdefault(call, float(timeline.ready[node]) - low)
    return found


def memory_course(result: PredictionResult, number: int) -> tuple[Floats, Floats] | None:
    """Times in seconds and bytes by role, shape (n, roles), on rank ``number``; ``None`` if fewer than two are known.

    A moment has the time of its call, or of the previous call if the host spends no time on it.
    """
    usage = result.memory.get(number)
    if usage is None or not usage.course:
        return None
    made = host_seconds(result, number)
    known = [made.get(moment.call, -np.inf) for moment in usage.course]
    begin = next((time for time in known if time > -np.inf), 0.0)
    times = np.maximum.accumulate(np.maximum(known, begin))
    levels = np.array([moment.levels for moment in usage.course], dtype=float)
    shown = shown_points(times, levels.sum(axis=1))
    return (times[shown], levels[shown]) if len(shown) > 1 else None


def shown_points(times: Floats, totals: Floats) -> Any:
    """Indices without an idle beginning (a host that is ahead may wait there for a whole step), thinned.

    The fullest moment of each short interval is kept.
    """
    changed = np.abs(totals - totals[0]) > _WORTH_SHOWING * totals.max()
    first = max(int(changed.argmax()) - 1, 0)
    places = np.arange(first, len(times))
    span = (times[-1] - times[first]) or 1.0
    interval = ((times[places] - times[first]) / span * _MOST_MOMENTS).astype(int)
    order = np.lexsort((totals[places], interval))
    fullest = places[order[np.flatnonzero(np.diff(interval[order], append=-1))]]
    return np.unique([first, *fullest, len(times) - 1]) if len(places) > _MOST_MOMENTS else places


def _memory_chart(times: Floats, levels: Floats) -> str:
    used = [place for place in range(len(ROLES)) if levels[:, place].any()]

    def draw(axes: Any) -> None:
        axes.stackplot(times * 1e3, *(levels[:, place] / _GIB for place in used), step="post", linewidth=0,
                       colors=[MEMORY_COLOURS[ROLES[place]] for place in used])  # fmt: skip
        axes.set(xlabel="ms from the start of the step, on the clock of the host", ylabel="GiB in use")
        axes.margins(x=0)

    return inline_chart("Memory in use over the step, by what it is for", draw)


def _rank_bar(rank: RankFigures) -> tuple[str, Mapping[str, float], str]:
    values = (
        rank.compute_seconds,
        rank.exposed_transfer_seconds,
        rank.exposed_wait_seconds,
        rank.bubble_seconds,
        rank.idle_seconds,
    )
    alike = f"stands for {rank.multiplicity}" if rank.multiplicity > 1 else ""
    return f"rank {rank.rank}", dict(zip(RANK_PARTS, values, strict=True)), alike
