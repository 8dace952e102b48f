"""Tutorials as programs: their fenced blocks, how each is run, and whether it printed what the page shows.

A block is one of these, and anything else is refused, so that none is left out by accident:

```bash                       run by bash in the tutorial's folder; must end with status 0
```bash title="exit status N" the same; must end with status N
```python                     run by the interpreter of the test; must end with status 0
```LANGUAGE title="FILE"      written to FILE in the tutorial's folder
```text                       lines that the block before it printed
```console                    commands behind ``$`` that cannot run everywhere: parsed by the command itself

What is printed (standard output and errors, in order) must have the lines of the ``text`` block in their order; others
may stand between them. In a line, runs of blanks are one blank, ``…`` stands for anything, and a number may be off by a
fifth. A line of ``…`` alone says that something was left out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.written_pages import ROOT, commands_group

TUTORIALS = {path.stem: path for path in sorted((ROOT / "docs" / "tutorials").glob("*.md"))}
TOOLS = ("fusion", "e2e", "costmodel")
NEEDED = {"fusion": ("tvm", "onnx", "onnxruntime", "torch"), "e2e": ("torch", "transformers", "ortools")}
OMITTED = "…"
TOLERANCE = 0.2
# With a blank or a sign before it, and no letter behind it but the x of "1.2x": not those of names (h100, 3x56x56).
NUMBER = re.compile(r"(?<![\w.,])(?<!\w-)\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?=x?(?!\w))")
FENCE = re.compile(r"^(?P<indent> *)```(?P<information>[^\n`]*)\n(?P<text>.*?)^(?P=indent)```[ ]*$", re.DOTALL | re.M)
INFORMATION = re.compile(r'(\w*)(?: title="([^"]+)")?')
STATUS = re.compile(r"exit status (\d+)")
LONGEST_SECONDS = 600


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. ``title``: a file, or the exit status that is expected; ``line``: where it begins."""

    language: str
    title: str
    text: str
    line: int

    @property
    def status(self) -> int:
        """How the program that this block is must end."""
        found = STATUS.fullmatch(self.title)
        return int(found[1]) if found else 0

    @property
    def kind(self) -> str:
        """``run``, ``write``, ``output`` or ``parse``; ``ValueError`` for a block that nobody would look at."""
        if self.language == "bash" and (not self.title or STATUS.fullmatch(self.title)):
            return "run"
        if self.language == "python" and not self.title:
            return "run"
        if self.language == "text" and not self.title:
            return "output"
        if self.language == "console" and not self.title:
            return "parse"
        if self.language and self.title and not STATUS.fullmatch(self.title):
            return "write"
        raise ValueError(f"line {self.line}: a block ```{self.language} {self.title} is nothing that a test looks at")


def blocks_of(page: str) -> list[Block]:
    """The blocks of ``page`` in their order; ``ValueError`` names one that no rule of this module is for."""
    found: list[Block] = []
    for match in FENCE.finditer(page):
        line = page.count("\n", 0, match.start()) + 1
        information = INFORMATION.fullmatch(match["information"].strip())
        if information is None:
            raise ValueError(f"line {line}: ```{match['information']} is not understood")
        text = re.sub(f"^{match['indent']}", "", match["text"], flags=re.M)
        found.append(Block(information[1], information[2] or "", text, line))
    fences = len(re.findall(r"^ *```", page, re.M))
    if fences != 2 * len(found):
        raise ValueError(f"{fences} lines begin with ``` where {len(found)} blocks are closed")
    before = ""
    for block in found:
        if block.kind == "output" and before != "run":
            raise ValueError(f"line {block.line}: output of nothing; it must follow a block that is run")
        before = block.kind
    return found


def uses(program: str, name: str) -> bool:
    """Whether a block of the tutorial ``name`` starts ``program`` or imports it."""
    blocks = blocks_of(TUTORIALS[name].read_text(encoding="utf-8"))
    run = "\n".join(block.text for block in blocks if block.kind in ("run", "write"))
    return re.search(rf"^ *(?:{re.escape(program)} |(?:import|from) {re.escape(program)}\b)", run, re.M) is not None


def require(tool: str, name: str) -> None:
    """Skips the running test where the tutorial ``name`` uses ``tool`` and what that needs is not installed."""
    missing = [module for module in NEEDED[tool] if find_spec(module) is None]
    if missing and uses(tool, name):
        pytest.skip(f"{missing[0]} is not installed")


def run_page(page: Path, folder: Path) -> list[str]:
    """Runs the blocks of ``page`` in ``folder`` one after the other, up to the first that is wrong; what is wrong."""
    environment = _environment(folder)
    printed = ""
    for block in blocks_of(page.read_text(encoding="utf-8")):
        where = f"{page.name}:{block.line}"
        if block.kind == "write":
            path = folder / block.title
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif block.kind == "run":
            done = _run(block, folder, environment)
            printed = done.stdout
            if done.returncode != block.status:
                return [f"{where}: ended with status {done.returncode}\n{block.text}\n{printed[-4000:]}"]
        elif block.kind == "output":
            missing = lines_missing(block.text, printed)
            if missing:
                return [f"{where}: not printed: {missing[0]}\n--- printed ---\n{printed[-8000:]}"]
    return []


