"""``--what-if`` from end to end: captured and recorded steps, and questions that cannot be asked."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

pytest.importorskip("torch")
import e2e
from costmodel.base.errors import InputError
from e2e.commands.cli import app
from e2e.sources.requests import SOURCES
from tests.e2e.recorded_traces import DLRM, DLRM_ET, recorded

SCRIPT = """
import os
import torch
import torch.distributed as dist

def make_step(batch_size=32):
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Sigmoid(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(batch_size, 64)

    def step():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return model, step

def make_fixed():
    return make_step(48)

def make_ranks(batch_size=32):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    layers = [torch.nn.Linear(512, 512) for _ in range(6)]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), bucket_cap_mb=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(batch_size, 512, device="cuda")

    def step():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return model, step
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def rows_of(prediction):
    return {row.question: row for row in prediction.what_if}


def test_each_change_alone_and_all_together(script):
    questions = ["host=2x", "kernels:gemm=4x+batch=64"]
    answer = e2e.predict(script=f"{script}:make_step", gpu="h100-sxm", batch_size=32, what_if=questions)
    rows = rows_of(answer)
    assert list(rows) == [
        "as it is", "host=2x", "kernels:gemm=4x", "batch=64", "kernels:gemm=4x+batch=64",
        "host=2x+kernels:gemm=4x+batch=64",
    ]  # fmt: skip
    first = answer.what_if[0]
    assert first.iteration_seconds == answer.iteration_seconds and first.gain == 1.0 and first.gain_per_sample is None
    # A tiny model waits for its host: twice as fast a host is nearly twice as fast a step, other kernels are nothing.
    assert 1.8 < rows["host=2x"].gain <= 2.0 and rows["kernels:gemm=4x"].gain == pytest.approx(1.0, abs=0.01)
    assert rows["batch=64"].gain_per_sample == pytest.approx(2.0, rel=0.05)
    assert sum(first.shares.values()) == pytest.approx(1.0) and first.shares["host"] > 0.9
    record = json.loads(json.dumps(answer.to_json()))["what_if"]
    assert record[1]["question"] == "host=2x" and record[1]["path_seconds"]["host"] > 0


def test_operators_are_fused(script):
    answer = e2e.predict(script=f"{script}:make_step", gpu="t4", batch_size=65536, what_if="fuse:relu|sigmoid")
    assert rows_of(answer)["fuse:relu|sigmoid"].gain > 1.02


def test_buckets_of_a_script_are_other_buckets(script):
    asked = e2e.predict(script=f"{script}:make_ranks", gpu="h100-sxm", gpus=2, what_if="bucket-mb=100")
    assert len(asked.collectives) > 1
    reference = script.with_name("other.py")
    reference.write_text(SCRIPT.replace("bucket_cap_mb=1", "bucket_cap_mb=100"))
    other = e2e.predict(script=f"{reference}:make_ranks", gpu="h100-sxm", gpus=2)
    assert len(other.collectives) < len(asked.collectives)
    assert asked.what_if[1].iteration_seconds == pytest.approx(other.iteration_seconds, rel=1e-9)


def test_recorded_ranks_are_asked():
    files = {"traces": recorded(DLRM_ET), "kineto": recorded(DLRM)}
    answer = e2e.predict(**files, what_if=["host=2x", "kernels:SendRecv=2x"])
    rows = rows_of(answer)
    assert rows["host=2x"].gain > 1.1 and rows["kernels:SendRecv=2x"].gain >= 1.0
    assert not any("replay is wrong" in line for line in answer.warnings)


@pytest.mark.parametrize(
    ("options", "question", "message"),
    [
        ({"kineto": "k.json"}, "batch=64", "batch=64: a recorded step has its own batch"),
        ({"kineto": "k.json"}, "fuse:add", "profiles alone do not tell tensors"),
        ({"model": "resnet-50"}, "bucket-mb=50", "buckets of gradients are those of several GPUs"),
        ({"model": "resnet-50"}, "host=nowhere", "nowhere: no such file, and no host of that name"),
        ({"model": "resnet-50", "compile": True}, "fuse:add", "--compile has fused what goes together"),
        ({"kineto": "k.json"}, "bucket-mb=50", "those of several GPUs, captured"),
        ({"model": "gpt2", "parallel": "dp=2", "gpus": 2}, "fuse:add", "whose operators are not single"),
        ({"model": "resnet-50"}, "faster", "'faster' is none of"),
    ],
)
def test_what_cannot_be_asked_is_told_before_any_work(options, question, message, monkeypatch):
    for record in SOURCES:
        monkeypatch.setattr(record, "prepare", lambda *_: pytest.fail("a step was prepared"))
    with pytest.raises(InputError, match=message) as caught:
        e2e.predict(**options, gpu="h100-sxm", what_if=question)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("kernels:lstm=2x", "no kernel of the step is of that family or matches.*families: Elementwise, Gemm"),
        ("fuse:linear", "fuse:linear: no two element-wise operators that follow each other match; the step has aten::"),
        ("batch-embeddings", "no two lookups by embedding_bag are alike"),
    ],
)
def test_what_the_step_does_not_have_is_one_line_and_status_2(script, question, message):
    ran = CliRunner().invoke(
        app,
        ["predict", "--script", f"{script}:make_step", "--gpu", "t4", "--what-if", question],
        env={"COLUMNS": "300"},
    )
    assert ran.exit_code == 2
    with pytest.raises(InputError, match=message):
        e2e.predict(script=f"{script}:make_step", gpu="t4", what_if=question)


def test_the_table_says_where_the_path_goes(script):
    arguments = [
        "predict",
        "--script",
        f"{script}:make_step",
        "--gpu",
        "t4",
        "--what-if",
        "host=4x",
        "--what-if",
        "batch=4096",
    ]
    shown = CliRunner().invoke(app, arguments).stdout
    (line,) = [line for line in shown.splitlines() if line.startswith(" host=4x ")]
    assert "->" in line and "x" in line
    assert "per sample" in shown and "as it is" in shown
