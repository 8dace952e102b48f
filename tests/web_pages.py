"""For tests of pages: read as a parser does, and as a headless browser does where one is installed."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

BROWSERS = (
    "chromium-headless-shell",
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
# What a name of a model, an operator or a layer might try; it must come out as text, wherever names stand.
HOSTILE = '</script><b onmouseover="alert(1)">&\'x'


class Page(HTMLParser):
    """Tags with their attributes, and texts outside of scripts and styles."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self._raw = False  # inside of a script or a style

    def handle_starttag(self, name, attributes):
        self.tags.append((name, dict(attributes)))
        self._raw = name in ("script", "style")

    def handle_endtag(self, name):
        self._raw = False

    def handle_data(self, text):
        if not self._raw:
            self.texts.append(text)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.texts).split())

    def count(self, name: str, **attributes: str) -> int:
        return sum(
            tag == name and all(given.get(key.rstrip("_")) == value for key, value in attributes.items())
            for tag, given in self.tags
        )


def read_page(text: str) -> Page:
    """Parsed, and checked for what holds of every page: nothing from outside, no handler in an attribute."""
    assert text.startswith("<!doctype html>")
    page = Page()
    page.feed(text)
    page.close()
    for name, attributes in page.tags:
        assert name not in ("link", "iframe", "object", "img", "base"), name
        for key, value in attributes.items():
            assert not key.startswith("on"), (name, key)
            if key in ("src", "href"):
                assert not re.match(r"(?i)\s*(?:[a-z]+:|//)", value or ""), value
    policy = [attributes for name, attributes in page.tags if attributes.get("http-equiv") == "Content-Security-Policy"]
    assert policy and "default-src 'none'" in (policy[0]["content"] or "")
    assert any(attributes.get("name") == "viewport" for _, attributes in page.tags)
    # Names of namespaces and addresses in style or scripts would be requests that somebody forgot.
    assert "http:" not in text and "https:" not in text
    return page


# Of texts that a selector finds: how many there are, and how many pairs of them lie on each other, as drawn.
OVERLAPS = """((selector) => {
  const boxes = [...document.querySelectorAll(selector)].map((each) => each.getBoundingClientRect());
  const meet = (one, other) => one.left < other.right - 1 && other.left < one.right - 1
    && one.top < other.bottom - 3 && other.top < one.bottom - 3;
  let pairs = 0;
  boxes.forEach((one, place) => { pairs += boxes.slice(place + 1).filter((other) => meet(one, other)).length; });
  return [boxes.length, pairs];
})"""


def browser() -> str:
    """The path of a headless browser; skips the test where there is none."""
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    if found is None:
        pytest.skip("no headless browser here (apt-get install chromium-headless-shell)")
    return found


def drawn_page(page: Path, picture: Path, width: int = 1200, height: int = 1600) -> None:
    """A screenshot of a page in a window of that size."""
    _run(page, [f"--window-size={width},{height}", "--hide-scrollbars", f"--screenshot={picture}"])


def found_in(page: Path, script: str, width: int = 1200) -> Any:
    """What ``script``, an expression of JavaScript, gives in the page after its own scripts ran, by way of JSON."""
    code = f"document.documentElement.dataset.found = JSON.stringify({script});"
    tried = page.with_name(f"{page.stem}-tried.html")
    text = page.read_text(encoding="utf-8").replace("</body>", f"<script>{code}</script></body>")
    tried.write_text(text, encoding="utf-8")
    document = _run(tried, ["--dump-dom", f"--window-size={width},1000"])
    match = re.search(r'<html[^>]* data-found="([^"]*)"', document)
    assert match is not None, document[:300]
    return json.loads(html.unescape(match[1]))


def _run(page: Path, options: list[str]) -> str:
    common = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--virtual-time-budget=4000",
              "--force-color-profile=srgb", f"--user-data-dir={page.parent / 'browser'}"]  # fmt: skip
    done = subprocess.run(
        [browser(), *common, *options, page.resolve().as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout
