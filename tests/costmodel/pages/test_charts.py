"""Ticks at round values, labels that leave each other room, markup that nothing breaks out of."""

from __future__ import annotations

import json
import random
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from costmodel.base.errors import OutputError
from costmodel.pages.charts import (
    Axis,
    Chart,
    around,
    bytes_text,
    linear_ticks,
    logarithmic_ticks,
    plain_number,
    seconds_text,
    stacked_bar,
    stacked_rows,
)
from costmodel.pages.document import BarCell, Html, NumberCell, document, embedded_data, section, table, tag, write_page
from tests.web_pages import HOSTILE, read_page


def test_ticks_are_round_and_inside():
    assert linear_ticks(0.0, 10.0, 5) == [0, 2, 4, 6, 8, 10]
    assert linear_ticks(0.31, 0.52, 5) == pytest.approx([0.35, 0.4, 0.45, 0.5])
    assert logarithmic_ticks(3.0, 250.0) == [5, 10, 20, 50, 100, 200]
    assert logarithmic_ticks(1e-6, 1.0) == pytest.approx([1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0])


@given(st.floats(-1e12, 1e12), st.floats(1e-9, 1e12), st.integers(2, 12))
def test_ticks_stay_inside_and_few(low: float, span: float, count: int):
    high = low + span
    if not high > low:
        return
    ticks = linear_ticks(low, high, count)
    assert len(ticks) <= count + 2
    assert all(low - 1e-6 * span <= tick <= high + 1e-6 * span for tick in ticks)


def test_values_have_units_that_suit_them():
    assert [seconds_text(value) for value in (0, 2.5, 1.234e-3, 9e-6)] == ["0 s", "2.5 s", "1.23 ms", "9 µs"]
    assert bytes_text(1.5 * 2**30) == "1.5 GiB" and plain_number(25600) == "25.6k"
    assert Axis("", 1.0, 100.0, logarithmic=True).place(10.0) == pytest.approx(0.5)


def test_an_axis_of_one_value_is_an_axis():
    for kind in (False, True):
        low, high = around([5.0], logarithmic=kind)
        assert low < 5.0 < high


@pytest.mark.parametrize("seed", range(20))
def test_labels_overlap_neither_each_other_nor_points(seed: int):
    chosen = random.Random(seed)
    chart = Chart(Axis("x", 0.0, 10.0), Axis("y", 0.0, 10.0))
    points = [(chosen.uniform(0, 10), chosen.uniform(0, 10)) for _ in range(15)]
    chart.points([(x, y, "") for x, y in points], "#000")
    for number, (x, y) in enumerate(points):
        chart.label(x, y, f"dp={number},tp={number}")
    placed = chart.placed()
    assert len(placed) >= 8  # most find room
    for (_, one, _), (_, other, _) in combinations(placed, 2):
        assert not one.meets(other)
    for _, box, _ in placed:
        assert box.left >= 0 and box.right <= chart.width
        assert not any(box.left < x < box.right and box.top < y < box.bottom for x, y in (chart.at(*p) for p in points))


def test_equal_labels_at_different_points_all_stand_beside_their_own():
    chart = Chart(Axis("x", 0.0, 10.0), Axis("y", 0.0, 10.0))
    for x in (1.0, 9.0):
        chart.label(x, 5.0, "fsdp=8")
    (_, left, _), (_, right, _) = chart.placed()
    assert left.right < chart.at(4.0, 5.0)[0] and right.left > chart.at(6.0, 5.0)[0]
    lines = [text for text in str(chart.svg("two")).split("<text")[1:] if "fsdp=8" in text]
    assert len(lines) == 2


def test_nothing_breaks_out_of_text_attributes_or_data():
    body = [
        section(HOSTILE, tag("p", HOSTILE, title=HOSTILE), identifier="one"),
        table((HOSTILE, "n"), [(HOSTILE, NumberCell("1", 1.0)), (HOSTILE, BarCell(0.5))]),
        stacked_bar({HOSTILE: 1.0}, {HOSTILE: "#000"}, {HOSTILE: HOSTILE}, HOSTILE),
        stacked_rows([(HOSTILE, {"a": 1.0})], {"a": "#000"}, Axis(HOSTILE, 0.0, 1.0)),
        embedded_data("data", {HOSTILE: [HOSTILE, "\u2028"]}),
    ]
    page = read_page(document(HOSTILE, body))
    assert page.count("b") == 0 and page.data == {"data": {HOSTILE: [HOSTILE, "\u2028"]}}
    assert page.text.count("</script><b onmouseover=") >= 6


def test_a_name_that_utf8_cannot_hold_is_spelled_out(tmp_path):
    write_page(tmp_path / "page.html", document("odd", [tag("p", "lone \udc80 surrogate")]))
    assert "lone \\udc80 surrogate" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_markup_is_put_in_as_it_is_and_attributes_may_be_absent():
    assert tag("p", Html("<i>x</i>"), class_=None, hidden=True) == "<p hidden><i>x</i></p>"
    assert tag("path", stroke_width=1.23456) == '<path stroke-width="1.23"></path>'
    assert json.loads(str(embedded_data("d", [1])).partition(">")[2].partition("<")[0]) == [1]


def test_a_page_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(OutputError, match=r"missing/page.html: cannot be written"):
        write_page(tmp_path / "missing" / "page.html", document("title", []))
