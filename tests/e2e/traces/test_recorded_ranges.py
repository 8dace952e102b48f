"""Ranges that a recorded script named: of execution traces by nesting, of profiles by time, by hand and real."""

from __future__ import annotations

import json
from pathlib import Path

from e2e.explain.breakdowns import breakdown_of, range_figures
from e2e.explain.critical_path import CriticalPath
from e2e.lowering.lower_trace import lower
from e2e.step.operator_trace import names_around
from e2e.traces.execution_trace import read_execution_trace
from e2e.traces.json_stream import archive_members
from e2e.traces.kineto import read_kineto
from e2e.traces.recorded_graph import recorded_graph
from e2e.traces.step_window import read_last_step
from tests.e2e.recorded_traces import AUTOGRAD, DLRM, DLRM_ET, Profile, recorded


def node(number: int, name: str, parent: int, thread: int = 1, scope: int = 0, sequence: int = -1) -> dict:
    sides = {f"{side}{what}": [] for side in ("input", "output") for what in ("s", "_shapes", "_types")}
    return {"id": number, "name": name, "parent": parent, "tid": thread, "scope": scope, "fw_tid": int(thread > 1),
            "seq_id": sequence, "rf_id": number, "op_schema": "", **sides}  # fmt: skip


def test_of_an_execution_trace(tmp_path: Path):
    nodes = [
        node(1, "[pytorch|profiler|execution_graph|process]", 1, 0, 7),
        node(2, "[pytorch|profiler|execution_graph|thread]", 1, scope=7),
        node(3, "ProfilerStep#4", 2, scope=7),
        node(4, "## forward ##", 3, scope=7),
        node(5, "block", 4, scope=7),
        node(6, "aten::linear", 5, sequence=7),
        node(7, "aten::addmm", 6, sequence=8),
        node(8, "block", 4, scope=7),
        # Not differentiated: the number that the next node gets, which is the one that counts.
        node(9, "aten::ones_like", 8, sequence=9),
        node(10, "aten::relu", 4, sequence=9),
        node(11, "[pytorch|profiler|execution_graph|thread]", 1, 2, 7),
        node(12, "autograd::engine::evaluate_function: ReluBackward0", 11, 2, sequence=9),
        node(13, "autograd::engine::evaluate_function: AddmmBackward0", 11, 2, sequence=8),
        node(14, "AddmmBackward0", 13, 2, 1, sequence=8),
        node(15, "aten::mm", 14, 2),
    ]
    path = tmp_path / "et.json"
    path.write_text(json.dumps({"schema": "1.0.1", "pid": 7, "nodes": nodes}))
    rank = lower(read_execution_trace(path))
    named = {call: tuple(names_around(rank.ranges, rank.calls, call)) for call in rank.calls}
    assert named[6] == named[7] == ("## forward ##", "block") == named[9]
    assert named[10] == named[12] == ("## forward ##",)
    assert named[13] == named[14] == named[15] == ("## forward ##", "block")
    assert {entry: each.parent for entry, each in rank.ranges.entered.items()} == {4: None, 5: 4, 8: 4}


def test_of_a_profile(tmp_path: Path):
    profile = Profile()
    profile.host("user_annotation", "train", 0, 300)
    profile.host("user_annotation", "model", 5, 60)
    profile.host("user_annotation", "Optimizer.step#SGD.step", 210, 50)
    profile.operator("aten::mm", 10, 40, **{"Sequence number": 3})
    profile.launch(20, 5, 30, 50)
    profile.operator("aten::add", 70, 20)
    profile.launch(75, 5, 90, 10)
    profile.operator("MmBackward0", 110, 60, AUTOGRAD, **{"Sequence number": 3, "Fwd thread id": 1})
    profile.launch(120, 5, 130, 40, thread=AUTOGRAD)
    profile.operator("aten::sgd", 220, 20)
    profile.launch(225, 5, 240, 10)
    profile.operator("aten::last", 310, 20)
    profile.launch(315, 5, 330, 10)
    rank = recorded_graph(read_kineto(profile.write(tmp_path / "k.json"))).graph.ranks[0]
    named = {info.name: tuple(names_around(rank.ranges, rank.calls, call)) for call, info in rank.calls.items()}
    assert named == {
        "aten::mm": ("train", "model"),
        "aten::add": ("train",),
        "MmBackward0": ("train", "model"),  # the main thread waits for it in "train", its forward was in "model"
        "aten::sgd": ("train",),
        "aten::last": (),
    }


def test_of_a_real_run():
    """DLRM's benchmark marks its passes; the same names by nesting in the trace and by time in the profile."""
    trace, profile = (recorded(name) / archive_members(recorded(name))[0] for name in (DLRM_ET, DLRM))
    traced = lower(read_last_step(trace)).ranges
    profiled = recorded_graph(read_kineto(profile)).graph.ranks[0]
    names = [{each.name for each in ranges.entered.values()} for ranges in (traced, profiled.ranges)]
    assert names[0] & names[1]
    rows = range_figures(profiled, CriticalPath((), (0.0, 1.0)))
    device = sum(breakdown_of(profiled)["by_operator"].values())
    assert rows and all(row.entered > 0 and 0 <= row.device_seconds <= device for row in rows)
    assert any(row.backward_seconds > 0 for row in rows)
