"""Tutorials as programs, by Sybil: every fenced block of ``docs/tutorials`` is one of these.

```bash                        run by bash in the tutorial's folder; must end with status 0
```bash title="exit status N"  the same; must end with status N
```python                      run by the interpreter of the test; must end with status 0
```LANGUAGE title="FILE"       written to FILE in the tutorial's folder
```text                        lines that the block before it printed, in their order; others may stand between them
```console                     commands behind ``$`` that cannot run everywhere: parsed by our command lines

In a line of ``text``, runs of blanks are one blank, ``…`` stands for anything, and a number may be off by a fifth.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sybil import Document, Example, Sybil
from sybil.parsers.markdown.lexers import RawFencedCodeBlockLexer

from tests.written_pages import ROOT, commands_group

TUTORIALS = sorted((ROOT / "docs" / "tutorials").glob("*.md"))
TOOLS = ("fusion", "e2e", "costmodel")
TOLERANCE = 0.2
# With a blank or a sign before it, and no letter behind it but the x of "1.2x": not those of names (h100, 3x56x56).
NUMBER = re.compile(r"(?<![\w.,])(?<!\w-)\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?(?=x?(?!\w))")
INFORMATION = re.compile(r'(?P<language>\w*)(?: title="(?P<title>[^"]+)")?$\n', re.MULTILINE)


def parse_blocks(document: Document) -> Any:
    """The fenced blocks of a page, each with :func:`evaluate` behind it."""
    for region in RawFencedCodeBlockLexer(INFORMATION)(document):
        region.parsed, region.evaluator = region.lexemes["source"], evaluate
        yield region


def evaluate(example: Example) -> None:
    """Runs, writes, compares or parses a block in the namespace's ``folder``; an assertion says what is wrong."""
    language, title, text = example.region.lexemes["language"], example.region.lexemes["title"], str(example.parsed)
    status = re.fullmatch(r"exit status (\d+)", title or "")
    folder, space = example.namespace["folder"], example.namespace
    if language == "bash" or (language == "python" and not title):
        command = ["bash", "-euo", "pipefail", "-c", text] if language == "bash" else [sys.executable, "-c", text]
        done = subprocess.run(
            command, cwd=folder, env=space["environment"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL, text=True, timeout=600, check=False,
        )  # fmt: skip
        space["printed"] = done.stdout
        assert done.returncode == (int(status[1]) if status else 0), f"{text}\n{done.stdout[-4000:]}"
    elif title:
        path = folder / title
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    elif language == "text":
        assert missing_line(text, space["printed"]) is None, f"not printed: {missing_line(text, space['printed'])}"
    else:
        assert language == "console", f"line {example.line}: no test looks at a block ```{language}"
        for line in text.replace("\\\n", " ").splitlines():
            parse_command(line.removeprefix("$ "))


def parse_command(command: str) -> None:
    """Parses a command of ours with its options, by its own command line; others are taken as they are."""
    words = shlex.split(command)
    if "-m" in words[:-1]:
        words = words[words.index("-m") + 1 :]
    if words and words[0] in TOOLS:
        group: Any = commands_group(words.pop(0))
        while hasattr(group, "commands"):
            group = group.commands[words.pop(0)]
        group.make_context(group.name, words[: words.index("--")] if "--" in words else words)


def missing_line(shown: str, printed: str) -> str | None:
    """The first line of ``shown`` that ``printed`` lacks behind those before it."""
    lines = iter([" ".join(line.split()) for line in printed.splitlines()])
    for line in (" ".join(line.split()) for line in shown.splitlines()):
        if line not in ("", "…") and not any(is_line(line, each) for each in lines):
            return line
    return None


def is_line(shown: str, printed: str) -> bool:
    """Whether ``printed`` is the line ``shown``, by the rules at the top of this module."""
    numbers = [float(number.replace(",", "")) for number in NUMBER.findall(shown)]
    texts = ["(?:.*?)".join(map(re.escape, text.split("…"))) for text in NUMBER.split(shown)]
    found = re.fullmatch(r"(?<![\d.,])(\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?)".join(texts), printed)
    return found is not None and all(
        abs(number - float(given.replace(",", ""))) <= TOLERANCE * max(number, float(given.replace(",", "")))
        for number, given in zip(numbers, found.groups(), strict=True)
    )


def environment_in(folder: Path) -> dict[str, str]:
    """The programs of this checkout by their names, a home of its own, and ``examples`` in ``folder``."""
    programs = folder / ".programs"
    programs.mkdir()
    for name in (*TOOLS, "python", "python3"):
        module = f" -m {name}" if name in TOOLS else ""
        (programs / name).write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)}{module} "$@"\n')
        (programs / name).chmod(0o755)
    (folder / ".home").mkdir()
    (folder / "examples").symlink_to(ROOT / "examples")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("COSTMODEL_", "FUSION_", "XDG_"))}
    return kept | {
        "PATH": os.pathsep.join([str(programs), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
        "HOME": str(folder / ".home"),
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",  # output and errors in the order in which they were printed
    }


@pytest.mark.thorough
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_prints_what_it_shows(path: Path, tmp_path: Path):
    for module in ("onnxruntime", "torch", "transformers", "tvm"):
        pytest.importorskip(module)
    if "g++" in path.read_text(encoding="utf-8") and shutil.which("g++") is None:
        pytest.skip("there is no g++")
    document = Sybil(parsers=[parse_blocks]).parse(path)
    document.namespace.update(folder=tmp_path, environment=environment_in(tmp_path), printed="")
    for example in document.examples():
        example.evaluate()


def test_numbers_of_a_line_may_be_off_by_a_fifth():
    assert is_line("step 613.6 ms (80% interval …)", "step 650.0 ms (80% interval 1 ms to 2 ms)")
    assert is_line("1.20x as fast, 2,871 calls", "1.25x as fast, 2,900 calls")
    assert is_line("host=2x …9.617 ms …1.09x …", "host=2x 9.620 ms 8.120 to 12.318 1.09x (1.00-1.84) 100% -> 0%")
    assert not is_line("step 613.6 ms", "step 320.0 ms")
    assert not is_line("h100-sxm 1", "h200-sxm 1")  # digits of a name are no number
    assert missing_line("one 1\n…\nthree 3\n", "one  1\ntwo 2\nthree 3\n") is None
    assert missing_line("three 3\none 1\n", "one 1\nthree 3\n") == "one 1"
