"""Frame of a page: head, inline style and scripts, and a policy that forbids the browser any request."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib.resources import files
from pathlib import Path

from costmodel.base.errors import OutputError
from costmodel.base.whole_file import write_whole
from costmodel.pages.markup import Html, joined, tag

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
