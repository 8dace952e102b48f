from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.base.units import UNITS, format_quantity, parse_quantity, whole_number


@pytest.mark.parametrize(
    ("text", "unit", "value"),
    [
        ("160 GFLOP/s", "FLOP/s", 160e9),
        ("48 KiB", "B", 48 * 1024),
        ("1 kB", "B", 1000),
        ("1.2us", "s", 1.2e-6),
        ("0 s", "s", 0),
        ("3e2 MB/s", "B/s", 3e8),
    ],
)
def test_a_quantity_is_number_and_unit(text, unit, value):
    assert parse_quantity(text, unit) == pytest.approx(value)


@pytest.mark.parametrize(
    ("text", "unit", "message"),
    [
        (160e9, "FLOP/s", "no unit"),
        ("160", "FLOP/s", "not a quantity"),
        ("160 GB/s", "FLOP/s", "not in FLOP/s"),
        ("-1 s", "s", "not a quantity"),
        ("1 ks", "s", "not in s"),
        ("1e999 s", "s", "not finite"),
        (True, "B", "no unit"),
    ],
)
def test_anything_else_is_refused(text, unit, message):
    with pytest.raises(ValueError, match=message):
        parse_quantity(text, unit)


@settings(max_examples=60, deadline=None)
@given(value=st.floats(1e-10, 1e17), unit=st.sampled_from(sorted(UNITS)))
def test_formatting_keeps_four_digits(value, unit):
    assert parse_quantity(format_quantity(value, unit), unit) == pytest.approx(value, rel=1e-3)


def test_capacities_are_exact():
    assert format_quantity(48 * 1024, "B") == "48 KiB"
    assert format_quantity(1000, "B") == "1000 B"


@pytest.mark.parametrize(("text", "number"), [("0", 0), ("007", 7), (" 64 ", 64), ("9" * 18, 10**18 - 1)])
def test_whole_numbers(text, number):
    assert whole_number(text) == number


@pytest.mark.parametrize("text", ["", "-1", "+1", "1.0", "1e3", "1_000", "0x10", "\u00b2", "\u0663", "9" * 5000, "1 2"])
def test_what_is_no_whole_number(text):
    assert whole_number(text) is None
