"""Table of the ranges named by the script, for text and HTML."""

from __future__ import annotations

from collections.abc import Sequence

from costmodel.pages.markup import Html, joined, tag
from costmodel.pages.tables import Cell, NumberCell, table
from e2e.explain.prediction import Prediction
from e2e.explain.range_figures import RangeFigures

RANGE_HEAD = (
    "named range", "entered", "launches", "forward ms", "backward ms", "other ms", "host ms", "on the path ms",
)  # fmt: skip
RANGE_MEANING = (
    "device time by pass; a backward operator counts for the ranges of its forward operator, what is inside of several "
    "ranges for each of them, and gradients that are only added up for none"
)


def range_rows(ranges: Sequence[RangeFigures]) -> list[tuple[str, ...]]:
    """Return the rows under :data:`RANGE_HEAD`."""
    return [
        (
            each.name,
            f"{each.entered:,}",
            f"{each.launches:,}",
            *(f"{seconds * 1e3:.3f}" for seconds in _seconds(each)),
        )
        for each in ranges
    ]


def ranges_section(prediction: Prediction) -> Html | None:
    """Return the table, ``None`` if the script names no ranges."""
    if not prediction.ranges:
        return None
    rows: list[list[Cell]] = [
        [
            each.name,
            NumberCell(f"{each.entered:,}", each.entered),
            NumberCell(f"{each.launches:,}", each.launches),
            *(NumberCell(f"{seconds * 1e3:.3f}", seconds) for seconds in _seconds(each)),
        ]
        for each in prediction.ranges
    ]
    return joined((table(RANGE_HEAD, rows), tag("p", f"{range_meaning(prediction)}.", class_="soft")))


def range_meaning(prediction: Prediction) -> str:
    """Explanation of the figures and of the rank that they are of."""
    which = f"of rank {prediction.longest_computing.rank}, which computes longest: " if prediction.gpus > 1 else ""
    return which + RANGE_MEANING


def _seconds(each: RangeFigures) -> tuple[float, ...]:
    return (each.forward_seconds, each.backward_seconds, each.other_seconds, each.host_seconds, each.path_seconds)
