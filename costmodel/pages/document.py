"""Web pages: markup, tables, and the frame with its style and scripts.

Nothing stays unescaped: everything but :class:`Html` is text. A policy in the head of the page forbids the browser
any request.
"""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from costmodel.base.errors import OutputError
from costmodel.base.output_files import write_whole

# Elements that have no end tag in HTML.
_VOID = frozenset(("br", "hr", "input", "meta"))
_BREAKS_OUT = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026", 0x2028: "\\u2028", 0x2029: "\\u2029"}


class Html(str):
    """Markup, made by :func:`tag` and similar functions; any other string is text and is escaped on insertion."""

    __slots__ = ()


def tag(name: str, /, *content: str | None, **attributes: str | float | bool | None) -> Html:
    """An element. ``content``: markup (:class:`Html`) unchanged, other strings escaped, ``None`` skipped.

    ``attributes``: ``None`` and ``False`` are left out; ``class_`` is ``class``, ``stroke_width`` is ``stroke-width``.
    """
    given = "".join(
        f" {key.rstrip('_').replace('_', '-')}" + ("" if value is True else f'="{escaped(_number(value))}"')
        for key, value in attributes.items()
        if value is not None and value is not False
    )
    if name in _VOID:
        return Html(f"<{name}{given}>")
    return Html(f"<{name}{given}>{joined(content)}</{name}>")


def joined(parts: Iterable[str | None]) -> Html:
    """Concatenated parts; everything but markup is escaped."""
    return Html("".join(escaped(part) for part in parts if part is not None))


def escaped(part: str) -> Html:
    """Text as markup; markup unchanged. Characters that UTF-8 cannot encode are spelled out."""
    if isinstance(part, Html):
        return part
    return Html(html.escape(part, quote=True).encode("utf-8", "backslashreplace").decode("utf-8"))


def embedded_data(identifier: str, value: Any) -> Html:
    """Script element with ``value`` as JSON; no text in it can end the element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False).translate(_BREAKS_OUT)
    return Html(f'<script type="application/json" id="{escaped(identifier)}">{text}</script>')


def _number(value: str | float) -> str:
    """Number as text, rounded to hundredths of a pixel."""
    if isinstance(value, str):
        return value
    return f"{value:.2f}".rstrip("0").rstrip(".") if isinstance(value, float) else str(value)


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


# The browser itself refuses everything outside the file.
_NOTHING_FROM_OUTSIDE = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; img-src data:"


def document(title: str, body: Iterable[str | None], scripts: Sequence[str] = ()) -> str:
    """A whole page in English. ``scripts``: JavaScript of the page, after that of tables."""
    style = files(__package__).joinpath("page.css").read_text(encoding="utf-8")
    tables = files(__package__).joinpath("tables.js").read_text(encoding="utf-8")
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="Content-Security-Policy", content=_NOTHING_FROM_OUTSIDE),
        tag("title", title),
        tag("style", Html(style)),
    )
    code = [tag("script", Html(script)) for script in (tables, *scripts)]
    page = tag("html", head, tag("body", tag("main", joined(body)), *code), lang="en")
    return f"<!doctype html>\n{page}\n"


def section(title: str, *content: str | None, identifier: str) -> Html:
    """Section of a page with its heading, a target for :func:`contents`."""
    return tag("section", tag("h2", title), *content, id=identifier)


def contents(sections: Iterable[tuple[str, str]]) -> Html:
    """Links to the sections: (identifier, title) each."""
    return tag("nav", *(tag("a", title, href=f"#{identifier}") for identifier, title in sections))


def write_page(path: Path, page: str) -> None:
    """Write the page atomically; ``OutputError`` on failure."""
    try:
        write_whole(path, page)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None
