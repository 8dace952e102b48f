"""Periods of work that a program does not do in every step, read from the conditions around its lines.

``if step % 16 == 0`` around a line, ``if step % 16: continue`` before it, and names of such conditions
(``penalised = step % 16 == 0``), in the functions that run.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import CodeType, FrameType
from typing import Any
from unittest.mock import patch

import torch

from e2e.capture.script_lines import script_file, script_tree

_BLOCKS = ("body", "orelse", "finalbody")


class Differentiations:
    """Collector of the periods of the backward passes and gradients (``torch.autograd.grad``) of a step."""

    def __init__(self) -> None:
        self._periods: set[int] = set()

    def taken(self) -> frozenset[int]:
        """Return the periods since the last call, in steps; 1 for what no condition is around."""
        found, self._periods = frozenset(self._periods), set()
        return found

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Context in which they are noticed."""

        def noted(differentiate: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **kwargs: Any) -> Any:
                if torch._C._current_graph_task_id() == -1:  # not inside a backward pass
                    self._periods.add(period(sys._getframe(1)) or 1)
                return differentiate(*args, **kwargs)

            return call

        backward, grad = (noted(each) for each in (torch.autograd.backward, torch.autograd.grad))
        with patch.object(torch.autograd, "backward", backward), patch.object(torch.autograd, "grad", grad):
            yield


def period(frame: FrameType | None) -> int | None:
    """Return every how many steps ``frame`` runs: the divisor of the nearest condition ``step % PERIOD == 0`` on which
    its line depends, or a line that called it; None without one.
    """
    while frame is not None:
        if script_file(frame.f_code.co_filename):
            for divisor in _divisors(frame.f_code.co_filename, frame.f_lineno):
                value = _value(divisor, frame)
                if value is not None and value > 1:
                    return value
        frame = frame.f_back
    return None


@cache
def _divisors(file: str, line: int) -> tuple[CodeType, ...]:
    """Return the divisors in conditions on which ``line`` depends, innermost first."""
    tree = script_tree(file)
    tests = sorted(_conditions(tree, line), key=lambda test: -test.lineno)
    named = _named_conditions(tree, line)
    found = [part for test in tests for each in ast.walk(test) for part in (each, *_of_name(each, named))]
    divisors = [part.right for part in found if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod)]
    return tuple(compile(ast.Expression(each), file, "eval") for each in divisors if not _calls(each))


def _conditions(tree: ast.AST, line: int) -> Iterator[ast.expr]:
    """Yield the conditions under which ``line`` runs: those of its blocks, and those that end them before it."""
    for node in ast.walk(tree):
        for block in (getattr(node, name, None) for name in _BLOCKS):
            if not isinstance(block, list) or not block or not block[0].lineno <= line <= (block[-1].end_lineno or 0):
                continue
            if isinstance(node, ast.If) and block is node.body:
                yield node.test
            guards = (each for each in block if isinstance(each, ast.If) and (each.end_lineno or 0) < line)
            yield from (each.test for each in guards if _leaves(each) and _is_unless(each.test))


def _leaves(guard: ast.If) -> bool:
    return isinstance(guard.body[-1], (ast.Continue, ast.Return)) and not guard.orelse


def _is_unless(test: ast.expr) -> bool:
    """True for ``step % PERIOD`` and ``step % PERIOD != 0``."""
    if isinstance(test, ast.Compare) and len(test.ops) == 1 and isinstance(test.ops[0], ast.NotEq):
        test = test.left
    return isinstance(test, ast.BinOp) and isinstance(test.op, ast.Mod)


def _named_conditions(tree: ast.AST, line: int) -> dict[str, ast.expr]:
    """Return the conditions that the innermost function around ``line`` names."""
    functions = (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))
    around = [node for node in functions if node.lineno <= line <= (node.end_lineno or 0)]
    scope = max(around, key=lambda node: node.lineno, default=tree)
    assigned = (node for node in ast.walk(scope) if isinstance(node, ast.Assign) and node.lineno < line)
    return {
        node.targets[0].id: node.value
        for node in assigned
        if isinstance(node.targets[0], ast.Name) and isinstance(node.value, (ast.Compare, ast.BoolOp, ast.UnaryOp))
    }


def _of_name(part: ast.AST, named: dict[str, ast.expr]) -> Iterator[ast.AST]:
    if isinstance(part, ast.Name) and part.id in named:
        yield from ast.walk(named[part.id])


def _calls(expression: ast.expr) -> bool:
    return any(isinstance(part, (ast.Call, ast.Await, ast.NamedExpr)) for part in ast.walk(expression))


def _value(expression: CodeType, frame: FrameType) -> int | None:
    try:
        found = eval(expression, frame.f_globals, frame.f_locals)
    except Exception:
        return None
    return found if isinstance(found, int) else None
