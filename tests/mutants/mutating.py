"""Faults in a source, one at a time, by mutmut's operators.

mutmut itself leaves out decorated functions and classes, so properties and all dataclasses; here every statement that
computes something is changed. Left as they are: annotations, imports, decorators, docstrings, protocols, names of
types, and what a program checks of itself (``assert``, ``AssertionError``, ``strict`` of ``zip``), since no input
tells these from their absence.
"""

from __future__ import annotations

import difflib
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation import mutators

Operator = tuple[type[cst.CSTNode], Callable[[Any], Iterable[cst.CSTNode]]]
OPERATORS: Sequence[Operator] = getattr(mutators, "mutation_operators", None) or mutators.MUTATION_OPERATORS
# As mutmut: a missing argument of these is a TypeError wherever they stand.
_LEFT_ALONE = frozenset({"len", "isinstance", "cast", "TypeVar"})


@dataclass(frozen=True)
class Mutant:
    """A source with one fault. ``number``: among all of its module; ``before`` and ``after``: the lines that differ."""

    number: int
    line: int
    before: str
    after: str
    source: str

    def diff(self) -> str:
        """Both sides, for people."""
        return "\n".join(
            f"    {sign} {line}" for sign, text in (("-", self.before), ("+", self.after)) for line in text.splitlines()
        )


class Faults:
    """All faults of a source."""

    def __init__(self, source: str) -> None:
        self.source = source
        wrapper = MetadataWrapper(cst.parse_module(source))
        visitor = _FaultVisitor()
        wrapper.visit(visitor)
        self._module, self._found = wrapper.module, visitor.found

    def __len__(self) -> int:
        return len(self._found)

    def mutant(self, number: int) -> Mutant | None:
        """With fault ``number``; ``None`` if that is no program, or the same one."""
        line, node, changed = self._found[number]
        text = _replaced(self._module, node, changed)
        if text == self.source or not _compiles(text):
            return None
        before, after = changed_lines(self.source, text)
        return Mutant(number, line, before, after, text)

    def sample(self, count: int | None, seed: str) -> list[Mutant]:
        """``count`` at random, always the same for a ``seed``, in the order of the text; ``None``: all."""
        order = list(range(len(self._found)))
        random.Random(seed).shuffle(order)
        chosen: dict[str, Mutant] = {}
        for number in order:
            if count is not None and len(chosen) >= count:
                break
            mutant = self.mutant(number)
            if mutant is not None:
                chosen.setdefault(mutant.source, mutant)
        return sorted(chosen.values(), key=lambda mutant: mutant.number)


def changed_lines(one: str, other: str) -> tuple[str, str]:
    """The lines of either source that the other lacks, without indentation."""
    lines = list(difflib.ndiff(one.splitlines(), other.splitlines()))
    before, after = ("\n".join(line[2:].strip() for line in lines if line.startswith(sign)) for sign in ("- ", "+ "))
    return before, after


def _compiles(source: str) -> bool:
    try:
        compile(source, "mutant", "exec")
    except SyntaxError:
        return False
    return True


def _replaced(module: cst.Module, old: cst.CSTNode, new: cst.CSTNode) -> str:
    changed = module.deep_replace(old, new)
    assert isinstance(changed, cst.Module)
    return changed.code


class _FaultVisitor(cst.CSTVisitor):
    """Collects (line, node, what it becomes)."""

    METADATA_DEPENDENCIES = (PositionProvider,)

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[int, cst.CSTNode, cst.CSTNode]] = []
        self._inside = 0  # of how many functions and classes

    def on_visit(self, node: cst.CSTNode) -> bool:
        if self._is_left_alone(node):
            return False
        for kind, operator in OPERATORS:
            if isinstance(node, kind):
                for changed in operator(node):
                    if not _changes_only_strict(node, changed):
                        self.found.append((self._line(node), node, changed))
        self._inside += isinstance(node, cst.FunctionDef | cst.ClassDef)
        return True

    def on_leave(self, original_node: cst.CSTNode) -> None:
        self._inside -= isinstance(original_node, cst.FunctionDef | cst.ClassDef) and not self._is_left_alone(
            original_node
        )

    def _line(self, node: cst.CSTNode) -> int:
        return int(self.get_metadata(PositionProvider, node).start.line)

    def _is_left_alone(self, node: cst.CSTNode) -> bool:
        match node:
            case cst.Annotation() | cst.Import() | cst.ImportFrom() | cst.Decorator() | cst.Assert():
                return True
            case cst.Raise(exc=cst.Call(func=cst.Name(value="AssertionError"))):
                return True
            case cst.Expr(value=cst.SimpleString() | cst.ConcatenatedString() | cst.Ellipsis()):
                return True
            case cst.If(test=cst.Name(value="TYPE_CHECKING")):
                return True
            case cst.ClassDef(bases=bases) if any(_name(base.value) == "Protocol" for base in bases):
                return True
            case cst.Call(func=cst.Name(value=name)) if name in _LEFT_ALONE:
                return True
            case cst.Arg(keyword=cst.Name(value="strict")):
                return True
            case cst.Assign(value=cst.Subscript() | cst.BinaryOperation(operator=cst.BitOr())) if not self._inside:
                return True  # a name for a type
        return False


def _name(node: cst.BaseExpression) -> str:
    return node.value if isinstance(node, cst.Name) else ""


def _changes_only_strict(node: cst.CSTNode, changed: cst.CSTNode) -> bool:
    if not (isinstance(node, cst.Call) and isinstance(changed, cst.Call) and _name(node.func) == "zip"):
        return False
    one, other = ([arg for arg in call.args if arg.keyword is None] for call in (node, changed))
    return len(one) == len(other) and all(map(lambda a, b: a is b, one, other))
