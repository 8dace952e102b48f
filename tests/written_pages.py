"""What the project's pages promise, and whether it is so: commands, files, links, names in the code."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("costmodel", "schedules", "fusion", "e2e")
PAGES = {
    str(path.relative_to(ROOT)): path.read_text(encoding="utf-8")
    for path in sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
}
# Files of users and other projects that pages speak of, and an attribute of TVM functions.
NOT_OURS = {"train.py", "FILE.py", "comms.py", "fusion.template"}
TO_BE_MADE = "costmodel/calibration/h200-sxm"
COMMAND = re.compile(
    r"(?:torchrun|python3?)(?: --[^`\n]*?)? +-m +(?:fusion|e2e|costmodel|lab\.(?:data|fit|validate)) [^`#\n|]+"
)
MODULE = re.compile(r"python3? -m ((?:fusion|e2e|costmodel|lab)\.[\w.]+)")
FILE = re.compile(r"(?<![\w./~$-])((?:costmodel|schedules|fusion|e2e|lab|docs|examples|tests)/[\w./*<>+-]*)")
LINK = re.compile(r"\]\(([^)#\s]+)[^)]*\)")
DOTTED = re.compile(rf"(?<![\w./-])((?:{'|'.join((*PACKAGES, 'lab'))})(?:\.\w+)+)")
# A file that a tutorial has its reader write.
TITLE = re.compile(r'^ *```\w+ title="([^"]+)"', re.MULTILINE)
PYTHON_FILE = re.compile(r"(?<![\w./*>-])((?:\w+/)*\w+\.py)\b")


def code_of(text: str) -> str:
    """What stands in backticks and in blocks of code; a line break inside of backticks is a blank."""
    blocks = re.findall(r"```[^\n`]*\n(.*?)```", text, re.DOTALL)
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return "\n".join([*blocks, *(" ".join(span.split()) for span in spans)])


def commands(text: str) -> list[str]:
    """Every command line of ``text`` that starts one of the three tools or of the laboratory, from ``-m`` on."""
    found = [part for line in COMMAND.findall(code_of(text)) for part in line.split("&&")]
    return sorted({"-m " + part.partition("-m ")[2].strip() for part in found if "-m " in part})


def commands_of(tool: str) -> list[str]:
    """All commands of ``tool``, those of a group with its name before them."""

    def inside(group: Any, before: str) -> Iterator[str]:
        for name, each in group.commands.items():
            yield from inside(each, f"{before}{name} ") if hasattr(each, "commands") else (f"{before}{name}",)

    return list(inside(commands_group(tool), ""))


def unknown_options(line: str) -> set[str]:
    """Options of the command ``line`` that its command line does not have; ``KeyError`` for a command that is none."""
    _, tool, *words = shlex.split(line)
    words = words[: words.index("--")] if "--" in words else words  # the words behind are a program of the user
    group = commands_group(tool)
    while hasattr(group, "commands") and words and not words[0].startswith("-"):
        group = group.commands[words.pop(0)]
    known = {option for parameter in group.params for option in parameter.opts}
    return {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)} - known


def missing_files(text: str) -> list[str]:
    """Files and folders of the project that ``text`` names and that are not there; ``<name>`` stands for any."""
    named = {re.sub(r"<[^>]*>|\b[A-Z]{3,}\b", "*", path.rstrip(".,")) for path in FILE.findall(text)}
    named -= {path for path in named if path.startswith(TO_BE_MADE)}
    own = NOT_OURS | set(TITLE.findall(text))
    partial = {name for name in PYTHON_FILE.findall(code_of(text)) if name not in own}
    missing = {path for path in named if not any(ROOT.glob(path.rstrip("/")))}
    return sorted(missing | {name for name in partial if not any(path.endswith(f"/{name}") for path in _files())})


def dead_links(page: str, text: str) -> list[str]:
    """Relative links of ``page``, blocks of code left out, that lead nowhere."""
    prose = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    links = [link for link in LINK.findall(prose) if not re.match(r"[a-z]+:", link)]
    return [link for link in links if not (ROOT / page).parent.joinpath(link).exists()]


def unknown_names(text: str) -> list[str]:
    """Modules and names in them that ``text`` names in code and that are not there."""
    code = code_of(text)
    imported = re.findall(r"^from ([\w.]+) import (.+)$", code, re.MULTILINE)
    named = {f"{module}.{name.strip()}" for module, names in imported for name in names.split(",")}
    prose = code_of(re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    dotted = {name for name in named | set(DOTTED.findall(prose)) if name.split(".")[0] in (*PACKAGES, "lab")}
    return sorted(name for name in dotted if name not in NOT_OURS and not exists(name))


def exists(dotted: str) -> bool:
    """Whether ``dotted`` is a module, or a name that one defines at its top level."""
    parts = dotted.split(".")
    for count in range(len(parts), 0, -1):
        place = ROOT.joinpath(*parts[:count])
        file = next((each for each in (place.with_suffix(".py"), place / "__init__.py") if each.exists()), None)
        if file is not None:
            return count == len(parts) or parts[count] in definitions(str(file.relative_to(ROOT)))
    return False


@cache
def definitions(path: str) -> frozenset[str]:
    """Names that are defined at the top of a file."""
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    # Under an `if` stand the imports for type checkers of what is imported on first use.
    nodes = [*body, *(each for part in body if isinstance(part, ast.If) for each in part.body)]
    return frozenset(name for node in nodes for name in _defined(node))


def _defined(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.ImportFrom):
        return [each.asname or each.name for each in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [ast.unparse(target) for target in targets]


@cache
def commands_group(tool: str) -> Any:
    """The command line of ``tool``, as the library that parses it has it."""
    import typer

    module = f"{tool}.__main__" if tool.startswith("lab.") else f"{tool}.commands.cli"
    return typer.main.get_command(import_module(module).app)


@cache
def _files() -> tuple[str, ...]:
    folders = (*PACKAGES, "lab", "docs", "examples", "tests")
    return tuple(f"/{path.relative_to(ROOT)}" for folder in folders for path in (ROOT / folder).rglob("*.py"))
