"""The page of a prediction: the lanes of its timeline, its figures, the whole in a real browser."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from e2e.report.html_report import (
    covered_share,
    host_seconds,
    memory_course,
    render_page,
    shown_points,
    timeline_lanes,
    write_report,
)
from e2e.report.tables import module_seconds, operator_rows
from e2e.step.execution_graph import CallInfo
from e2e.step.memory import ROLES, MemoryUsage, peak_memory
from e2e.step.operator_trace import OperatorCall
from tests.e2e.drawn_graphs import Drawing, together
from tests.e2e.toy_predictions import predict_ranks, predict_step, reduced, setting, step
from tests.web_pages import HOSTILE, drawn_page, found_in, read_page


def lanes(result, *ranks: int) -> dict[str, dict[str, float]]:
    """Seconds by kind of every lane."""
    found = timeline_lanes(result, ranks or (0,))
    return {
        name: {kind: float((ends - begins).sum()) for kind, (begins, ends) in lane.items() if (ends > begins).any()}
        for name, lane in found
    }


def test_lanes_show_the_path_the_phases_the_host_and_the_streams():
    result = predict_step(step(), setting(1.0, 1e-3))
    found = lanes(result)
    assert sum(found["critical path"].values()) == pytest.approx(result.prediction.critical_path_seconds)
    assert set(found["phases"]) == {"forward", "backward", "optimizer"}
    (stream,) = (lane for name, lane in found.items() if name.startswith("stream"))
    # Four kernels of a second in each of the simulated steps.
    assert stream == {"compute": pytest.approx(4.0 * result.timeline.iterations)}


def test_hosts_that_wait_and_collectives_that_wait_are_kinds_of_their_own():
    d = Drawing(3)
    d.calls[0] = CallInfo(0, "aten::mm", "forward", None, "layers.0")
    d.host(4, "T2", call=0)
    d.kernel("gemm", 10, call=0)
    d.synchronize(stream=7)
    assert {"host", "synchronisation"} == set(lanes(predict_ranks(together(d)), 3)["thread main"])
    result = predict_ranks(reduced((10.0, 16.0)))
    found = lanes(result, 0, 1)
    assert found["rank 0, stream 20"]["collective wait"] == pytest.approx(6 * result.timeline.iterations)
    assert "collective wait" not in found["rank 1, stream 20"]


def test_pixels_have_the_share_that_pieces_cover():
    edges = np.array([0.0, 1.0, 2.0, 3.0, 4.0])
    begins, ends = np.array([2.25, 0.5, 9.0]), np.array([2.5, 1.5, 10.0])
    assert covered_share(begins, ends, edges) == pytest.approx([0.5, 0.5, 0.25, 0.0])
    assert covered_share(np.array([-1.0]), np.array([10.0]), edges) == pytest.approx(1.0)


def test_operators_have_their_launches_times_and_limits():
    result = predict_step(step(), setting(1.0, 1e-3))
    rank = result.graph.ranks[0]
    rows = {row.name: row for row in operator_rows(rank, result.paths[0])}
    assert rows["aten::mm"].launches == 2 and rows["aten::mm"].device_seconds == pytest.approx(2.0)
    assert rows["aten::mm"].bound == "compute" and rows["aten::mm"].host_seconds > 0
    assert sum(row.path_seconds for row in rows.values()) == pytest.approx(result.prediction.critical_path_seconds)
    assert module_seconds(rank) == {}
    layers = {number: replace(call, module=f"h.{number}.mlp") for number, call in rank.calls.items()}
    assert module_seconds(replace(rank, calls=layers)) == {"h.*.mlp": pytest.approx(4.0)}


def test_operators_of_several_ranks_have_the_path_of_their_own_rank():
    """The step waits for rank 1 alone; of rank 0, were it shown, the kernel is what that rank waits for."""
    graph = reduced((10.0, 16.0))
    result = predict_ranks(graph)
    rank = graph.ranks[0]
    (across,) = (row for row in operator_rows(rank, result.path) if row.name == "gemm")
    (own,) = (row for row in operator_rows(rank, result.paths[0]) if row.name == "gemm")
    assert across.path_seconds == 0 and own.path_seconds == pytest.approx(10)
    text = read_page(render_page(result)).text
    assert "on its critical path" in text and "the critical path is that of this rank alone" in text
    assert "on the path" in text and "the step never waits for a rank with 0" in text


def test_memory_over_the_step_reaches_its_peak_and_no_more():
    usage = peak_memory(step())
    totals = [sum(moment.levels) for moment in usage.course]
    assert max(totals) == usage.peak_bytes
    assert dict(zip(ROLES, usage.course[totals.index(max(totals))].levels, strict=True)) == usage.breakdown
    result = predict_step(step(), setting(1.0, 1e-3))
    assert {moment.call for moment in result.memory[0].course} & host_seconds(result, 0).keys()
    times, levels = memory_course(result, 0)
    assert levels.sum(axis=1).max() == usage.peak_bytes and (np.diff(times) >= 0).all()
    assert "Memory in use over the step" in read_page(render_page(result)).text


def test_a_host_that_waits_before_it_begins_does_not_fill_the_chart_and_peaks_stay():
    """Its first call is half a second early: nothing changes until the step itself."""
    times, totals = np.array([-500.0, 0.0, 1.0, 2.0, 3.0]), np.array([5.0, 5.0, 9.0, 13.0, 6.0])
    assert shown_points(times, totals).tolist() == [1, 2, 3, 4]
    assert shown_points(times, np.full(5, 5.0)).tolist() == [0, 1, 2, 3, 4]
    many = np.linspace(0.0, 1.0, 10_000)
    totals = np.where(np.arange(10_000) == 5_555, 9.0, np.arange(10_000) % 7)
    shown = shown_points(many, totals)
    assert len(shown) < 500 and 5_555 in shown and shown[0] == 0 and shown[-1] == 9_999


def test_memory_that_no_course_is_known_of_is_told_at_its_peak():
    usage = {0: MemoryUsage(3 << 30, {"parameters": 2 << 30, "activations": 1 << 30}, -1, "")}
    read = read_page(render_page(predict_ranks(reduced((10.0, 16.0)), memory=usage)))
    assert "Memory in use over the step" not in read.text and "3 GiB" in read.text


def hostile_result():
    """Names of everything try to end the script or the attribute that they stand in."""
    trace = step()
    calls = tuple(replace(call, name=f"mine::{HOSTILE}", module=HOSTILE) for call in trace.calls)
    calls += (OperatorCall(9, f"own::{HOSTILE}", None, 0, calls[0].inputs, (), "forward"),)
    return predict_step(replace(trace, calls=calls, source=HOSTILE), setting(1.0, 1e-3))


def test_names_are_escaped_wherever_they_stand():
    result = hostile_result()
    result = replace(result, prediction=replace(result.prediction, warnings=[HOSTILE], notes=[HOSTILE]))
    read = read_page(render_page(result))
    assert read.count("b") == 0 and HOSTILE in read.text
    several = predict_ranks(replace(reduced((10.0, 16.0)), source=HOSTILE), memory={})
    collectives = [replace(each, kind=HOSTILE, source=HOSTILE) for each in several.prediction.collectives]
    read = read_page(render_page(replace(several, prediction=replace(several.prediction, collectives=collectives))))
    assert read.count("b") == 0 and read.text.count("</script><b") > 3


def test_the_page_in_a_browser(tmp_path: Path):
    """Hostile names run nothing, tables sort, a narrow window does not scroll sideways, the timeline has colours."""
    write_report(hostile_result(), tmp_path / "r.html")
    code = """(() => {
      const table = document.querySelector("#operators table");
      const column = (place) => [...table.tBodies[0].rows].map((row) => row.cells[place].textContent);
      const click = (place) => table.tHead.rows[0].cells[place].querySelector("button").click();
      const first = column(2);
      click(0);
      const names = column(0);
      click(2);
      const whole = document.documentElement;
      return [document.querySelectorAll("b").length, first, names, column(2), whole.scrollWidth - whole.clientWidth];
    })()"""
    bold, first, names, device, sideways = found_in(tmp_path / "r.html", code, 500)
    assert bold == 0 and sideways <= 1 and device == first and names == sorted(names, key=str.casefold)
    image = pytest.importorskip("matplotlib.image")
    drawn_page(tmp_path / "r.html", tmp_path / "page.png")
    pixels = image.imread(tmp_path / "page.png")[..., :3]
    assert 0.05 < float((np.abs(pixels - pixels[2, 2]).max(axis=2) > 0.05).mean()) < 0.6
    green = np.abs(pixels - np.array([0x22, 0x88, 0x33]) / 255).max(axis=2) < 0.03
    assert green.sum() > 3000  # kernels limited by arithmetic
