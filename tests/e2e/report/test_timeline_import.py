"""Timelines of whole predictions, as Perfetto's trace processor takes them."""

from __future__ import annotations

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
