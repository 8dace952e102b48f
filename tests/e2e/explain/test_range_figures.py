"""What parts of a step that a script named cost, in figures, tables, timelines."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from e2e.explain.breakdowns import range_figures
from e2e.explain.critical_path import critical_path
from e2e.report.html_report import render_page
from e2e.report.text_report import render
from e2e.report.timeline_export import trace_events
from e2e.simulate.simulator import simulate
from e2e.step.execution_graph import Await, CallInfo, ExecutionGraph, Signal
from e2e.step.operator_trace import NamedRange, NamedRanges
from tests.e2e.drawn_graphs import Drawing, together
from tests.e2e.timeline_checks import faults
from tests.e2e.toy_predictions import predict_ranks, predict_step, setting, step
from tests.web_pages import read_page


def drawn() -> ExecutionGraph:
    """outer(inner(a), b), c; then autograd runs a's backward inside of "back" on its own thread. The GPU is behind."""
    d = Drawing()
    d.calls = {
        0: CallInfo(0, "aten::a", "forward"),
        1: CallInfo(1, "aten::b", "forward"),
        2: CallInfo(2, "aten::c", "forward"),
        3: CallInfo(3, "ABackward", "backward"),
        4: CallInfo(4, "aten::a_backward", "backward", 3),
    }
    d.host(1, "T1", call=0)
    d.kernel("a", 10, call=0)
    d.host(1, "T1", call=1)
    d.kernel("b", 20, call=1)
    d.kernel("c", 40, call=2)
    d.add(Signal(0), Await(1))
    d.add(Await(0), thread="autograd")
    d.host(1, "T1", thread="autograd", call=3)
    d.kernel("a_backward", 80, thread="autograd", call=4)
    d.add(Signal(1), thread="autograd")
    graph = together(d)
    entered = {
        10: NamedRange(10, "outer"), 11: NamedRange(11, "inner", 10), 12: NamedRange(12, "back"),
    }  # fmt: skip
    ranges = NamedRanges(entered, {0: 11, 1: 10, 3: 12}, {3: 11})
    return replace(graph, ranks=(replace(graph.ranks[0], ranges=ranges),))


def test_figures_by_name():
    graph = drawn()
    rank = graph.ranks[0]
    rows = {row.name: row for row in range_figures(rank, critical_path(graph, simulate(graph)))}
    assert set(rows) == {"outer", "inner", "back"}
    inner, outer, back = rows["inner"], rows["outer"], rows["back"]
    assert (inner.forward_seconds, inner.backward_seconds, inner.other_seconds) == (10, 80, 0)
    assert (outer.forward_seconds, outer.backward_seconds) == (30, 80)
    assert (back.forward_seconds, back.backward_seconds) == (0, 80)
    assert (inner.launches, outer.launches, back.launches) == (2, 3, 1)
    assert (inner.host_seconds, outer.host_seconds, back.host_seconds) == (4, 6, 2)
    # The path: a's host piece and launch (2 s), then kernel after kernel; the whole of c, 40 s, is in none.
    assert inner.path_seconds == pytest.approx(2 + 10 + 80) and outer.path_seconds == pytest.approx(2 + 30 + 80)


def test_a_rank_without_names_has_no_figures():
    result = predict_step(step(), setting(1.0, 1e-3))
    assert result.prediction.ranges == () and "Named ranges" not in read_page(render_page(result)).text


def test_ranges_enclose_what_is_in_them_on_threads_and_streams():
    graph = drawn()
    timeline = simulate(graph)
    events = list(trace_events(graph, timeline))
    assert faults(events) == []
    names = {(event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"}
    found = {
        (names[event["pid"], event["tid"]], event["name"]): (event["ts"] / 1e6, (event["ts"] + event["dur"]) / 1e6)
        for event in events
        if event.get("cat") == "range"
    }
    assert found["main", "inner"] == pytest.approx((0, 2)) and found["main", "outer"] == pytest.approx((0, 4))
    # c is launched in none; the main thread waits for autograd in "back".
    assert found["main", "back"] == pytest.approx((5, 7))
    assert found["autograd", "back"] == found["autograd", "inner (backward)"] == pytest.approx((5, 7))
    stream = "ranges on stream 7"
    assert found[stream, "inner"] == pytest.approx((2, 12)) and found[stream, "outer"] == pytest.approx((2, 32))
    assert found[stream, "back"] == found[stream, "outer (backward)"] == pytest.approx((72, 152))


def test_tables_and_page_show_them(capsys):
    graph = drawn()
    result = predict_ranks(graph)
    entered = {key: replace(each, name=f"[b]<{each.name}>") for key, each in graph.ranks[0].ranges.entered.items()}
    named = replace(graph, ranks=(replace(graph.ranks[0], ranges=replace(graph.ranks[0].ranges, entered=entered)),))
    result = predict_ranks(named)
    render(result.prediction)
    printed = capsys.readouterr().out
    written = read_page(render_page(result)).text
    for text in (printed, written):
        assert "[b]<inner>" in text and "10000.000" in text and "80000.000" in text
        assert "a backward operator counts for the ranges of its forward operator" in text
    (row,) = (row for row in json.loads(json.dumps(result.prediction.to_json()))["ranges"] if "back" in row["name"])
    assert row["backward_seconds"] == 80 and row["entered"] == 1
