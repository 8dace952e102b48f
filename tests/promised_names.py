"""What version 1 promises to keep (docs/limits.md): options of command lines, names and arguments of docs/api.md, and
fields of the records that those return, as ``--json`` prints them. ``tests/promised_names.txt`` has what was released.

``PYTHONPATH=. python tests/promised_names.py > tests/promised_names.txt`` before a release: what was added is promised
from there on.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from tests.written_pages import ROOT, commands_group

KEPT = Path(__file__).with_suffix(".txt")
OFFERING = ("costmodel", "fusion", "e2e")


def offered() -> list[str]:
    """Every promised name that the code has, such as ``e2e predict --model`` and ``e2e.Prediction.fits``."""
    found = {name for tool in OFFERING for name in _options(commands_group(tool), tool)}
    return sorted(found.union(*(_names(package) for package in OFFERING)))


def _options(command: Any, path: str) -> Iterator[str]:
    yield path
    for parameter in command.params:
        yield from (f"{path} {option}" for option in parameter.opts if option.startswith("-"))
    for name, each in getattr(command, "commands", {}).items():
        yield from _options(each, f"{path} {name}")


def _names(package: str) -> Iterator[str]:
    """What a package offers: ``package.name``, arguments of functions in brackets, members of classes behind a dot."""
    for node in ast.parse((ROOT / package / "__init__.py").read_text(encoding="utf-8")).body:
        for each in ast.walk(node) if isinstance(node, ast.If) else ():
            if isinstance(each, ast.ImportFrom) and each.module is not None:
                module = f"{each.module.replace('.', '/')}.py"
                for name in (alias.name for alias in each.names):
                    yield f"{package}.{name}"
                    yield from _inside(_defined(module)[name], f"{package}.{name}", package)


def _inside(
    node: ast.ClassDef | ast.FunctionDef, dotted: str, package: str, above: tuple[str, ...] = ()
) -> Iterator[str]:
    """Arguments of a function; fields of a record and of the records in them; public methods of an offered class."""
    if isinstance(node, ast.FunctionDef):
        yield from (f"{dotted}({each.arg})" for each in [*node.args.args, *node.args.kwonlyargs])
        return
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and not above and not each.name.startswith("_"):
            yield f"{dotted}.{each.name}"
        elif isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
            yield (field := f"{dotted}.{each.target.id}")
            for name in re.findall(r"\w+", ast.unparse(each.annotation)):  # names of public classes are unique
                inner = _records(package).get(name)
                if inner is not None and name not in (*above, node.name):
                    yield from _inside(inner, field, package, (*above, node.name))


@cache
def _defined(path: str) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    body = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    return {each.name: each for each in body if isinstance(each, ast.ClassDef | ast.FunctionDef)}


@cache
def _records(package: str) -> dict[str, ast.ClassDef]:
    """The package's dataclasses by name."""
    files = (str(path.relative_to(ROOT)) for path in (ROOT / package).rglob("*.py"))
    nodes = (node for path in files for node in _defined(path).values() if isinstance(node, ast.ClassDef))
    return {node.name: node for node in nodes if any("dataclass" in ast.unparse(each) for each in node.decorator_list)}


if __name__ == "__main__":
    print("\n".join(offered()))
