"""The part of the HTML report that lists ranks and collectives."""

from __future__ import annotations

from e2e.explain.prediction import Prediction, RankFigures
from e2e.report.html_parts import ROWS, table
from e2e.report.rank_tables import COLLECTIVE_HEAD, collective_rows
from e2e.report.text_report import milliseconds

# What a rank's step consists of, and its colour in the bars.
PARTS = (
    ("compute", "#4a7"),
    ("exposed transfer", "#47b"),
    ("waiting for ranks", "#c84"),
    ("pipeline bubble", "#ca3"),
    ("idle", "#ccc"),
)


def ranks_section(prediction: Prediction) -> str:
    """Every rank with what its step consists of."""
    key = "".join(f"<span class=key style='background:{colour}'>{name}</span>" for name, colour in PARTS)
    head = "".join(f"<th>{name}" for name in ("rank", "alike", "step", "memory", "of one step"))
    rows = "".join(_rank(rank) for rank in prediction.ranks[: 4 * ROWS])
    more = len(prediction.ranks) - 4 * ROWS
    rest = f"<p>and {more} more (--json has all)</p>" if more > 0 else ""
    return f"<h2>Ranks</h2><p>{key}</p><table><tr>{head}{rows}</table>{rest}"


def collectives_section(prediction: Prediction) -> str:
    """Collectives and who kept others waiting in them."""
    listed = table(COLLECTIVE_HEAD, collective_rows(prediction.collectives)[:ROWS])
    return f"<h2>Collectives</h2>{listed}<h2>Stragglers</h2>{_stragglers(prediction)}"


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


def _stragglers(prediction: Prediction) -> str:
    if not prediction.stragglers:
        return "<p>none: no rank keeps others waiting</p>"
    rows = (
        (str(each.rank), str(each.collectives), milliseconds(each.caused_seconds)) for each in prediction.stragglers
    )
    return table(("rank", "came last in", "the next one waited"), rows)
