"""What README, CONTRIBUTING and docs tell people exists: commands, options, files, links, names."""

from __future__ import annotations

import re

import pytest

from tests.test_imports import ORDER
from tests.written_pages import (
    MODULE,
    PAGES,
    ROOT,
    code_of,
    commands,
    commands_of,
    dead_links,
    exists,
    missing_files,
    unknown_names,
    unknown_options,
)

COMMANDS = sorted({line for text in PAGES.values() for line in commands(text)})


def test_there_are_commands_of_every_tool():
    assert len(commands(PAGES["README.md"])) > 10
    for tool in ("fusion", "e2e", "costmodel"):
        assert any(each.startswith(f"-m {tool} ") for each in COMMANDS)


@pytest.mark.parametrize("line", COMMANDS)
def test_command_and_options_exist(line: str):
    if line.split()[1] == "fusion":
        pytest.importorskip("onnx")
    assert not unknown_options(line)


@pytest.mark.parametrize("tool", ["fusion", "e2e", "costmodel"])
def test_the_page_of_commands_has_all_of_them(tool: str):
    if tool == "fusion":
        pytest.importorskip("onnx")
    listed = "\n".join(commands(PAGES["docs/commands.md"]))
    assert [words for words in commands_of(tool) if f"-m {tool} {words}" not in listed] == []


@pytest.mark.parametrize("page", PAGES)
def test_files_links_and_names_exist(page: str):
    text = PAGES[page]
    assert missing_files(text) == []
    assert dead_links(page, text) == []
    assert unknown_names(text) == []
    assert [module for module in MODULE.findall(code_of(text)) if not exists(module)] == []


def test_chores_are_those_of_the_makefile():
    made = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    lines = re.findall(r"^make ((?:[a-z]+ )*[a-z]+)", "\n".join(code_of(text) for text in PAGES.values()), re.MULTILINE)
    assert lines and {word for line in lines for word in line.split()} <= made


def test_the_drawing_has_the_folders_in_their_order():
    drawing = PAGES["docs/architecture.md"].split("```")[1]
    drawn: dict[str, tuple[str, ...]] = {}
    for package, folder in re.findall(r"^(?:(\w+)|  (\w+)) {2,}", drawing, re.MULTILINE):
        package, folders = (package, ()) if package else (list(drawn)[-1], (*drawn[list(drawn)[-1]], folder))
        drawn[package] = folders
    assert drawn == ORDER
