"""Every message with which the programs refuse something, as one page: ``python docs/site/error_index.py > docs/errors.md``.

The messages are read from the source: whatever makes a :class:`costmodel.base.errors.ProjectError` (or ends a command
with ``fail``), and what validators of the project's own files say. Values are {named} as the code names them.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
TOOLS = {
    "fusion": ("`fusion`", ("fusion", "schedules")),
    "e2e": ("`e2e`", ("e2e",)),
    "costmodel": ("Both tools, and `costmodel`", ("costmodel",)),
}
BASE = "ProjectError"
VALIDATORS = {"field_validator", "model_validator", "AfterValidator", "BeforeValidator"}
Known = Mapping[str, ast.expr]


class Message(NamedTuple):
    """``text`` as the user sees it, and the file that says so."""

    path: str
    text: str


@cache
def sources() -> dict[str, ast.Module]:
    """All modules of the packages by their path."""
    packages = [package for _, folders in TOOLS.values() for package in folders]
    paths = [path for package in packages for path in sorted((ROOT / package).rglob("*.py"))]
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def error_names(trees: Mapping[str, ast.Module]) -> set[str]:
    """Names of all classes below ``ProjectError``, itself among them."""
    classes = [each for tree in trees.values() for each in ast.walk(tree) if isinstance(each, ast.ClassDef)]
    found, before = {BASE}, 0
    while len(found) > before:
        before = len(found)
        found |= {each.name for each in classes if found & {ast.unparse(base) for base in each.bases}}
    return found


def messages(trees: Mapping[str, ast.Module]) -> list[Message]:
    """All of them, sorted by their words; what several places of a file say alike stands once."""
    errors = error_names(trees)
    found = {message for path, tree in trees.items() for message in _Module(path, tree, errors).messages()}
    return sorted(found, key=lambda each: (re.sub(r"\{[^}]*\}|\W+", " ", each.text).split(), each))


class _Module:
    """One file: its functions, and what makes errors in them."""

    def __init__(self, path: str, tree: ast.Module, errors: set[str]) -> None:
        self.path, self.errors = path, errors
        self.functions = [each for each in ast.walk(tree) if isinstance(each, ast.FunctionDef)]
        self.calls = [each for each in ast.walk(tree) if isinstance(each, ast.Call)]
        self.constants = _texts(tree.body)
        wrapped = (each for call in self.calls if _name(call.func) in VALIDATORS for each in call.args)
        self.validators = {each.id for each in wrapped if isinstance(each, ast.Name)}

    def messages(self) -> Iterator[Message]:
        inner = {id(each) for function in self.functions for each in ast.walk(function) if each is not function}
        for function in self.functions:
            if id(function) not in inner or True:
                yield from (Message(self.path, text) for text in self._of(function))

    def _of(self, function: ast.FunctionDef) -> Iterator[str]:
        known = self.constants | _texts(list(_own(function)))
        parameters = [each.arg for each in [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]]
        for call in (each for each in _own(function) if isinstance(each, ast.Call) and self._makes_error(each, function)):
            told = call.args[0]
            used = {each.id for each in ast.walk(told) if isinstance(each, ast.Name)} & set(parameters)
            bound = [given for given in self._given(function, parameters) if any(_is_text(given.get(name)) for name in used)]
            yield from {text_of(told, {**known, **{k: v for k, v in given.items() if _is_text(v)}}) for given in bound or [{}]}

    def _makes_error(self, call: ast.Call, function: ast.FunctionDef) -> bool:
        name = _name(call.func)
        if not call.args:
            return False
        if name in self.errors or name == "fail" and not self.path.endswith("command_line.py"):
            return True
        if name == "ValueError":
            return function.name in self.validators or any(
                _name(each.func if isinstance(each, ast.Call) else each) in VALIDATORS for each in function.decorator_list
            )
        kinds = {each.arg: ast.unparse(each.annotation) for each in function.args.args if each.annotation}
        return any(f"type[{error}]" == kinds.get(name) for error in self.errors)

    def _given(self, function: ast.FunctionDef, parameters: list[str]) -> Iterator[Known]:
        """With which arguments this file calls ``function``."""
        for call in self.calls:
            if _name(call.func) == function.name:
                own = parameters[1:] if isinstance(call.func, ast.Attribute) and parameters[:1] == ["self"] else parameters
                yield {**dict(zip(own, call.args, strict=False)), **{each.arg: each.value for each in call.keywords if each.arg}}


def _own(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """What is in ``function``, but not in functions inside of it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        yield node
        waiting += [each for each in ast.iter_child_nodes(node) if not isinstance(each, ast.FunctionDef)]


def _texts(nodes: list[ast.AST] | list[ast.stmt]) -> dict[str, ast.expr]:
    """Names that are given a text, once."""
    found: dict[str, list[ast.expr]] = {}
    for node in nodes:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    return {name: values[0] for name, values in found.items() if len(values) == 1 and _is_text(values[0])}


def _is_text(node: ast.expr | None) -> bool:
    if isinstance(node, ast.IfExp):
        return _is_text(node.body) and _is_text(node.orelse)
    if isinstance(node, ast.BinOp):
        return _is_text(node.left) or _is_text(node.right)
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def text_of(node: ast.expr, known: Known) -> str:
    """The text that ``node`` is, values of it as {names}; ``known``: names that stand for texts."""
    if isinstance(node, ast.Constant):
        return str(node.value)
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(each, known) for each in node.values)
    if isinstance(node, ast.FormattedValue):
        quote = "'" if node.conversion == ord("r") else ""
        return f"{quote}{text_of(node.value, known)}{quote}"
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return text_of(node.left, known) + text_of(node.right, known)
    if isinstance(node, ast.IfExp) and _is_text(node):
        either = [text_of(each, known) for each in (node.body, node.orelse)]
        return f"[{' | '.join(each.strip() for each in either)}]" if all(either) else f"[{''.join(either)}]"
    if isinstance(node, ast.Name) and node.id in known:
        return text_of(known[node.id], {name: each for name, each in known.items() if name != node.id})
    return f"{{{value_name(node)}}}"


def value_name(node: ast.expr) -> str:
    """A word for a value: the last name of the expression that means something."""
    if isinstance(node, ast.Name):
        return node.id.strip("_")
    if isinstance(node, ast.Attribute):
        return value_name(node.value) if node.attr in ("__name__", "name", "value") and not _is_self(node.value) else node.attr.strip("_")
    if isinstance(node, ast.Call):
        arguments = [each for each in node.args if not isinstance(each, ast.Constant | ast.Starred)]
        if arguments:
            return value_name(arguments[0])
        return value_name(node.func.value) if isinstance(node.func, ast.Attribute) and not _is_self(node.func.value) else _name(node.func).strip("_")
    if isinstance(node, ast.GeneratorExp | ast.ListComp | ast.SetComp):
        return value_name(node.generators[0].iter)
    if isinstance(node, ast.Subscript | ast.Starred):
        return value_name(node.value)
    if isinstance(node, ast.IfExp):
        return value_name(node.body)
    if isinstance(node, ast.BinOp):
        return value_name(node.right if isinstance(node.left, ast.Constant) else node.left)
    if isinstance(node, ast.BoolOp):
        return value_name(node.values[0])
    if isinstance(node, ast.UnaryOp):
        return value_name(node.operand)
    return "value"


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


if __name__ == "__main__":
    for each in messages(sources()):
        print(each.path, "|", each.text)
