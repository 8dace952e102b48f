"""Pieces of HTML pages: style, bars, tables, escaped text."""

from __future__ import annotations

import html
from collections.abc import Iterable, Mapping

from e2e.report.text_report import milliseconds

ROWS = 25
STYLE = """
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:70rem;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:.5rem 0 1.5rem;width:100%}td,th{padding:.2rem .6rem;text-align:left}
th{border-bottom:2px solid #888}td.n,th.n{text-align:right;font-variant-numeric:tabular-nums}
tr:nth-child(even){background:#f4f4f4}.bar{background:#4a7;height:.8rem}.warn{background:#fe9;padding:.4rem .8rem}
.big{font-size:2rem;font-weight:600}.stack{display:flex;height:.9rem;min-width:20rem}
.key{padding:0 .5rem;margin-right:.5rem}
"""


def bars(values: Mapping[str, float]) -> str:
    """Seconds by name, with their share of the sum as bars."""
    whole = sum(values.values()) or 1.0
    rows = []
    for name, seconds in list(values.items())[:ROWS]:
        bar = f"<div class=bar style='width:{100 * seconds / whole:.1f}%'></div>"
        figures = f"<td class=n>{milliseconds(seconds)}<td class=n>{seconds / whole:.1%}"
        rows.append(f"<tr><td>{text(name)}{figures}<td>{bar}")
    return f"<table><tr><th>name<th class=n>time<th class=n>share<th>{''.join(rows)}</table>"


def table(head: Iterable[str], rows: Iterable[tuple[str, ...]]) -> str:
    """Rows of text, escaped."""
    title = "".join(f"<th>{text(name)}" for name in head)
    body = "".join("<tr>" + "".join(f"<td>{text(cell)}" for cell in row) for row in rows)
    return f"<table><tr>{title}{body}</table>"


def text(value: str) -> str:
    """Escaped."""
    return html.escape(value, quote=True)
