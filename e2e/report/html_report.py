"""Report of a prediction as one self-contained HTML page: the answer, a timeline, composition of time and memory.

For several GPUs also ranks, collectives and stragglers. Charts of memory: usage over a step, and composition of the
peak of every rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from costmodel.pages.charts import (
    PALETTE,
    Axis,
    Chart,
    Point,
    around,
    bytes_text,
    linear_ticks,
    plain_number,
    seconds_text,
    stacked_bar,
    stacked_rows,
    unit_of_seconds,
)
from costmodel.pages.document import (
    BarCell,
    Cell,
    Html,
    NumberCell,
    contents,
    document,
    embedded_data,
    facts,
    joined,
    legend,
    section,
    table,
    tag,
    write_page,
)
from e2e.explain.prediction import Prediction
from e2e.explain.predictor import PredictionResult
from e2e.explain.rank_figures import CollectiveFigures, RankFigures
from e2e.report.step_tracks import KINDS, timeline_data
from e2e.report.tables import (
    ADVICE_HEAD,
    COLLECTIVE_HEAD,
    PATH_MEANING,
    RANK_HEAD,
    advice_remarks,
    advice_rows,
    collective_rows,
    heading,
    module_seconds,
    operator_rows,
    overhead_meanings,
    ranges_section,
    rank_row,
    short_name,
    speeds,
    what_if_cells,
    what_if_remarks,
    what_if_warnings,
)
from e2e.report.text_report import MEMORY_ROLES, launches, memory_parts, milliseconds, peak_memory, phases, title
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


# Components of a rank's step, with their colours in the bars.
PARTS = {
    "compute": "#228833",
    "exposed transfer": "#4477aa",
    "waiting for ranks": "#cc7a29",
    "pipeline bubble": "#b8a11f",
    "idle": "#9aa3ad",
}
_MOST_ROWS = 64


def ranks_section(prediction: Prediction) -> Html:
    """Section with the composition of every rank's step."""
    rows = [(f"rank {rank.rank}", _parts(rank)) for rank in prediction.ranks[:_MOST_ROWS]]
    longest = max(sum(parts.values()) for _, parts in rows)
    alike = {f"rank {rank.rank}": f"stands for {rank.multiplicity}" if rank.multiplicity > 1 else ""
             for rank in prediction.ranks}  # fmt: skip
    axis = Axis("of one step", 0.0, longest or 1.0, told=seconds_text)
    more = len(prediction.ranks) - _MOST_ROWS
    return joined(
        (
            legend(PARTS),
            stacked_rows(rows, PARTS, axis, alike),
            tag("p", f"and {more} more, in the table", class_="soft") if more > 0 else None,
            table(RANK_HEAD, [_cells(rank_row(rank)) for rank in prediction.ranks]),
            tag("p", PATH_MEANING, class_="soft"),
        )
    )


def collectives_section(prediction: Prediction) -> Html:
    """Section of collectives: time over size, a table of grouped collectives, and stragglers."""
    return joined(
        (
            _sizes(prediction.collectives),
            table(COLLECTIVE_HEAD, [_cells(row) for row in collective_rows(prediction.collectives)]),
            tag("h3", "Stragglers"),
            _stragglers(prediction),
        )
    )


