"""Patches of libraries as soon as a script has imported them: importing them first would take seconds."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

# Function of an imported module that gives (owner, attribute, replacement) of each patch.
Patches = Callable[[Any], Iterable[tuple[Any, str, Any]]]


@contextmanager
def patched_imports(patches: Mapping[str, Patches]) -> Iterator[None]:
    """Context in which the module of each name is patched once it is there: at once, or when it has been imported.

    A package has been imported when all that it imports itself has been, so name the package if the patches reach
    several of its modules.
    """
    with ExitStack() as stack:

        def change(module: ModuleType) -> None:
            for target, attribute, value in patches[module.__name__](module):
                stack.enter_context(patch.object(target, attribute, value))

        finder = _Finder(set(patches) - set(sys.modules), change)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        for name in set(patches) & set(sys.modules):
            change(sys.modules[name])
        yield


class _Finder(importlib.abc.MetaPathFinder):
    """Finder, asked first, of the modules called ``names``; ``change`` is called with each that has been imported."""

    def __init__(self, names: set[str], change: Callable[[ModuleType], None]) -> None:
        self._names = names
        self._change = change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._names:
            return None
        self._names.discard(name)  # while others are asked, who may wait for the same module
        try:
            others = (finder for finder in sys.meta_path if finder is not self)
            spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        finally:
            self._names.add(name)  # a program may only look whether it is there
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def run(module: ModuleType) -> None:
            self._names.discard(name)
            execute(module)
            self._change(module)

        spec.loader.exec_module = run  # type: ignore[method-assign]
        return spec
