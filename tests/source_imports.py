"""What a Python source imports: for the test of the packages' order and for the marks of test files."""

from __future__ import annotations

import ast
import functools
import graphlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("costmodel", "schedules", "fusion", "e2e")
LABORATORY = "lab"  # beside the packages, not in the wheel
FRAMEWORKS = frozenset({"tvm", "torch"})


@functools.cache
def frameworks(path: Path) -> frozenset[str]:
    """Those of ``FRAMEWORKS`` that a test file imports: itself, or through helpers and modules of ours that it imports
    (not through theirs: what those load depends on what a test calls)."""
    names = imported_names(path.read_text(encoding="utf-8"))
    ours = [file for name in names if (file := _our_modules().get(name))]
    seen = names.union(*(imported_names(each.read_text(encoding="utf-8")) for each in ours))
    return FRAMEWORKS & {name.split(".")[0] for name in seen}


@functools.cache
def _our_modules() -> dict[str, Path]:
    return modules_below(ROOT, (*PACKAGES, LABORATORY, "tests"))


def imported_names(source: str, package: str = "") -> set[str]:
    """Dotted names of all that ``source`` can import: ``a.b`` and ``a.b.c`` of ``from a.b import c``.

    Imports inside functions and TYPE_CHECKING blocks count, ``import_module("a.b")`` and ``importorskip("a.b")`` with
    a string or the constant head of an f-string, and ``"-m", "a.b"`` of a command line. ``package``: what ``__name__``
    and relative imports stand for.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        names.update(_of_statement(node, package))
        if isinstance(node, ast.Call) and _called(node) in ("import_module", "importorskip", "find_spec"):
            names.update(filter(None, [_constant_head(node.args[0], package)] if node.args else []))
        elif isinstance(node, (ast.List, ast.Tuple)):
            words = [item.value if isinstance(item, ast.Constant) else None for item in node.elts]
            names.update(str(name) for flag, name in zip(words, words[1:], strict=False) if flag == "-m" and name)
    return names


def _of_statement(node: ast.AST, package: str) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        module = ".".join([*parents, *([node.module] if node.module else [])])
        yield module
        yield from (f"{module}.{alias.name}" for alias in node.names)


def _called(node: ast.Call) -> str:
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _constant_head(node: ast.expr, package: str) -> str:
    """The string of a constant; of an f-string what stands before its first unknown part."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    text = ""
    for part in node.values if isinstance(node, ast.JoinedStr) else []:
        if isinstance(part, ast.Constant):
            text += str(part.value)
        elif isinstance(part, ast.FormattedValue) and ast.unparse(part.value) == "__name__":
            text += package
        else:
            break
    return text.rpartition(".")[0] if text and isinstance(node, ast.JoinedStr) else text


def modules_below(root: Path, packages: tuple[str, ...] = PACKAGES) -> dict[str, Path]:
    """Dotted module name -> file of every module of the packages; a package stands for its ``__init__``."""
    files = (path for package in packages for path in sorted((root / package).rglob("*.py")))
    return {
        ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): path.resolve()
        for path in files
    }


def order_violations(package: str, order: tuple[str, ...], sources: dict[str, str]) -> list[str]:
    """``importer -> imported`` for every module that imports a folder of its package that stands after its own.

    ``order``: folders of the package from bottom to top; a folder may import itself and those before it. Modules at
    the package's top level import whatever they like and may be imported by all; a folder missing from ``order`` is a
    violation of its own. ``sources``: dotted module name -> source (an ``__init__`` under its folder's name).
    """
    place = {folder: index for index, folder in enumerate(order)}
    found = []
    for module, source in sorted(sources.items()):
        own = _folder(module, package, sources)
        if own is None:
            continue
        if own not in place:
            found.append(f"{module}: folder {own} has no place in the order")
            continue
        inside = module if any(other.startswith(f"{module}.") for other in sources) else module.rpartition(".")[0]
        for name in sorted(imported_names(source, inside)):
            other = _folder(name, package, sources)
            if other is not None and place.get(other, -1) > place[own]:
                found.append(f"{module} -> {name}")
    return found


def import_circle(sources: dict[str, str]) -> list[str]:
    """Modules that import each other in a circle, one after the other; empty where there is none. ``sources`` as of
    :func:`order_violations`; imports inside functions and for types count.
    """
    imported = {module: imported_names(source) & (sources.keys() - {module}) for module, source in sources.items()}
    try:
        graphlib.TopologicalSorter(imported).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def _folder(name: str, package: str, sources: dict[str, str]) -> str | None:
    """The folder of ``package`` in which ``name`` (a module or what it defines) lies; ``None`` elsewhere."""
    parts = name.split(".")
    if parts[0] != package or len(parts) < 2:
        return None
    prefix = ".".join(parts[:2])
    return parts[1] if any(module.startswith(f"{prefix}.") for module in sources) else None
