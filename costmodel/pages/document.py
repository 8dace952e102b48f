"""Web pages: Jinja2 templates rendered to one self-contained file.

Whatever a template inserts is escaped, except markup (``markupsafe.Markup``), which only templates and charts make. A
policy in the head of ``page.html`` forbids the browser any request. Other templates extend ``page.html`` and use the
macros of ``macros.html``. Jinja2 is imported only when a page is rendered.
"""

from __future__ import annotations

import os
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError, OutputError
from costmodel.base.output_files import write_whole
from costmodel.base.units import format_quantity

# A number with a unit or without: columns of such cells are aligned to the right and sorted by number.
_NUMBER = re.compile(r"[-+]?[\d,]+(\.\d+)?(e[-+]?\d+)?(%|x| \S+)?")
# A part of a whole, which has a bar in its cell.
_SHARE = re.compile(r"\d+\.\d%")


def render(template: str, **values: Any) -> str:
    """Return the page that ``template`` makes of ``values``; names of templates are ``package/file``."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined

    environment = Environment(
        loader=FunctionLoader(_source), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.tests["numeric"] = lambda cell: _NUMBER.fullmatch(cell) is not None
    environment.tests["share"] = lambda cell: _SHARE.fullmatch(cell) is not None
    environment.filters["quantity"] = format_quantity
    page = environment.get_template(template).render(contents=[], **values)
    # Characters that UTF-8 cannot encode are spelled out.
    return page.encode("utf-8", "backslashreplace").decode("utf-8")


def _source(template: str) -> str:
    package, _, name = template.partition("/")
    return files(package).joinpath(name).read_text(encoding="utf-8")


def check_page(report: str | os.PathLike[str] | None) -> None:
    """Raise ``InputError`` if the file of ``--report`` has a name that no browser opens as a page, before anything is
    computed.
    """
    if report is None or os.path.realpath(report) == os.devnull:
        return
    if Path(report).suffix.lower() not in (".html", ".htm"):
        raise InputError(f"--report {report}: a report is a page for a browser; name a file that ends in .html")


def write_page(path: Path, page: str) -> None:
    """Write the page atomically; ``OutputError`` on failure."""
    try:
        write_whole(path, page)
    except OSError as error:
        raise OutputError(f"{path}: cannot be written ({error.strerror}); choose another file") from None