def _run(block: Block, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", block.text]
    if block.language == "bash":
        command = ["bash", "-euo", "pipefail", "-c", block.text]
    return subprocess.run(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=LONGEST_SECONDS,
        check=False,
    )


def _environment(folder: Path) -> dict[str, str]:
    """The programs of this checkout by their names, a home of its own, and ``examples`` in ``folder``."""
    programs, home = folder / ".programs", folder / ".home"
    programs.mkdir()
    home.mkdir()
    for name in (*TOOLS, "python", "python3"):
        module = f" -m {name}" if name in TOOLS else ""
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{module} "$@"\n', encoding="utf-8")
        path.chmod(0o755)
    (folder / "examples").symlink_to(ROOT / "examples")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COSTMODEL_", "FUSION_", "XDG_"))}
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    return kept | {
        "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join(paths),
        "HOME": str(home),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",  # output and errors in the order in which they were printed
    }


def lines_missing(shown: str, printed: str) -> list[str]:
    """The first line of ``shown`` that ``printed`` lacks behind those before it, in a list; none: an empty one."""
    lines = [_plain(line) for line in printed.splitlines()]
    place = 0
    for line in filter(None, map(_plain, shown.splitlines())):
        if line == OMITTED:
            continue
        found = next((number for number in range(place, len(lines)) if line_matches(line, lines[number])), None)
        if found is None:
            return [line]
        place = found + 1
    return []


def _plain(line: str) -> str:
    return " ".join(line.split())


def line_matches(shown: str, printed: str) -> bool:
    """Whether ``printed`` is the line ``shown``, as the rule at the top of this module says."""
    parts = [part for piece in re.split(f"({OMITTED})", shown) for part in _parts(piece)]
    return _match(parts, printed, 0)


def _parts(piece: str) -> list[str | float]:
    """Texts and numbers of ``piece`` in their order."""
    if piece == OMITTED:
        return [OMITTED]
    found: list[str | float] = []
    end = 0
    for number in NUMBER.finditer(piece):
        found += [piece[end : number.start()], _value(number[0])]
        end = number.end()
    return [part for part in [*found, piece[end:]] if part != ""]


def _match(parts: Sequence[str | float], line: str, place: int) -> bool:
    if not parts:
        return place == len(line)
    first, rest = parts[0], parts[1:]
    if isinstance(first, float):
        number = NUMBER.match(line, place)
        return number is not None and _alike(first, _value(number[0])) and _match(rest, line, number.end())
    if first == OMITTED:
        return any(_match(rest, line, end) for end in range(place, len(line) + 1))
    return line.startswith(first, place) and _match(rest, line, place + len(first))


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _alike(shown: float, printed: float) -> bool:
    return abs(shown - printed) <= TOLERANCE * max(abs(shown), abs(printed))


def commands_in(block: Block) -> list[str]:
    """The commands of a ``console`` block, one behind each ``$``; ``ValueError`` for a line that is none."""
    lines = block.text.replace("\\\n", " ").splitlines()
    wrong = [line for line in lines if line.strip() and not line.startswith("$ ")]
    if wrong:
        raise ValueError(f"line {block.line}: in ```console every line is a command behind `$ `, not {wrong[0]!r}")
    return [line[2:] for line in lines if line.strip()]


def command_mistake(command: str) -> str:
    """Why ``command`` would be refused before it does anything; empty if it would not.

    Ours are parsed by their own command line: options, types and what is needed. Of another module of Python the
    options must stand in its source; ``pip install`` must name extras that there are.
    """
    words = shlex.split(command)
    if words[:2] == ["pip", "install"]:
        return _extra_mistake(words[2:])
    if "-m" in words[:-1] and words[0] in ("python", "python3", "torchrun"):
        words = words[words.index("-m") + 1 :]
        if words[0] not in TOOLS:
            return _module_mistake(words)
    if words[0] not in TOOLS:
        return f"{words[0]}: no program that a test can ask"
    return _parsed(words)


def _parsed(words: Sequence[str]) -> str:
    tool, *rest = words
    command: Any = commands_group(tool)
    while hasattr(command, "commands"):
        if not rest or rest[0] not in command.commands:
            return f"{tool}: has no command {rest[0] if rest else ''!r}"
        command = command.commands[rest.pop(0)]
    try:
        command.make_context(command.name, rest)
    except Exception as error:  # of the library that parses, whichever typer uses
        return f"{' '.join(words)}: {error}"
    return ""


def _module_mistake(words: Sequence[str]) -> str:
    module, *rest = words
    found = find_spec(module)
    if found is None or found.origin is None:
        return f"{module}: no such module"
    source = Path(found.origin).read_text(encoding="utf-8")
    unknown = [word for word in rest if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source]
    return f"{module}: does not know {unknown[0]}" if unknown else ""


def _extra_mistake(words: Sequence[str]) -> str:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    named = {name for word in words for group in re.findall(r"\[([\w,]+)\]", word) for name in group.split(",")}
    return f"pip install: no extra {sorted(named - set(extras))[0]}" if named - set(extras) else ""
