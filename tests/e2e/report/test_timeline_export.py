"""The trace file, read back as a strict viewer would."""

from __future__ import annotations

import gzip
import json
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[1]))

from drawn_graphs import Drawing, random_graph, scaled, together

from costmodel.base.errors import OutputError
from e2e.report.timeline_export import FIRST_STREAM_TRACK, trace_events, write_trace
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.simulate.timeline import Timeline
from e2e.step.execution_graph import CallInfo, ExecutionGraph

Event = dict[str, Any]


def microseconds(*drawings: Drawing) -> ExecutionGraph:
    """Drawn in microseconds."""
    return scaled(together(*drawings), 1e-6)


def written(graph: ExecutionGraph, timeline: Timeline, path: Path) -> list[Event]:
    write_trace(graph, timeline, path)
    content = path.read_bytes()
    document = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    assert document["displayTimeUnit"] in ("ns", "ms")
    return document["traceEvents"]


def check(events: list[Event]) -> None:
    """What the format asks for, and no overlap on a track: viewers drop slices that are not nested."""
    named = {(event["pid"], event["tid"]) for event in events if event["ph"] == "M" and event["name"] == "thread_name"}
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    arrows: dict[str, dict[int, Event]] = {"s": {}, "f": {}}
    for event in events:
        assert event["ph"] in "MXisf"
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int) and event["pid"] > 0
        if event["ph"] == "M":
            continue
        assert (event["pid"], event["tid"]) in named
        assert event["ts"] >= 0
        if event["ph"] == "X":
            begin, length = round(event["ts"] * 1000), round(event["dur"] * 1000)
            assert length >= 0
            tracks[event["pid"], event["tid"]].append((begin, begin + length))
        elif event["ph"] in "sf":
            assert event["id"] not in arrows[event["ph"]]
            arrows[event["ph"]][event["id"]] = event
    for slices in tracks.values():
        slices.sort()
        assert all(before[1] <= after[0] for before, after in zip(slices, slices[1:], strict=False))
    assert arrows["s"].keys() == arrows["f"].keys()
    for number, tail in arrows["s"].items():
        head = arrows["f"][number]
        assert tail["ts"] <= head["ts"]
        assert tail["tid"] < FIRST_STREAM_TRACK <= head["tid"]
        assert head["bp"] == "e"


def test_threads_and_streams_are_tracks_with_arrows_between_them(tmp_path: Path):
    d = Drawing(3)
    d.calls[0] = CallInfo(0, "aten::mm", "forward", None, "layers.0")
    d.host(4, "T2", call=0)
    d.kernel("gemm", 10, call=0)
    graph = microseconds(d)
    events = written(graph, simulate(graph), tmp_path / "trace.json")
    check(events)
    names = {event["args"]["name"] for event in events if event["name"] in ("process_name", "thread_name")}
    assert names == {"rank 3", "main", "stream 7"}
    slices = {event["name"]: (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert slices == {"aten::mm": (0, 4), "launch of gemm": (4, 1), "gemm": (5, 10)}
    gemm = next(event for event in events if event["name"] == "gemm")
    assert gemm["args"]["operator"] == "aten::mm" and gemm["args"]["module"] == "layers.0"
    assert sum(event["ph"] == "s" for event in events) == 1


def test_the_wait_and_the_transfer_of_a_collective_are_apart(tmp_path: Path):
    early, late = Drawing(0), Drawing(1)
    late.host(6)
    for d in (early, late):
        d.collective("nccl", 5, 0)
    graph = microseconds(early, late)
    events = written(graph, simulate(graph), tmp_path / "trace.json.gz")
    check(events)
    slices = {(event["pid"], event["name"]): (event["ts"], event["dur"]) for event in events if event["ph"] == "X"}
    assert slices[1, "nccl (wait)"] == (1, 6)
    assert slices[1, "nccl"] == slices[2, "nccl"] == (7, 5)
    assert (2, "nccl (wait)") not in slices


def test_the_same_timeline_gives_the_same_file(tmp_path: Path):
    d = Drawing()
    d.kernel("a", 1)
    graph = microseconds(d)
    paths = [tmp_path / "one.json.gz", tmp_path / "other.json.gz"]
    for path in paths:
        write_trace(graph, simulate(graph), path)
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert sorted(tmp_path.iterdir()) == sorted(paths)


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path):
    d = Drawing()
    d.kernel("a", 1)
    graph = microseconds(d)
    path = tmp_path / "missing" / "trace.json"
    with pytest.raises(OutputError, match="missing/trace.json: cannot be written"):
        write_trace(graph, simulate(graph), path)


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 10**6), st.sampled_from([1e-7, 1e-6, 1e-3]))
def test_random_traces_are_strict(seed: int, unit: float):
    graph = scaled(random_graph(seed), unit)
    timeline = simulate_iterations(graph, 2).timeline
    events = list(trace_events(graph, timeline))
    json.dumps(events, allow_nan=False)
    check(events)
    tasks = sum(len(rank.tasks) for rank in graph.ranks)
    assert sum(event["ph"] == "f" for event in events) == 2 * tasks