def _sizes(collectives: Sequence[CollectiveFigures]) -> Html | None:
    """Chart of transfer time over size, one colour per kind; rings mark the cost of sharing links."""
    drawn = [each for each in collectives if each.size_bytes > 0 and each.transfer_seconds > 0]
    if not drawn:
        return None
    sizes, times = [float(each.size_bytes) for each in drawn], [each.transfer_seconds for each in drawn]
    x = Axis("bytes that a rank puts in", *around(sizes, logarithmic=True), logarithmic=True,
             told=lambda value: plain_number(value) + "B")  # fmt: skip
    y = Axis("transfer", *around(times, logarithmic=True), logarithmic=True, told=seconds_text)
    chart = Chart(x, y)
    kinds = list(dict.fromkeys((each.kind, each.ranks) for each in drawn))
    colours = {f"{kind} of {ranks} ranks": PALETTE[place % len(PALETTE)] for place, (kind, ranks) in enumerate(kinds)}
    seen: dict[tuple[str, int, float], tuple[str, int]] = {}
    for each in drawn:  # thousands are equal: one dot for those at the same place
        name = f"{each.kind} of {each.ranks} ranks"
        key = (name, each.size_bytes, float(f"{each.transfer_seconds:.2g}"))
        seen[key] = (name, seen.get(key, ("", 0))[1] + 1)
    for (name, size, seconds), (_, count) in seen.items():
        title = f"{name}, {bytes_text(size)}: {seconds_text(seconds)}, {count} of them"
        chart.points([(float(size), seconds, title)], colours[name])
    return joined((chart.svg("Transfer time of collectives over their size"), legend(colours)))


def _parts(rank: RankFigures) -> dict[str, float]:
    values = (
        rank.compute_seconds,
        rank.exposed_transfer_seconds,
        rank.exposed_wait_seconds,
        rank.bubble_seconds,
        rank.idle_seconds,
    )
    return dict(zip(PARTS, values, strict=True))


def _stragglers(prediction: Prediction) -> Html:
    if not prediction.stragglers:
        return tag("p", "none: no rank keeps others waiting")
    rows = [
        (
            str(each.rank),
            NumberCell(str(each.collectives), each.collectives),
            NumberCell(milliseconds(each.caused_seconds), each.caused_seconds),
        )
        for each in prediction.stragglers
    ]
    return table(("rank", "came last in", "the next one waited"), rows)


def _cells(row: Sequence[str]) -> list[Cell]:
    """Convert texts to cells; numbers sort as numbers."""
    return [_cell(text) for text in row]


def _cell(text: str) -> Cell:
    try:
        return NumberCell(text, float(text.replace(",", "")))
    except ValueError:
        return text


_HOST_COLOUR = KINDS["host"][1]


def write_report(result: PredictionResult, path: Path) -> None:
    """Write the page; raises ``OutputError`` if it cannot be written."""
    write_page(path, page(result))


def page(result: PredictionResult) -> str:
    """Return the HTML text. Names come from the model and the user, so all are escaped."""
    prediction = result.prediction
    several = prediction.gpus > 1
    memory = memory_section(result)
    parts: list[tuple[str, str, Html | None]] = [
        ("advice", "What to change", _advice(prediction)),
        ("what-if", "What if", _what_if(prediction)),
        ("timeline", "Timeline", _timeline(result)),
        ("path", "Critical path across ranks" if several else "Critical path", _path(prediction)),
        ("ranges", "Named ranges", ranges_section(prediction)),
        ("operators", "Operators", _operators(result)),
        ("memory", "Memory", memory),
        ("ranks", "Ranks", ranks_section(prediction) if several else None),
        ("collectives", "Collectives", collectives_section(prediction) if prediction.collectives else None),
        ("times", "Device and host time", _times(result)),
    ]
    there = [(name, heading, content) for name, heading, content in parts if content is not None]
    body = [
        _head(prediction),
        contents([(name, heading) for name, heading, _ in there]),
        *(section(heading, content, identifier=name) for name, heading, content in there),
    ]
    script = files(__package__).joinpath("timeline.js").read_text(encoding="utf-8")
    return document(title(prediction), body, [script])


def _head(prediction: Prediction) -> Html:
    low, high = prediction.interval_seconds
    seconds = {name: value for name, value in phases(prediction).items() if value > 0}
    longest = prediction.longest_computing.rank
    which = f", of rank {longest}, which computes longest" if len(prediction.ranks) > 1 else ""
    return joined(
        (
            tag("h1", title(prediction)),
            tag("p", f"{milliseconds(prediction.iteration_seconds)} per step", class_="answer"),
            tag("p", f"80 % interval {milliseconds(low)} to {milliseconds(high)}"),
            _lines([*heading(prediction), *speeds(prediction)]),
            *(tag("p", warning, class_="warn") for warning in prediction.warnings),
            tag("p", f"By phase{which}:", class_="soft"),
            _bar(seconds, {name: KINDS[name][1] for name in seconds}, "The step by phase"),
            tag("p", "By what it waits for, along the critical path:", class_="soft"),
            _bar(prediction.attribution, _colours(prediction.attribution), "The critical path by kind"),
            _facts(prediction),
            *(tag("p", note, class_="soft") for note in prediction.notes),
        )
    )


