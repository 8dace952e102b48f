"""Timelines of whole predictions, as Perfetto's trace processor takes them; each of its checks is tried on a fault."""

from __future__ import annotations

import copy
import json
import shutil
import subprocess
from pathlib import Path

import pytest

pytest.importorskip("torch")
import e2e
from tests.e2e.recorded_traces import LINEAR, LINEAR_ET, recorded
from tests.e2e.timeline_checks import faults, read_timeline

SCRIPT = """
import torch
from torch.profiler import record_function

def make_step(batch_size=8):
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(batch_size, 64, device="cuda")
    side = torch.cuda.Stream()

    def step():
        optimizer.zero_grad()
        with record_function("whole"):
            with record_function("model"):
                loss = model(data).square().mean()
            with torch.cuda.stream(side), record_function("beside"):
                data.sigmoid()
            loss.backward()
        loss.item()
        optimizer.step()

    return model, step
"""


def one_gpu(folder: Path) -> Path:
    (folder / "train.py").write_text(SCRIPT)
    e2e.predict(script=f"{folder / 'train.py'}:make_step", gpu="h100-sxm", timeline=folder / "one.json.gz")
    return folder / "one.json.gz"


def pipeline(folder: Path) -> Path:
    """A layer in each stage, the embedding before the first and the head behind the last."""
    (folder / "gpt2.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 4}))
    e2e.predict(
        model_config=folder / "gpt2.json", gpu="h100-sxm", gpus=4, parallel="pp=4,micro-batches=4", sequence_length=64,
        timeline=folder / "pipeline.json.gz",
    )  # fmt: skip
    return folder / "pipeline.json.gz"


def asked(folder: Path) -> Path:
    e2e.predict(
        traces=[recorded(LINEAR_ET)], kineto=[recorded(LINEAR)], what_if=["kernels:gemm=2x"],
        timeline=folder / "asked.json",
    )  # fmt: skip
    return folder / "asked.json"


@pytest.fixture(scope="module", params=[one_gpu, pipeline, asked])
def timeline(request, tmp_path_factory) -> Path:
    return request.param(tmp_path_factory.mktemp("timeline"))


def test_nothing_of_a_prediction_is_dropped(timeline: Path):
    events = read_timeline(timeline)
    assert sum(event["ph"] == "X" for event in events) > 50
    assert faults(events) == []


def test_the_trace_processor_itself_drops_nothing(timeline: Path):
    program = shutil.which("trace_processor_shell") or shutil.which("trace_processor")
    if program is None:
        pytest.skip("no trace_processor_shell here: it comes from perfetto.dev, with no package of Python")
    query = timeline.with_name("query.sql")
    query.write_text(
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0;"
        "select count(*) as slices from slice; select count(*) as arrows from flow;"
    )
    done = subprocess.run([program, "-q", str(query), str(timeline)], capture_output=True, text=True, check=True)
    events = read_timeline(timeline)
    assert f"\n{sum(event['ph'] == 'X' for event in events)}\n" in done.stdout
    assert f"\n{sum(event['ph'] == 's' for event in events)}\n" in done.stdout
    assert "flow_" not in done.stdout and "json_" not in done.stdout and "slice_" not in done.stdout


def drawn() -> list[dict]:
    """A thread with a range around two launches, a stream with two kernels, a counter."""

    def slice_(name, tid, ts, dur):
        return {"ph": "X", "name": name, "pid": 1, "tid": tid, "ts": ts, "dur": dur, "args": {}}

    def arrow(kind, number, tid, ts):
        return {"ph": kind, "name": "launch", "cat": "launch", "id": number, "pid": 1, "tid": tid, "ts": ts,
                **({"bp": "e"} if kind == "f" else {})}  # fmt: skip

    return [
        {"ph": "M", "name": "process_name", "pid": 1, "tid": 1, "args": {"name": "rank 0"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1, "args": {"name": "main"}},
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 1007, "args": {"name": "stream 7"}},
        slice_("range", 1, 0, 10), slice_("launch of a", 1, 0, 4), slice_("launch of b", 1, 4, 6),
        arrow("s", 1, 1, 0), arrow("s", 2, 1, 4),
        slice_("a", 1007, 4.5, 3.25), slice_("b", 1007, 10, 1),
        arrow("f", 1, 1007, 4.5), arrow("f", 2, 1007, 10),
        {"ph": "i", "s": "t", "name": "event", "pid": 1, "tid": 1, "ts": 3},
        {"ph": "C", "name": "memory", "pid": 1, "tid": 1, "ts": 3, "args": {"bytes": 5}},
    ]  # fmt: skip


def changed(place: int, **fields):
    def plant(events):
        events[place] = {**events[place], **fields}

    return plant


def without(place: int, key: str | None = None):
    def plant(events):
        if key is None:
            del events[place]
        else:
            del events[place][key]

    return plant


def moved(place: int, to: int):
    def plant(events):
        events.insert(to, events.pop(place))

    return plant


FAULTS = {
    "overlap: launch of b ends after range": changed(5, dur=6.5),
    "overlap: range ends after launch of a": moved(3, 5),
    "duration": changed(8, dur=-1),
    "duration: ": without(8, "dur"),
    "time": changed(8, ts=-0.5),
    "time: ": changed(8, ts=4.50005),
    "process 1 has no name": without(0),
    "thread (1, 1007) has no name": without(2),
    "thread_name (1, 1) twice": changed(2, tid=1),
    "no positive whole number": changed(8, tid="7"),
    "binds to no slice": changed(11, ts=9),
    "launch', 1) at 4500 ns binds to no slice": changed(8, dur=0),
    "binds to the next slice": without(10, "bp"),
    "has no head": without(11),
    "has no tail": without(7),
    "has no tail before its head": changed(6, ts=9),
    "begins twice": changed(7, id=1),
    "arrow without a number": changed(7, id="2"),
    "counter": changed(13, args={"bytes": "5"}),
    "counter: ": changed(13, args={}),
    "instant without scope": without(12, "s"),
    "metadata": changed(1, args={"name": 7}),
    "unknown phase": changed(12, ph="q"),
    "name or arguments": changed(8, args=[1]),
}


def test_a_right_file_has_no_faults():
    assert faults(drawn()) == []


@pytest.mark.parametrize("told", FAULTS)
def test_every_planted_fault_is_found(told: str):
    events = copy.deepcopy(drawn())
    FAULTS[told](events)
    assert any(told in line for line in faults(events)), faults(events)
