"""Texts of ``--routing``."""

from __future__ import annotations

import pytest

from costmodel.base.errors import InputError
from e2e.step.options import parse_routing


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "'' is none of balanced, power-law=1.2, drawn=1, capacity=1.25"),
        ("uneven", "'uneven' is none of"),
        ("power-law", "'power-law' is none of"),
        ("capacity=wide", "capacity=wide is no number"),
        ("power-law=nan", "power-law must be more than 0"),
        ("capacity=0", "capacity must be more than 0"),
        ("power-law=1.2,power-law=1.3", "power-law is given twice"),
    ],
)
def test_other_texts_are_refused(text, told):
    with pytest.raises(InputError, match=f"--routing .*{told}"):
        parse_routing(text)
