"""Libraries that a process loads for the forks it is about to make."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterable


def load_modules(names: Iterable[str]) -> None:
    """Imports what of ``names`` can be imported by itself, without warnings; parts of libraries that are loaded in a
    way of their own are passed over.
    """
    for name in names:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                importlib.import_module(name)
            except Exception:
                continue
