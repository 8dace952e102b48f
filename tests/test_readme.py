"""What the README tells users to type exists: commands, their options, files."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMAND = re.compile(r"python -m (?:fusion|e2e|costmodel) [^`#\n]+")
FILE = re.compile(r"(?:benchmarks|docs|examples|tests)/[\w./-]+\.\w+")


def commands() -> list[str]:
    """Every command line of the README; those that its text breaks in two joined."""
    text = re.sub(r"`([^`]+)`", lambda match: "`" + " ".join(match[1].split()) + "`", README.replace("```", "\n"))
    found = [part.strip() for line in COMMAND.findall(text) for part in line.split("&&")]
    return sorted({each.removeprefix("... ") for each in found if each.startswith("python -m")})


def test_there_are_commands_of_every_tool():
    assert len(commands()) > 15
    for tool in ("fusion", "e2e", "costmodel"):
        assert any(each.startswith(f"python -m {tool} ") for each in commands())


@pytest.mark.parametrize("line", commands())
def test_command_and_options_exist(line):
    _, _, tool, name, *words = shlex.split(line)
    if tool == "fusion":
        pytest.importorskip("onnx")
    import importlib

    import typer

    group = typer.main.get_command(importlib.import_module(f"{tool}.commands.cli").app)
    known = {option for parameter in group.commands[name].params for option in parameter.opts}  # type: ignore[attr-defined]
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert given <= known


@pytest.mark.parametrize("path", sorted(set(FILE.findall(README))))
def test_files_exist(path):
    assert (ROOT / path).exists()
