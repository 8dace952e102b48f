"""The page of a prediction: its timeline as data, its scripts in Node, the whole in a real browser."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from e2e.explain.breakdowns import phase_seconds, phase_spans
from e2e.report.html_report import changing, host_seconds, page, write_report
from e2e.report.step_tracks import KINDS, timeline_data
from e2e.report.tables import module_seconds, operator_rows
from e2e.step.execution_graph import CallInfo
from e2e.step.memory import ROLES, MemoryMoment, MemoryUsage, peak_memory
from e2e.step.operator_trace import OperatorCall
from tests.e2e.drawn_graphs import Drawing, together
from tests.e2e.toy_predictions import predict_ranks, predict_step, reduced, setting, step
from tests.web_pages import HOSTILE, drawn_page, found_in, node, read_page

SCRIPT = Path(__file__).parents[3] / "e2e" / "report" / "timeline.js"


def slices(document) -> dict[tuple[str, str], list[tuple[int, int, str, str]]]:
    """(group, track) -> begin, end, name, kind, as the script reads them."""
    found = {}
    for track in document["tracks"]:
        begins = np.cumsum(track["starts"]).tolist()
        found[track["group"], track["name"]] = [
            (begin, begin + length, document["names"][name], document["kinds"][kind][0])
            for begin, length, name, kind in zip(begins, track["lengths"], track["names"], track["kinds"], strict=True)
        ]
    return found


def test_tracks_show_the_step_that_is_explained():
    """Ten seconds of kernels each second step: one step of the window, in nanoseconds from its start."""
    result = predict_step(step(), setting(1.0, 1e-3))
    found = timeline_data(result)
    tracks = slices(found.document)
    length = found.document["length"]
    assert length == pytest.approx(result.prediction.critical_path_seconds * 1e9, abs=2)
    stream = next(rows for (_, name), rows in tracks.items() if name.startswith("stream"))
    assert sum(end - begin for begin, end, *_ in stream) == pytest.approx(4e9, abs=10)
    assert {kind for *_, kind in stream} == {KINDS["compute"][0]}
    assert [name for _, _, name, _ in tracks["GPU and host", "phases"]] == ["forward", "backward", "optimizer"]
    path = tracks["step", "critical path"]
    assert path[0][0] == 0 and path[-1][1] == length
    for rows in tracks.values():
        assert all(0 <= begin <= end <= length for begin, end, *_ in rows)
        assert all(before[1] <= after[0] + 1 for before, after in pairwise(rows))


def test_host_pieces_of_a_call_are_one_slice_and_kernels_know_their_launch():
    d = Drawing(3)
    d.calls[0] = CallInfo(0, "aten::mm", "forward", None, "layers.0")
    d.host(4, "T2", call=0)
    d.kernel("gemm", 10, call=0)
    d.host(2, "T3", call=0)
    d.synchronize(stream=7)
    result = predict_ranks(together(d))
    document = timeline_data(result).document
    tracks = {track["name"]: track for track in document["tracks"]}
    host, stream = tracks["thread main"], tracks["stream 7"]
    names = [document["names"][name] for name in host["names"]]
    assert names.count("aten::mm") == 1 and "synchronize stream 7" in names
    place = names.index("aten::mm")
    assert host["lengths"][place] == pytest.approx(7e9, abs=2)  # T2, launch and T3
    assert stream["launchTrack"] == [document["tracks"].index(host)] and stream["launchSlice"] == [place]
    assert stream["critical"] == [1]


def test_waits_of_ranks_are_slices_of_their_own():
    found = timeline_data(predict_ranks(reduced((10.0, 16.0))))
    assert set(found.ranks) == {0, 1}
    waits = [row for rows in slices(found.document).values() for row in rows if row[3] == KINDS["collective wait"][0]]
    assert any(end - begin == pytest.approx(6e9, abs=2) for begin, end, *_ in waits)


def test_ranks_are_left_out_where_there_are_too_many_slices(monkeypatch):
    monkeypatch.setattr("e2e.report.step_tracks.MOST_SLICES", 1)
    result = predict_ranks(reduced((10.0, 16.0)))
    assert timeline_data(result).ranks == (1,)  # the one that computes longest stays
    assert "1 of 2 ranks are shown" in read_page(page(result)).text


def test_phase_spans_are_what_phase_seconds_sum():
    result = predict_step(step(), setting(1.0, 1e-3))
    rank = result.graph.ranks[0]
    spans = phase_spans(rank, result.timeline, result.iteration)
    low, high = result.timeline.window(result.iteration)
    assert spans[0][1] == low and spans[-1][2] == high
    assert all(one[2] == other[1] and one[0] != other[0] for one, other in pairwise(spans))
    sums = phase_seconds(rank, result.timeline, result.iteration)
    for phase in ("forward", "backward", "optimizer"):
        assert getattr(sums, phase) == pytest.approx(sum(end - begin for name, begin, end in spans if name == phase))


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
    text = read_page(page(result)).text
    assert "on its critical path" in text and "the critical path is that of this rank alone" in text
    assert "on the path" in text and "the step never waits for a rank with 0" in text
    assert "on the critical path" in read_page(page(predict_step(step(), setting(1.0, 1e-3)))).text


def test_memory_over_the_step_reaches_its_peak_and_no_more():
    usage = peak_memory(step())
    levels = [sum(moment.levels) for moment in usage.course]
    assert max(levels) == usage.peak_bytes
    fullest = usage.course[levels.index(max(levels))]
    assert dict(zip(ROLES, fullest.levels, strict=True)) == usage.breakdown
    result = predict_step(step(), setting(1.0, 1e-3))
    assert result.memory[0].course
    times = host_seconds(result, 0)
    assert {moment.call for moment in result.memory[0].course} & times.keys()
    assert "Memory in use over the step" in read_page(page(result)).text


def hostile_result():
    """Names of everything try to end the script or the attribute that they stand in."""
    trace = step()
    calls = tuple(replace(call, name=f"mine::{HOSTILE}", module=HOSTILE) for call in trace.calls)
    calls += (OperatorCall(9, f"own::{HOSTILE}", None, 0, calls[0].inputs, (), "forward"),)
    return predict_step(replace(trace, calls=calls, source=HOSTILE), setting(1.0, 1e-3))


def test_names_are_escaped_wherever_they_stand():
    result = hostile_result()
    result = replace(result, prediction=replace(result.prediction, warnings=[HOSTILE], notes=[HOSTILE]))
    read = read_page(page(result))
    assert read.count("b") == 0 and HOSTILE in read.text
    assert any(HOSTILE in name for name in read.data["timeline-data"]["names"])
    several = predict_ranks(replace(reduced((10.0, 16.0)), source=HOSTILE), memory={})
    collectives = [replace(each, kind=HOSTILE, source=HOSTILE) for each in several.prediction.collectives]
    read = read_page(page(replace(several, prediction=replace(several.prediction, collectives=collectives))))
    assert read.count("b") == 0 and read.text.count("</script><b") > 3


def test_memory_that_no_course_is_known_of_is_told_at_its_peak():
    usage = {0: MemoryUsage(3 << 30, {"parameters": 2 << 30, "activations": 1 << 30}, -1, "")}
    read = read_page(page(predict_ranks(reduced((10.0, 16.0)), memory=usage)))
    assert "Memory in use over the step" not in read.text and "3 GiB" in read.text


# --- scripts ------------------------------------------------------------------------------------


def in_node(code: str):
    """What ``code`` leaves in ``answer``, after the functions of the timeline."""
    functions = SCRIPT.read_text(encoding="utf-8").partition("const RULER")[0]
    whole = f"{functions}\nlet answer;\n{code}\nconsole.log(JSON.stringify(answer));"
    done = subprocess.run([node(), "-"], input=whole, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_hundred_thousand_slices_are_drawn_by_pixels():
    """The whole of them costs no more columns than pixels; a part shows every slice that is wide enough."""
    found = in_node("""
        const many = 100000;
        const data = timelineOf({tracks: [{starts: Array(many).fill(10), lengths: Array(many).fill(7), names: []}]});
        const track = data.tracks[0];
        const all = columns(track, 0, many * 10 + 10, 800 / (many * 10 + 10));
        const near = columns(track, 5000, 5100, 8);
        answer = [all.length, all.reduce((sum, each) => sum + each[3], 0), near, track.begin[many - 1]];
    """)
    assert 700 <= found[0] <= 801 and found[1] == 100000 and found[3] == 1_000_000
    # Slices begin at 10, 20 ...: ten of them lie between 5,000 and 5,100, seven of ten nanoseconds each.
    assert [(left, width, many) for left, width, _, many in found[2]] == [(80 * i, 56, 1) for i in range(10)]


def test_a_slice_that_reaches_into_the_view_is_seen_and_one_that_ends_before_it_is_not():
    found = in_node("""
        const data = timelineOf({tracks: [{starts: [0, 100, 100], lengths: [50, 100, 1], names: []}]});
        const track = data.tracks[0];
        answer = [firstAfter(track, 50), columns(track, 150, 160, 10), columns(track, 60, 90, 10)];
    """)
    assert found == [1, [[-500, 1000, 1, 1]], []]


# --- a browser ----------------------------------------------------------------------------------

# Of the canvas: how many pixels are drawn, how many colours; slices that a tap finds.
CANVAS = """(() => {
  const canvas = document.querySelector("#timeline-view canvas");
  const look = () => {
    const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
    const colours = new Set();
    let drawn = 0;
    for (let i = 0; i < pixels.length; i += 4) {
      if (pixels[i + 3] > 0) { drawn += 1; colours.add(`${pixels[i]},${pixels[i + 1]},${pixels[i + 2]}`); }
    }
    return [drawn / (canvas.width * canvas.height), colours.size];
  };
  const view = () => [Number(canvas.dataset.from), Number(canvas.dataset.to)];
  const before = [look(), view()];
  document.querySelector("button[data-do=in]").click();
  document.querySelector("button[data-do=in]").click();
  const zoomed = [look(), view()];
  document.querySelector("button[data-do=right]").click();
  const moved = view();
  document.querySelector("button[data-do=all]").click();
  const box = canvas.getBoundingClientRect();
  const touch = (kind, x, y) => canvas.dispatchEvent(
    new PointerEvent(kind, {clientX: box.left + x, clientY: box.top + y, pointerId: 1}));
  touch("pointerdown", box.width / 2, 48);
  touch("pointerup", box.width / 2, 48);
  return {before, zoomed, moved, all: view(), told: document.querySelector(".told").textContent,
          wide: document.documentElement.scrollWidth, seen: document.documentElement.clientWidth};
})()"""


@pytest.fixture
def written(tmp_path: Path) -> Path:
    result = predict_step(step(), setting(1.0, 1e-3))
    write_report(result, tmp_path / "report.html")
    return tmp_path / "report.html"


@pytest.mark.parametrize("width", [1200, 500])
def test_the_timeline_is_drawn_zoomed_moved_and_tells_what_is_touched(written: Path, width: int):
    found = found_in(written, CANVAS, width)
    (drawn, colours), (low, high) = found["before"]
    assert 0.2 < drawn < 0.95 and colours > 5
    assert low == 0 and high == pytest.approx(4e9, rel=0.02)
    assert found["zoomed"][1][1] - found["zoomed"][1][0] == pytest.approx((high - low) / 4, rel=0.01)
    assert found["moved"][0] > found["zoomed"][1][0]
    assert found["all"] == [low, high]
    assert "critical path" in found["told"] and "takes 1 s" in found["told"]
    assert found["wide"] <= found["seen"] + 1  # nothing makes a narrow window scroll sideways


def test_tables_fold_and_sort(tmp_path: Path):
    result = predict_step(step(), setting(1.0, 1e-3))
    write_report(result, tmp_path / "r.html")
    found = found_in(tmp_path / "r.html", """(() => {
      const table = document.querySelector("#operators table");
      const names = () => [...table.tBodies[0].rows].map((row) => row.cells[0].textContent);
      const first = names();
      table.tHead.rows[0].cells[0].querySelector("button").click();
      const sorted = names();
      table.tHead.rows[0].cells[0].querySelector("button").click();
      return [first, sorted, names()];
    })()""")  # fmt: skip
    first, sorted_, reversed_ = found
    assert first[0] == "aten::mm"  # most device time
    assert sorted_ == sorted(first, key=str.casefold) and reversed_ == sorted_[::-1]


def test_hostile_names_run_nothing_in_a_browser(tmp_path: Path):
    write_report(hostile_result(), tmp_path / "r.html")
    found = found_in(tmp_path / "r.html", """(() => [
      document.querySelectorAll("b").length,
      document.body.textContent.includes("<\\/script><b"),
      document.querySelector("canvas").dataset.to,
    ])()""")  # fmt: skip
    assert found[:2] == [0, True] and int(found[2]) > 0


def test_a_screenshot_and_a_print_have_something_on_them(written: Path, tmp_path: Path):
    image = pytest.importorskip("matplotlib.image")
    drawn_page(written, tmp_path / "page.png")
    pixels = image.imread(tmp_path / "page.png")[..., :3]
    assert pixels.shape[:2] == (1600, 1200)
    background = pixels[2, 2]
    assert 0.05 < float((np.abs(pixels - background).max(axis=2) > 0.05).mean()) < 0.6
    drawn_page(written, tmp_path / "page.png", pdf=tmp_path / "page.pdf")
    assert (tmp_path / "page.pdf").read_bytes().count(b"/Type /Page\n") >= 1 or (
        tmp_path / "page.pdf"
    ).stat().st_size > 20000


def test_a_host_that_waits_before_it_begins_does_not_fill_the_chart():
    """Its first call is half a second early: nothing changes until the step itself."""
    levels = {-500.0: (5, 0), 0.0: (5, 0), 1.0: (5, 4), 2.0: (5, 8), 3.0: (5, 1)}
    moments = [(time, MemoryMoment(0, each)) for time, each in levels.items()]
    assert [time for time, _ in changing(moments)] == [0.0, 1.0, 2.0, 3.0]
    assert changing(moments[:1]) == moments[:1]
