"""Report of a prediction as one self-contained HTML page: the answer, a timeline, composition of time and memory."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path

from costmodel.pages.axes import seconds_text
from costmodel.pages.charts import PALETTE, stacked_bar
from costmodel.pages.document import contents, document, section, write_page
from costmodel.pages.markup import Html, embedded_data, joined, tag
from costmodel.pages.tables import BarCell, NumberCell, facts, legend, table
from e2e.explain.prediction import Prediction
from e2e.explain.predictor import PredictionResult
from e2e.report.fact_lines import (
    ADVICE_HEAD,
    advice_remarks,
    advice_rows,
    heading,
    overhead_meanings,
    short_name,
    speeds,
)
from e2e.report.memory_chart import memory_section
from e2e.report.operator_rows import module_seconds, operator_rows
from e2e.report.range_table import ranges_section
from e2e.report.rank_page import collectives_section, ranks_section
from e2e.report.step_tracks import KINDS, timeline_data
from e2e.report.text_report import launches, memory_parts, milliseconds, peak_memory, phases, title
from e2e.report.what_if_table import what_if_cells, what_if_remarks, what_if_warnings

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
