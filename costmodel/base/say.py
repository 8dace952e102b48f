"""How long work tells what it is doing: a function that takes one line."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]
