"""Progress callback: takes one line of text."""

from __future__ import annotations

from collections.abc import Callable

Say = Callable[[str], None]
