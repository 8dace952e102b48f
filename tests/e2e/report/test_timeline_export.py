"""The trace file, read back as a strict viewer would."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from costmodel.base.errors import OutputError
from costmodel.operators.device_work import Gemm
from e2e.explain.critical_path import critical_path
from e2e.report.timeline_export import FIRST_STREAM_TRACK, operator_text, trace_events, write_trace
from e2e.simulate.simulator import simulate, simulate_iterations
from e2e.simulate.timeline import Timeline
from e2e.step.execution_graph import CallInfo, ExecutionGraph, Launch
from tests.e2e.drawn_graphs import Drawing, random_graph, scaled, together
from tests.e2e.timeline_checks import faults

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
    """What viewers ask for, and that arrows go from threads to streams, forward in time."""
    assert faults(events) == []
    arrows: dict[str, dict[int, Event]] = {
        kind: {event["id"]: event for event in events if event["ph"] == kind} for kind in "sf"
    }
    for number, tail in arrows["s"].items():
        head = arrows["f"][number]
        assert tail["ts"] <= head["ts"]
        assert tail["tid"] < FIRST_STREAM_TRACK <= head["tid"]


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
    events = list(trace_events(graph, timeline, iteration=1))
    json.dumps(events, allow_nan=False)
    check(events)
    assert sum(event["ph"] == "f" for event in events) == sum(arrows(graph, timeline))


def arrows(graph: ExecutionGraph, timeline: Timeline) -> Iterator[bool]:
    """Of every task of the second iteration whether its launch and itself last a nanosecond at least, as written."""
    for rank, layout in zip(graph.ranks, timeline.layouts, strict=True):
        launches = {
            action.task: layout.threads[name][0] + place
            for name, actions in rank.threads.items()
            for place, action in enumerate(actions)
            if isinstance(action, Launch)
        }
        first = layout.offset + layout.nodes
        for task, launch in launches.items():
            nodes = (first + launch, first + layout.actions + task)
            yield all(round(timeline.end[node] * 1e9) > round(timeline.start[node] * 1e9) for node in nodes)


def test_ranges_enclose_what_happens_in_them(tmp_path: Path):
    """my_block(aten::linear(aten::addmm), aten::relu), then something outside of it."""
    d = Drawing()
    d.calls = {
        0: CallInfo(0, "my_block", "forward"),
        1: CallInfo(1, "aten::linear", "forward", 0, "fc"),
        2: CallInfo(2, "aten::addmm", "forward", 1, "fc"),
        3: CallInfo(3, "aten::relu", "forward", 0),
        4: CallInfo(4, "aten::sum", "forward"),
    }
    d.host(4, "T2", call=2)
    d.kernel("gemm", 10, call=2)
    d.host(3, "T5", call=3)
    d.host(2, "T5", call=4)
    graph = microseconds(d)
    events = written(graph, simulate(graph), tmp_path / "trace.json")
    check(events)
    around = {event["name"]: (event["ts"], event["dur"]) for event in events if event.get("cat") == "around"}
    assert around == {"my_block": (0, 8), "aten::linear": (0, 5)}


def test_the_critical_path_has_a_track_without_gaps(tmp_path: Path):
    early, late = Drawing(0), Drawing(1)
    late.host(6)
    for d in (early, late):
        d.collective("nccl", 5, 0)
    graph = microseconds(early, late)
    timeline = simulate(graph)
    write_trace(graph, timeline, tmp_path / "trace.json", critical_path(graph, timeline))
    events = json.loads((tmp_path / "trace.json").read_bytes())["traceEvents"]
    check(events)
    process = next(
        event["pid"] for event in events if event["ph"] == "M" and event["args"] == {"name": "critical path"}
    )
    path = [event for event in events if event["pid"] == process and event["ph"] == "X"]
    assert [(event["ts"], event["dur"], event["args"]["rank"]) for event in path] == [(0, 6, 1), (6, 1, 1), (7, 5, 0)]
    assert path[-1]["cat"] == "collective transfer" and path[-1]["name"] == "nccl"


def test_kernels_tell_their_sizes():
    record = Gemm(1, 64, 16, 32)
    assert operator_text(record).startswith("Gemm(") and "64" in operator_text(record)
    d = Drawing()
    d.kernel("gemm", 1)
    graph = microseconds(d)
    rank = graph.ranks[0]
    graph = replace(graph, ranks=(replace(rank, tasks=(replace(rank.tasks[0], operators=(record,)),)),))
    (slice_,) = (event for event in trace_events(graph, simulate(graph)) if event["name"] == "gemm")
    assert slice_["args"]["computes"] == operator_text(record)
