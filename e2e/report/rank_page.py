"""Sections of the HTML report for several GPUs: ranks, collectives, stragglers."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.pages.axes import Axis, around, bytes_text, plain_number, seconds_text
from costmodel.pages.charts import PALETTE, Chart, stacked_rows
from costmodel.pages.markup import Html, joined, tag
from costmodel.pages.tables import Cell, NumberCell, legend, table
from e2e.explain.collective_figures import CollectiveFigures
from e2e.explain.prediction import Prediction
from e2e.explain.rank_figures import RankFigures
from e2e.report.rank_tables import COLLECTIVE_HEAD, PATH_MEANING, RANK_HEAD, collective_rows, rank_row
from e2e.report.text_report import milliseconds

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
