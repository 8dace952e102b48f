"""Patches of libraries that a program may import later: applied as soon as the library has been imported, so that none
is imported for the patches' sake.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any
from unittest.mock import patch

# Targets, names and values to set, given the imported module.
Patches = Callable[[Any], Iterable[tuple[Any, str, Any]]]


class _Late(importlib.abc.MetaPathFinder):
    """Finder, asked first, of modules that are patched when they have been executed."""

    def __init__(self, patches: Mapping[str, Patches], stack: ExitStack) -> None:
        self._patches = dict(patches)
        self._stack = stack

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if name not in self._patches:
            return None
        patches = self._patches.pop(name)
        others = (finder for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is None or spec.loader is None:
            self._patches[name] = patches
            return None
        execute = spec.loader.exec_module

        def executed(module: ModuleType) -> None:
            execute(module)
            self.apply(module, patches)

        spec.loader.exec_module = executed  # type: ignore[method-assign]
        return spec

    def apply(self, module: ModuleType, patches: Patches) -> None:
        """Apply the patches of ``module``."""
        for target, name, value in patches(module):
            self._stack.enter_context(patch.object(target, name, value))


@contextmanager
def late_patches(patches: Mapping[str, Patches]) -> Iterator[None]:
    """Context in which each module of ``patches`` is patched once it has been imported, or at once if it has been."""
    with ExitStack() as stack:
        finder = _Late({name: each for name, each in patches.items() if name not in sys.modules}, stack)
        for name, each in patches.items():
            if name in sys.modules:
                finder.apply(sys.modules[name], each)
        sys.meta_path.insert(0, finder)
        stack.callback(sys.meta_path.remove, finder)
        yield
