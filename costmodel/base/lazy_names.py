"""Lazy imports of a package's public names (PEP 562)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def lazy_names(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` for ``package``. ``homes``: mapping from name to defining module.

    ``import package`` then loads none of those modules, hence no framework. Any other name is an ``AttributeError``.
    """

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        found = getattr(import_module(homes[name]), name)
        setattr(sys.modules[package], name, found)  # looked up only once
        return found

    def names() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes})

    return get, names