def _lines(pairs: Iterable[tuple[str, str]]) -> Html:
    """Convert lines of the text report to facts; a line without a name continues the previous one."""
    found: dict[str, str] = {}
    for name, told in pairs:
        if name:
            found[name] = told
        else:
            last = next(reversed(found))
            found[last] = f"{found[last]} ({told})"
    return facts(found)


def _advice(prediction: Prediction) -> Html | None:
    """Section of advice, if it was requested."""
    if prediction.advice is None:
        return None
    rows = advice_rows(prediction.advice)
    remarks = (tag("p", line) for line in advice_remarks(prediction.advice, prediction.fits))
    return joined((table(ADVICE_HEAD, rows) if rows else None, *remarks))


def _what_if(prediction: Prediction) -> Html | None:
    """Section of what-if questions, if any were asked."""
    if not prediction.what_if:
        return None
    warnings = (tag("p", warning, class_="warn") for warning in what_if_warnings(prediction.what_if))
    remarks = (tag("p", line, class_="soft") for line in what_if_remarks(prediction.what_if))
    return joined((table(*what_if_cells(prediction.what_if)), *remarks, *warnings))


def _bar(values: Mapping[str, float], colours: Mapping[str, str], what: str) -> Html:
    whole = sum(values.values()) or 1.0
    told = {name: f"{milliseconds(value)} ({value / whole:.0%})" for name, value in values.items()}
    keys = {f"{name} {told[name]}": colours[name] for name in values}
    return joined((stacked_bar(values, colours, told, what), legend(keys)))


def _colours(kinds: Mapping[str, float]) -> dict[str, str]:
    """Colours of the timeline; host kinds, which share one there, get different ones."""
    others = iter((_HOST_COLOUR, "#b79ac9", "#6b4a86", "#5e3b78", "#c9b6d6", "#a583bb", *PALETTE))
    return {kind: KINDS[kind][1] if kind in KINDS else next(others, "#777777") for kind in kinds}


def _facts(prediction: Prediction) -> Html:
    rows = {
        "GPU active": milliseconds(prediction.gpu_active_seconds),
        "GPU idle": milliseconds(prediction.gpu_idle_seconds),
        "critical path on the host": f"{prediction.host_bound_fraction:.0%}",
        "peak memory": peak_memory(prediction) or "not known",
        "memory of the fullest rank": memory_parts(prediction) or "not known",
        "launches": launches(prediction),
        "coverage": ", ".join(f"{share:.0%} {source}" for source, share in prediction.coverage.items()),
    }
    if prediction.gpus > 1:
        rows["cluster"] = f"{prediction.cluster}, {prediction.nodes} nodes"
    return facts(rows)


def _timeline(result: PredictionResult) -> Html:
    found = timeline_data(result)
    tools = [
        tag("button", text, type="button", data_do=what, title=told, aria_label=told)
        for what, text, told in (
            ("in", "+", "zoom in"), ("out", "−", "zoom out"), ("left", "←", "earlier"), ("right", "→", "later"),
            ("all", "whole step", "show the whole step"), ("path", "critical path alone", "fade what is not on it"),
        )
    ]  # fmt: skip
    search = tag("input", type="search", placeholder="find a name", aria_label="find a name")
    used = {kind for track in found.document["tracks"] for kind in track["kinds"]}
    key = {name: colour for place, (name, colour) in enumerate(KINDS.values()) if place in used}
    ranks = len(result.graph.ranks)
    shown = (
        f"{len(found.ranks)} of {ranks} ranks are shown; --timeline writes all. " if len(found.ranks) < ranks else ""
    )
    return tag(
        "div",
        tag("p", f"{shown}What is on the critical path is underlined.", class_="soft"),
        tag("div", *tools, search, class_="tools"),
        tag("canvas", tabindex="0", role="img", aria_label="Timeline of the step", height=300),
        tag("p", class_="told soft", aria_live="polite"),
        legend(key),
        tag("noscript", tag("p", "The timeline needs JavaScript; all other parts of this page do not.")),
        embedded_data("timeline-data", found.document),
        id="timeline-view",
    )


