"""``e2e.predict`` and ``e2e.sweep``: what the command line answers, and calls that leave nothing behind."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
from typer.testing import CliRunner

import e2e
from costmodel import ProjectError
from costmodel.base.errors import InputError, MachineError, ModelError
from e2e.commands.cli import app

torch = pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[3]


def make_step(batch_size, width=128):
    model = torch.nn.Sequential(torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(batch_size, 64)

    def step():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return model, step


def failing_step(batch_size):
    raise RuntimeError("no such layer")


def printed(*words: object) -> dict:
    """What the command line prints, here in this process; ``test_cli.py`` starts it as people do."""
    done = CliRunner().invoke(app, [*map(str, words), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (("--model", "gpt2", "--batch-size", 2, "--sequence-length", 32, "--dtype", "bfloat16", "--compile"),
         {"model": "gpt2", "batch_size": 2, "sequence_length": 32, "dtype": "bfloat16", "compile": True}),
        (("--model", "gpt2", "--parallel", "tp=2", "--gpus", 4, "--sequence-length", 32, "--speed-spread", "0.1"),
         {"model": "gpt2", "parallel": e2e.ParallelSpec(dp=2, tp=2), "gpus": 4, "sequence_length": 32,
          "speed_spread": 0.1}),
    ],
    ids=["one gpu", "spread"],
)  # fmt: skip
def test_the_record_is_that_of_the_command_line(words, asked):
    record = printed("predict", "--gpu", "h100-sxm", *words)
    step = e2e.predict(gpu="h100-sxm", **asked)
    assert json.loads(json.dumps(step.to_json())) == record
    assert step.iteration_seconds == record["iteration_seconds"] and step.warnings == record["warnings"]


def test_a_function_is_as_good_as_the_file_it_is_in(tmp_path):
    source = Path(__file__).read_text(encoding="utf-8").partition("def make_step")[2].partition("\n\n\n")[0]
    (tmp_path / "train.py").write_text(f"import torch\n\ndef make_step{source}\n")
    ask = partial(e2e.predict, gpu="h100-sxm", batch_size=32)
    file, function = ask(script=f"{tmp_path}/train.py:make_step"), ask(script=make_step)
    assert function.workload == f"{__file__}:make_step"
    same = {"workload": "", "asked": ()}  # which file it is
    assert {**function.to_json(), **same} == {**file.to_json(), **same}
    assert ask(script=partial(make_step, width=4096)).gpu_active_seconds > function.gpu_active_seconds


def test_a_step_that_does_not_fit_is_an_answer():
    step = e2e.predict("gpt2", gpu="t4", batch_size=256)
    assert step.fits is False and step.memory_shortage is not None and step.iteration_seconds > 0


@pytest.mark.parametrize(
    ("asked", "kind", "words"),
    [
        ({}, InputError, "exactly one of --model"),
        ({"model": "gpt2", "gpu": None}, InputError, "give --gpu"),
        ({"model": "gpt2", "gpu": "h100"}, MachineError, "h100-"),
        ({"model": "gpt2", "batch_size": 0}, InputError, "--batch-size 0: must be a whole number, 1 or more"),
        ({"model": "gpt2", "gpus": True}, InputError, "--gpus True"),
        ({"model": "gpt2", "dtype": "int3"}, InputError, "--dtype int3: choose one of float32, tf32"),
        ({"model": "gpt2", "attention": "fast"}, InputError, "--attention fast: choose one of eager, flash"),
        ({"model": "gpt2", "mode": "test"}, InputError, "--mode test"),
        ({"model": "gpt2", "parallel": "xp=2"}, InputError, "'xp' is not known"),
        ({"model": "gpt2", "script": make_step}, InputError, "--model and --script"),
        ({"script": failing_step}, ModelError, "failing_step: the script failed with RuntimeError: no such layer"),
        ({"script": lambda: 1}, InputError, r"must return \(module, step\), got int"),
        ({"script": "nowhere.py:make_step"}, InputError, "nowhere.py: no such script"),
        ({"traces": Path("no-such.json")}, InputError, "no-such.json"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_what_a_user_gets_wrong_is_one_line(asked, kind, words):
    with pytest.raises(kind, match=words) as caught:
        e2e.predict(**{"gpu": "h100-sxm", **asked})
    assert isinstance(caught.value, ProjectError) and "\n" not in str(caught.value)


def test_threads_take_turns():
    sizes = [8, 16, 32, 64]
    ask = lambda size: e2e.predict(script=make_step, gpu="h100-sxm", batch_size=size).to_json()  # noqa: E731
    one_by_one = [ask(size) for size in sizes]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(ask, sizes)) == one_by_one


@pytest.mark.parametrize(
    ("asked", "most"),
    [
        # A capture has some 10,000 objects of its own, the simulation of a pipeline some 3,500.
        ({"model_config": "gpt2.json", "sequence_length": 32}, 1500),
        ({"model_config": "gpt2.json", "sequence_length": 32, "parallel": "dp=2,pp=2,micro-batches=4",
          "dtype": "bfloat16"}, 1500),
        ({"script": make_step}, 1500),
    ],
    ids=["model", "spread", "script"],
)  # fmt: skip
def test_a_prediction_is_free_when_it_is_let_go(asked, most, tmp_path, monkeypatch):
    """What is left waits for the garbage collector, which a program may call seldom, and counts objects, not bytes."""
    monkeypatch.chdir(tmp_path)
    Path("gpt2.json").write_text(json.dumps({"model_type": "gpt2", "n_layer": 2}))
    for size in (1, 2):
        e2e.predict(**asked, gpu="h100-sxm", batch_size=size)  # what is kept for the next calls is made
    gc.collect()
    gc.disable()
    try:
        before = len(gc.get_objects())
        for size in (3, 4):
            e2e.predict(**asked, gpu="h100-sxm", batch_size=size)
        held = len(gc.get_objects()) - before
        left = gc.collect()
        kept = len(gc.get_objects()) - before
    finally:
        gc.enable()
    assert held < 2 * most and left < 2 * most and kept < 300


@pytest.mark.thorough
def test_memory_is_bounded_over_many_calls():
    import psutil

    process = psutil.Process()

    def grown(calls: int) -> int:
        before = process.memory_info().rss
        for size in range(1, calls + 1):
            e2e.predict(script=make_step, gpu="h100-sxm", batch_size=size)
        return process.memory_info().rss - before

    grown(5)
    assert grown(40) < 16 * 2**20


def test_a_sweep_ranks_what_predict_says(tmp_path):
    told: list[str] = []
    asked = {"gpu": "h100-sxm", "gpus": 2, "sequence_length": 32, "batch_size": 2, "workers": 1}
    ways = ["dp=2", e2e.ParallelSpec(tp=2), "dp=4"]
    ranking = e2e.sweep(
        "gpt2",
        **asked,
        parallel=ways,
        output=tmp_path,
        progress=lambda done, total, seconds, row: told.append(row.parallel),
    )
    assert sorted(told) == ["dp=2", "dp=4", "tp=2"] and len(ranking) == 3
    assert [row.status for row in ranking] == ["ok", "ok", "not possible"]
    assert ranking[0].samples_per_second >= ranking[1].samples_per_second
    for row in list(ranking)[:2]:
        step = e2e.predict("gpt2", gpu="h100-sxm", gpus=2, parallel=row.parallel, sequence_length=32, batch_size=2,
                           dtype="bfloat16", attention="flash")  # fmt: skip
        assert row.iteration_seconds == step.iteration_seconds
    again = e2e.sweep("gpt2", **asked, parallel=ways, output=tmp_path)
    assert again.rows == ranking.rows and again.computed == 0
    words = ("--gpu", "h100-sxm", "--gpus", 2, "--sequence-length", 32, "--batch-size", 2)
    spread = ("--parallel", "dp=2", "--parallel", "tp=2", "--parallel", "dp=4")
    record = printed("sweep", "--model", "gpt2", *words, *spread, "-o", tmp_path)
    assert [row["iteration_seconds"] for row in record["rows"]] == [row.iteration_seconds for row in ranking]


UNGUARDED = """
print("started", flush=True)
import e2e
rows = e2e.sweep("gpt2", gpu="h100-sxm", gpus=2, parallel=["dp=2", "tp=2"], sequence_length=32, workers=2)
print([row.status for row in rows])
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_the_processes_of_a_sweep_do_not_run_the_program_again(tmp_path):
    """Not even one without ``if __name__ == "__main__":``."""
    (tmp_path / "program.py").write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{UNGUARDED}")
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, timeout=200, check=False
    )
    assert done.stdout == "started\n['ok', 'ok']\n", done.stderr
