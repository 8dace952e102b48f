"""Hook of MkDocs: links from a page to a file of the repository outside of ``docs/``.

Pages are read on a code host too, where such a link works as it stands. In the site it leads to the repository
(``repository`` under ``extra`` of ``mkdocs.yml``), or, where none is named, becomes the file's path. A link to a file
that is not there stays as it is, so that the strict build ends with it.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s:#]+)(#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page with its links out of ``docs/`` changed."""
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

    return _LINK.sub(changed, markdown)
