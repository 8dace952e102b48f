"""Long lists of cases, a part of which is enough in every run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def one_in(count: int, cases: Iterable[Any]) -> list[Any]:
    """Cases for ``parametrize``: one in ``count`` for every run, the others for ``make thorough``."""
    return [case if place % count == 0 else _thorough(case) for place, case in enumerate(cases)]


def _thorough(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.thorough)
