"""Sortable tables, lists of facts, and bars for shares."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from costmodel.pages.markup import Html, joined, tag

# Rows of longer tables shown initially.
SHOWN = 15
# Longer texts get a wide column.
_LONG = 32


@dataclass(frozen=True)
class NumberCell:
    """Number cell: displayed text, and the ``value`` by which rows are sorted."""

    text: str
    value: float


@dataclass(frozen=True)
class BarCell:
    """Bar over ``share`` (0 to 1) of its cell."""

    share: float
    colour: str | None = None


Cell = str | NumberCell | BarCell


def table(head: Sequence[str], rows: Iterable[Sequence[Cell]], shown: int = SHOWN) -> Html:
    """Table of rows under ``head``; the first row determines which columns are numbers or bars.

    A browser with scripts shows ``shown`` rows first and sorts on a click; without scripts, and in print, all rows are
    shown.
    """
    listed = [tuple(row) for row in rows]
    first = listed[0] if listed else ()
    kinds = ["n" if index < len(first) and isinstance(first[index], NumberCell) else None for index in range(len(head))]
    titles = tag("tr", *(tag("th", name, class_=kind, scope="col") for name, kind in zip(head, kinds, strict=True)))
    body = joined(tag("tr", *map(_cell, row)) for row in listed)
    whole = tag("table", tag("thead", titles), tag("tbody", body), data_shown=shown)
    return tag("div", whole, class_="scroll")


def _cell(cell: Cell) -> Html:
    if isinstance(cell, NumberCell):
        return tag("td", cell.text, class_="n", data_v=repr(float(cell.value)))
    if isinstance(cell, BarCell):
        share = min(max(cell.share, 0.0), 1.0)
        colour = "" if cell.colour is None else f";background:{cell.colour}"
        return tag("td", tag("i", style=f"width:{share:.2%}{colour}"), class_="bar", data_v=repr(float(cell.share)))
    return tag("td", cell, class_="long" if len(cell) > _LONG else None)


def facts(pairs: Mapping[str, str]) -> Html:
    """Definition list of names and texts."""
    return tag("dl", *(joined((tag("dt", name), tag("dd", text))) for name, text in pairs.items()), class_="facts")


def legend(colours: Mapping[str, str]) -> Html:
    """Legend of colours: name -> colour."""
    keys = (tag("span", tag("i", class_="key", style=f"background:{colour}"), name) for name, colour in colours.items())
    return tag("div", *keys, class_="legend")
