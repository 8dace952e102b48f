"""HTML and SVG built so that nothing stays unescaped: everything but :class:`Html` is text."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable
from typing import Any

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
