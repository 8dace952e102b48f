"""Memory charts: usage over a step, and composition of the peak of every rank."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.pages.axes import Axis, around, bytes_text, linear_ticks, unit_of_seconds
from costmodel.pages.charts import Chart, Point, stacked_rows
from costmodel.pages.markup import Html, joined, tag
from costmodel.pages.tables import legend
from e2e.explain.predictor import PredictionResult
from e2e.explain.rank_figures import RankFigures
from e2e.report.text_report import MEMORY_ROLES
from e2e.step.execution_graph import HostWork, Launch, Synchronize
from e2e.step.memory import ROLES, MemoryMoment

COLOURS = {
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
# Largest number of moments in a chart; among neighbours the fullest is drawn.
_MOST_MOMENTS = 400
_MOST_RANKS = 48
# Smallest change, relative to the peak, that counts as the beginning of a step.
_WORTH_SHOWING = 0.002
_GIB = 2.0**30


def memory_section(result: PredictionResult) -> Html | None:
    """Charts of the known memory figures, ``None`` if nothing is known."""
    prediction = result.prediction
    known = [rank for rank in prediction.ranks if rank.memory_breakdown]
    if not known:
        return None
    fullest = max(known, key=lambda rank: rank.peak_memory_bytes or 0)
    over_time = _over_time(result, fullest.rank)
    return joined(
        (
            over_time,
            tag("h3", "At the peak") if over_time is not None else None,
            _at_the_peak(known, prediction.memory_capacity_bytes),
        )
    )


def host_seconds(result: PredictionResult, number: int) -> dict[int, float]:
    """Map calls to their host times on rank ``number``, in seconds from the start of the step (negative: before it)."""
    timeline, low = result.timeline, result.timeline.window(result.iteration)[0]
    found: dict[int, float] = {}
    for rank, layout in zip(result.graph.ranks, timeline.layouts, strict=True):
        if rank.rank != number:
            continue
        node = layout.offset + result.iteration * layout.nodes
        for action in rank.actions():
            call = rank.tasks[action.task].call if isinstance(action, Launch) else (
                action.call if isinstance(action, HostWork | Synchronize) else None
            )  # fmt: skip
            if call is not None:
                found.setdefault(call, float(timeline.ready[node]) - low)
            node += 1
    return found


def _over_time(result: PredictionResult, number: int) -> Html | None:
    usage = result.memory.get(number)
    if usage is None or not usage.course:
        return None
    moments = changing(_timed(usage.course, host_seconds(result, number)))
    if len(moments) < 2:
        return None
    scale, unit = unit_of_seconds(max(abs(moments[0][0]), abs(moments[-1][0])))
    shown = [(time / scale, moment) for time, moment in _thinned(moments)]
    highest = max(sum(moment.levels) for _, moment in shown) / _GIB
    x = Axis(f"{unit} from the start of the step, on the clock of the host", shown[0][0], shown[-1][0])
    chart = Chart(x, Axis("GiB in use", *around([highest], from_zero=True)))
    used = [place for place, _ in enumerate(ROLES) if any(moment.levels[place] for _, moment in shown)]
    below: list[Point] = [(time, 0.0) for time, _ in shown]
    for place in used:
        above = [(time, base + moment.levels[place] / _GIB)
                 for (time, moment), (_, base) in zip(shown, below, strict=True)]  # fmt: skip
        chart.area(above, below, COLOURS[ROLES[place]], _told(ROLES[place]), steps=True)
        below = above
    return joined(
        (
            tag("p", "Over the step, as the host allocates and frees it", "" if len(result.prediction.ranks) == 1 else
                f" (rank {number}, the fullest)", f": at most {highest:.2f} GiB.", class_="soft"),
            chart.svg("Memory in use over the step, by what it is for"),
            legend({_told(ROLES[place]): COLOURS[ROLES[place]] for place in used}),
        )
    )  # fmt: skip


def _timed(course: Sequence[MemoryMoment], made: dict[int, float]) -> list[tuple[float, MemoryMoment]]:
    """Pair moments with the time of their call, or of the previous call if the host spends no time on it."""
    found: list[tuple[float, MemoryMoment]] = []
    before = next((made[moment.call] for moment in course if moment.call in made), 0.0)
    for moment in course:
        before = max(before, made.get(moment.call, before))
        found.append((before, moment))
    return found


def changing(moments: Sequence[tuple[float, MemoryMoment]]) -> list[tuple[float, MemoryMoment]]:
    """Drop an idle beginning: a host that is ahead may wait there for a whole step."""
    totals = [sum(moment.levels) for _, moment in moments]
    first = next(
        (place for place, total in enumerate(totals) if abs(total - totals[0]) > _WORTH_SHOWING * max(totals)), 0
    )
    return list(moments[max(first - 1, 0) :])


def _thinned(moments: Sequence[tuple[float, MemoryMoment]]) -> list[tuple[float, MemoryMoment]]:
    """Keep the fullest moment of each short interval, and the first and the last moment."""
    if len(moments) <= _MOST_MOMENTS:
        return list(moments)
    first, span = moments[0][0], (moments[-1][0] - moments[0][0]) or 1.0
    best: dict[int, tuple[float, MemoryMoment]] = {}
    for time, moment in moments:
        place = int((time - first) / span * _MOST_MOMENTS)
        if place not in best or sum(moment.levels) > sum(best[place][1].levels):
            best[place] = time, moment
    return [moments[0], *(best[place] for place in sorted(best)), moments[-1]]


def _at_the_peak(ranks: Sequence[RankFigures], capacity: int) -> Html:
    rows: list[tuple[str, dict[str, float]]] = []
    told = {}
    for rank in ranks[:_MOST_RANKS]:
        name = f"rank {rank.rank}" if len(ranks) > 1 else "peak"
        parts = rank.memory_breakdown or {}
        rows.append((name, {role: parts.get(role, 0) / _GIB for role in ROLES}))
        told[name] = bytes_text(rank.peak_memory_bytes or 0) + (", does not fit" if rank.fits is False else "")
    there = capacity / _GIB
    most = max(there, *(sum(parts.values()) for _, parts in rows))
    # On a nearly empty GPU the bars would be invisible: the axis then ends behind the longest of them.
    longest = max(sum(parts.values()) for _, parts in rows)
    end = most if longest > 0.25 * most else longest * 1.1
    ticks = [*linear_ticks(0.0, end, 6)]
    axis = Axis(f"GiB; the GPU has {there:.0f} GiB", 0.0, end or 1.0, ticks=ticks, told=lambda value: f"{value:.4g}")
    used = [role for role in ROLES if any(parts[role] for _, parts in rows)]
    rest = f"and {len(ranks) - _MOST_RANKS} more ranks" if len(ranks) > _MOST_RANKS else None
    return joined(
        (
            stacked_rows(rows, COLOURS, axis, told),
            legend({_told(role): COLOURS[role] for role in used}),
            None if rest is None else tag("p", rest, class_="soft"),
        )
    )


def _told(role: str) -> str:
    return MEMORY_ROLES.get(role, role)
