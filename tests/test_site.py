"""The documentation as a site: pages that are generated are current, links hold, nothing is fetched by who reads it."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.source_imports import PACKAGES, imported_names

ROOT = Path(__file__).resolve().parents[1]


def site_module(name: str) -> ModuleType:
    """``docs/site/<name>.py``, which is no part of a package."""
    spec = importlib.util.spec_from_file_location(f"site_{name}", ROOT / "docs" / "site" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


hook = site_module("page_hook")


# --- links ----------------------------------------------------------------------------------------


def changed(text: str, page: str = "docs/deploying.md", repository: str = "") -> str:
    file = SimpleNamespace(file=SimpleNamespace(abs_src_path=str(ROOT / page)))
    return hook.on_page_markdown(
        text, page=file, config={"docs_dir": str(ROOT / "docs"), "extra": {"repository": repository}}
    )


def test_links_out_of_the_docs_become_paths_or_lead_to_the_repository():
    text = (
        "[the example](../examples/run_model.cpp), [`README.md`](../README.md), [trust](trust.md#x), [a](https://a.b/)"
    )
    assert (
        changed(text) == "the example (`examples/run_model.cpp`), `README.md`, [trust](trust.md#x), [a](https://a.b/)"
    )
    assert (
        changed("[it](../../README.md)", "docs/tutorials/one.md", "https://a.b/c/")
        == "[it](https://a.b/c/blob/HEAD/README.md)"
    )


def test_lists_and_tables_stand_apart():
    text = "```\n- code\n| code\n```\n- one\n  more\n- two\n\nText:\n| a | b |\n|---|---|\n# Head\n1. one"
    wanted = "```\n- code\n| code\n```\n\n- one\n  more\n- two\n\nText:\n\n| a | b |\n|---|---|\n# Head\n\n1. one"
    assert changed(text) == wanted


def test_links_that_lead_nowhere_stay_for_the_strict_build_to_find():
    assert changed("[gone](../examples/gone.py), [gone](gone.md)") == "[gone](../examples/gone.py), [gone](gone.md)"


# --- the site -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What ``make docs`` builds."""
    pytest.importorskip("material", reason="the site is built with mkdocs-material (extra `docs`)")
    made = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(made)]
    quiet = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT, env=quiet)
    assert built.returncode == 0, built.stderr[-2000:]
    return made


@pytest.mark.thorough
def test_who_reads_the_site_asks_nobody_else(site: Path):
    loaded = r"<(?:script|img|iframe|link(?! rel=\"canonical\"))\b[^>]*?\b(?:src|href)=\"?((?:https?:)?//[^\s\">]+)"
    found = {
        address for page in site.rglob("*.html") for address in re.findall(loaded, page.read_text(encoding="utf-8"))
    }
    styles = {
        address
        for sheet in site.rglob("*.css")
        for address in re.findall(
            r"(?:@import|url\()\s*[\"']?((?:https?:)?//[^\s\"')]+)", sheet.read_text(encoding="utf-8")
        )
    }
    assert found | styles == set()
    # The theme's scripts fetch Mermaid for its diagrams, and figures of a repository that it links.
    assert not [
        page.name
        for page in site.rglob("*.html")
        if re.search(r'class="?(?:mermaid|md-source)\b', page.read_text(encoding="utf-8"))
    ]


@pytest.mark.thorough
def test_lists_and_tables_are_lists_and_tables(site: Path):
    # Where no empty line stands before one, a code host shows a list and Python's Markdown a paragraph.
    bad = r"<p>(?:[^<]|<(?!/p>))*?(?:^|\n)\s*(?:[-*] |\d+\. |\|)[^\n<]{0,60}"
    found = {
        page.name: hit[0][-70:]
        for page in site.rglob("*.html")
        if (hit := re.search(bad, page.read_text(encoding="utf-8")))
    }
    assert found == {}


def test_no_program_needs_what_builds_the_site():
    paths = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    found = {name.split(".")[0] for path in paths for name in imported_names(path.read_text(encoding="utf-8"))}
    assert not found & {"mkdocs", "material", "markdown", "pymdownx"}
