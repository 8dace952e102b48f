"""Hook of MkDocs: pages are written for a code host, whose Markdown is another than Python's.

Links from a page to a file of the repository outside of ``docs/`` work there as they stand. In the site they lead to
the repository (``repository`` under ``extra`` of ``mkdocs.yml``), or, where none is named, become the file's path. A
link to a file that is not there stays as it is, so that the strict build ends with it. A list or a table begins there
without an empty line before it; here it gets one.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")
_BEGINS = re.compile(r"(?:[-*]|\d+\.) |\|")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page with its links out of ``docs/`` changed, and lists and tables apart from what is before them."""
    folder, docs = Path(page.file.abs_src_path).parent, Path(config["docs_dir"]).resolve()
    root, address = docs.parent, config["extra"].get("repository", "").rstrip("/")

    def changed(link: re.Match[str]) -> str:
        target = Path(os.path.normpath(folder / link[2]))
        if target.is_relative_to(docs) or not target.is_relative_to(root) or not target.exists():
            return link[0]
        path = target.relative_to(root).as_posix()
        if address:
            return f"[{link[1]}]({address}/blob/HEAD/{path}{link[3] or ''})"
        return link[1] if link[1].strip("`").endswith(path) else f"{link[1]} (`{path}`)"

    return _LINK.sub(changed, _apart(markdown))


def _apart(markdown: str) -> str:
    lines, before, in_code = [], "", False
    for line in markdown.split("\n"):
        at_left = before[:1].strip() != "" and not _BEGINS.match(before)  # no list goes on there
        if not in_code and at_left and _BEGINS.match(line):
            lines.append("")
        in_code ^= line.lstrip().startswith("```")
        lines.append(line)
        before = line
    return "\n".join(lines)
