"""Pages by templates, and charts: nothing breaks out of markup, labels have room, files are reproducible."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import pytest
from jinja2 import UndefinedError

from costmodel.base.errors import InputError, OutputError
from costmodel.pages import document
from costmodel.pages.charts import check_picture, inline_chart, picture, place_labels, set_logarithmic, set_tip
from costmodel.pages.document import render, write_page
from tests.web_pages import HOSTILE, read_page

PAGE = """\
{% extends "costmodel.pages/page.html" %}
{% from "costmodel.pages/macros.html" import section, table, facts, legend, bars, whole with context %}
{% block sections %}
{% call section("one", name) %}
{{ table([name, "n", "share"], [(name, "1,234 ms", "12.3%"), (name, "?", "50.0%")]) }}
{{ facts({name: name}) }}{{ legend({name: "#000"}) }}{{ chart }}
{{ bars([(name, {name: 1.0}, name)], {name: "#000"}) }}{{ whole({name: 1.0}, {name: "#000"}, name) }}
{% endcall %}
{% endblock %}
"""


@pytest.fixture
def template(monkeypatch) -> str:
    sources = document._source
    monkeypatch.setattr(document, "_source", lambda name: PAGE if name == "toy/page.html" else sources(name))
    return "toy/page.html"


def test_nothing_breaks_out_of_text_attributes_or_charts(template: str):
    def draw(axes):
        (dot,) = axes.plot(1.0, 1.0, "o", label=HOSTILE)
        set_tip(dot, HOSTILE)
        axes.legend()

    page = read_page(render(template, title=HOSTILE, name=HOSTILE, chart=inline_chart(HOSTILE, draw)))
    assert page.count("b") == 0 and page.text.count("</script><b onmouseover=") >= 12
    assert page.count("a", href="#one") == 1 and page.count("section", id="one") == 1


def test_columns_of_numbers_and_shares_are_marked(template: str):
    page = read_page(render(template, title="", name="a", chart=""))
    assert page.count("th", class_="n") == 2 and page.count("td", class_="n") == 3
    assert page.count("td", style="--share:1.0") == 1 and page.count("td", style="--share:0.246") == 1


def test_what_a_template_misses_is_an_error(template: str):
    with pytest.raises(UndefinedError, match="chart"):
        render(template, title="", name="")


def test_a_name_that_utf8_cannot_hold_is_spelled_out(template: str):
    assert "lone \\udc80 surrogate" in render(template, title="lone \udc80 surrogate", name="", chart="")


def test_a_page_that_cannot_be_written_is_named(tmp_path: Path):
    with pytest.raises(OutputError, match=r"missing/page.html: cannot be written"):
        write_page(tmp_path / "missing" / "page.html", "")


def test_labels_do_not_overlap_each_other_or_markers():
    """A dozen labels around points that lie close: those that find room leave the axes neither."""
    places = [(1.0 + 0.15 * number, 1.0 + 0.02 * number) for number in range(12)]

    def draw(axes):
        axes.plot(*zip(*places, strict=True), "o")
        placed = place_labels(axes, [(f"dp={number},$tp$=8", point) for number, point in enumerate(places)])
        axes.figure.draw_without_rendering()
        boxes = [note.get_window_extent() for note in placed]
        assert len(placed) >= 6
        assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))
        assert not any(box.contains(*axes.transData.transform(point)) for box in boxes for point in places)

    assert "dp=0,$tp$=8" in inline_chart("close", draw)


def test_a_chart_of_a_page_is_small_and_follows_its_colours():
    def draw(axes):
        set_logarithmic(axes, "xy")
        axes.plot([1, 1000], [1, 1e6])
        axes.set(xlabel="x")

    chart = inline_chart("toy", draw)
    assert len(chart) < 20_000 and "var(--ink)" in chart and ">10k</text>" in chart and "\u4e2d" not in chart
    assert "\u4e2d" in inline_chart("toy", lambda axes: axes.set_title("\u4e2d"))  # a letter that our font lacks


def drawn(path: Path) -> bytes:
    with picture(path, 3, 2, columns=2, sharey=True) as (left, right):
        left.plot([1, 2], [3, 4])
        right.set(xlabel="flop/B")
    return path.read_bytes()


def test_pictures_are_refused_early_and_the_same_for_the_same_numbers(tmp_path: Path):
    with pytest.raises(InputError, match=r"a.gif: a plot is one of .svg, .png, .pdf"):
        check_picture(Path("a.gif"), "--picture")
    check_picture(tmp_path / "a.svg", "--picture")
    first, second = drawn(tmp_path / "a.svg"), drawn(tmp_path / "b.svg")
    assert first == second and b"</svg>" in first and len(first) < 60_000
    assert drawn(tmp_path / "c.png").startswith(b"\x89PNG")
    with pytest.raises(OutputError, match="missing/a.svg: cannot be written: No such file"):
        drawn(tmp_path / "missing" / "a.svg")
