"""A prediction of several ranks as one self-contained HTML page."""

from __future__ import annotations

from pathlib import Path

from e2e.html_report import ROWS, STYLE, bars, table, text, write_page
from e2e.multi_rank_prediction import MultiRankPrediction, RankFigures
from e2e.multi_rank_text import COLLECTIVE_HEAD, collective_rows
from e2e.text_report import milliseconds

# What a rank's step consists of, and its colour in the bars.
PARTS = (
    ("compute", "#4a7"),
    ("exposed transfer", "#47b"),
    ("waiting for ranks", "#c84"),
    ("pipeline bubble", "#ca3"),
    ("idle", "#ccc"),
)
_STYLE = STYLE + ".stack{display:flex;height:.9rem;min-width:20rem}.key{padding:0 .5rem;margin-right:.5rem}"


def write_ranks_report(prediction: MultiRankPrediction, path: Path) -> None:
    """Writes the page; ``OutputError`` if it cannot."""
    write_page(ranks_page(prediction), path)


def ranks_page(prediction: MultiRankPrediction) -> str:
    """The HTML text. Everything from the model is escaped."""
    low, high = prediction.interval_seconds
    title = f"{prediction.workload} on {prediction.gpus} x {prediction.machine}"
    path_rows = (
        (part.kind, part.name, milliseconds(part.seconds), str(part.count), part.waits_for)
        for part in prediction.critical_path[:ROWS]
    )
    parts = [
        f"<!doctype html><html lang=en><meta charset=utf-8><title>{text(title)}</title>",
        f"<style>{_STYLE}</style><h1>{text(title)}</h1>",
        f"<p class=big>{milliseconds(prediction.iteration_seconds)} per step</p>",
        f"<p>80 % interval {milliseconds(low)} to {milliseconds(high)}; {prediction.nodes} nodes of cluster "
        f"{text(prediction.cluster)}</p>",
        *(f"<p>{text(note)}</p>" for note in prediction.notes),
        *(f"<p class=warn>{text(warning)}</p>" for warning in prediction.warnings),
        f"<h2>Critical path across ranks</h2>{bars(prediction.attribution)}",
        table(("kind", "operator", "time", "segments", "waits mostly for"), path_rows),
        f"<h2>Ranks</h2>{_ranks(prediction)}",
        f"<h2>Collectives</h2>{table(COLLECTIVE_HEAD, collective_rows(prediction.collectives)[:ROWS])}",
        f"<h2>Stragglers</h2>{_stragglers(prediction)}",
        "</html>",
    ]
    return "\n".join(parts)


def _ranks(prediction: MultiRankPrediction) -> str:
    key = "".join(f"<span class=key style='background:{colour}'>{name}</span>" for name, colour in PARTS)
    head = "".join(f"<th>{name}" for name in ("rank", "alike", "step", "memory", "of one step"))
    rows = "".join(_rank(rank) for rank in prediction.ranks[: 4 * ROWS])
    more = len(prediction.ranks) - 4 * ROWS
    rest = f"<p>and {more} more (--json has all)</p>" if more > 0 else ""
    return f"<p>{key}</p><table><tr>{head}{rows}</table>{rest}"


def _rank(rank: RankFigures) -> str:
    values = (
        rank.compute_seconds,
        rank.exposed_transfer_seconds,
        rank.exposed_wait_seconds,
        rank.bubble_seconds,
        rank.idle_seconds,
    )
    whole = sum(values) or 1.0
    pieces = "".join(
        f"<div title='{name}: {milliseconds(value)}' style='background:{colour};width:{value / whole:.2%}'></div>"
        for (name, colour), value in zip(PARTS, values, strict=True)
    )
    memory = "" if rank.peak_memory_bytes is None else f"{rank.peak_memory_bytes / 2**30:.2f} GiB"
    memory += "" if rank.fits is not False else ", does not fit"
    return (
        f"<tr><td>{rank.rank}<td>{rank.multiplicity}<td class=n>{milliseconds(rank.step_seconds)}"
        f"<td class=n>{memory}<td><div class=stack>{pieces}</div>"
    )


def _stragglers(prediction: MultiRankPrediction) -> str:
    if not prediction.stragglers:
        return "<p>none: no rank keeps others waiting</p>"
    rows = (
        (str(each.rank), str(each.collectives), milliseconds(each.caused_seconds)) for each in prediction.stragglers
    )
    return table(("rank", "came last in", "the next one waited"), rows)