def _path(prediction: Prediction) -> Html:
    longest = max((part.seconds for part in prediction.critical_path), default=0.0) or 1.0
    whole = prediction.critical_path_seconds or 1.0
    rows = [
        (
            part.kind,
            short_name(part.name),
            NumberCell(milliseconds(part.seconds), part.seconds),
            NumberCell(f"{part.seconds / whole:.1%}", part.seconds),
            BarCell(part.seconds / longest, KINDS[part.kind][1] if part.kind in KINDS else _HOST_COLOUR),
            NumberCell(f"{part.count:,}", part.count),
            short_name(part.waits_for),
        )
        for part in prediction.critical_path
    ]
    return table(("kind", "operator", "time", "share", "", "segments", "waits mostly for"), rows)


def _operators(result: PredictionResult) -> Html:
    """Table of the operators of the rank that computes longest."""
    number = result.prediction.longest_computing.rank
    rank = next(each for each in result.graph.ranks if each.rank == number)
    several = len(result.graph.ranks) > 1
    # With several ranks, the path across them may never be on this one; the rank's own path shows what delays it.
    rows = operator_rows(rank, result.paths[number] if several else result.path)
    longest = max((row.device_seconds for row in rows), default=0.0) or 1.0
    whole = sum(row.device_seconds for row in rows) or 1.0
    cells = [
        (
            short_name(row.name),
            NumberCell(f"{row.launches:,}", row.launches),
            NumberCell(milliseconds(row.device_seconds), row.device_seconds),
            NumberCell(f"{row.device_seconds / whole:.1%}", row.device_seconds),
            BarCell(row.device_seconds / longest),
            NumberCell(milliseconds(row.host_seconds), row.host_seconds),
            NumberCell(milliseconds(row.path_seconds), row.path_seconds),
            row.bound,
        )
        for row in rows
    ]
    which = (
        f"Of rank {number}, which computes longest; the critical path is that of this rank alone. " if several else ""
    )
    path = "on its critical path" if several else "on the critical path"
    modules = module_seconds(rank)
    return joined(
        (
            tag("p", f"{which}Device time whatever runs beside it; a click on a head sorts.", class_="soft"),
            table(("operator", "launches", "device", "share", "", "host", path, "limited by"), cells),
            joined((tag("h3", "By module"), _bars(modules))) if modules else None,
        )
    )


def _times(result: PredictionResult) -> Html:
    prediction = result.prediction
    titles = {"by_bound": "Device time by what limits it", "by_kind": "Device time by kind of work"}
    return joined(
        (
            *(joined((tag("h3", text), _bars(prediction.breakdown[key]))) for key, text in titles.items()),
            tag("h3", "Host time by kind of overhead"),
            _bars(prediction.overheads),
            tag("p", overhead_meanings(prediction), class_="soft"),
        )
    )


def _bars(values: Mapping[str, float]) -> Html:
    """Table of seconds by name, with bars for the share of the sum."""
    whole, longest = sum(values.values()) or 1.0, max(values.values(), default=0.0) or 1.0
    rows = [
        (
            name,
            NumberCell(seconds_text(seconds), seconds),
            NumberCell(f"{seconds / whole:.1%}", seconds),
            BarCell(seconds / longest),
        )
        for name, seconds in values.items()
    ]
    return table(("name", "time", "share", ""), rows)
