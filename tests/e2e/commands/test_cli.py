"""The command line on real, small inputs, in its own process where that makes a difference."""

from __future__ import annotations

import gc
import gzip
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from lab.data.data_folder import data_folder

pytest.importorskip("torch")

from e2e.commands.cli import main

ROOT = Path(__file__).resolve().parents[3]
SCRIPT = """
import torch

def make_step(batch_size):
    model = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(batch_size, 64)

    def step():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return model, step

def broken(batch_size):
    raise RuntimeError("no such layer")
"""


def e2e(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "e2e", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)


def test_predicts_the_users_own_step_and_writes_all_reports(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    files = ("--timeline", tmp_path / "t.json.gz", "--report", tmp_path / "r.html")
    step = ("--script", f"{tmp_path}/train.py:make_step", "--batch-size", 32)
    done = e2e("predict", *step, "--gpu", "h100-sxm", *files, "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["machine"] == "h100-sxm" and record["forward_seconds"] > 0 and record["backward_seconds"] > 0
    assert record["host_bound_fraction"] > 0.5  # a tiny model waits for the host
    path = sum(part["seconds"] for part in record["critical_path"])
    assert path == pytest.approx(record["iteration_seconds"], rel=0.05)
    events = json.loads(gzip.decompress((tmp_path / "t.json.gz").read_bytes()))["traceEvents"]
    assert any(event.get("ph") == "X" for event in events)
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")


class Ended(NamedTuple):
    returncode: int
    stdout: str
    stderr: str


def called(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> Ended:
    """What :func:`e2e` gives, by the same entry point without another process: torch is imported once."""
    with pytest.raises(SystemExit) as caught, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["e2e", *arguments])
        patch.setattr(gc, "set_threshold", lambda *_: None)  # of this process, which runs other tests too
        main()
    out, err = capsys.readouterr()
    return Ended(caught.value.code, out, err)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--gpu", "h100-sxm"), "exactly one of --model"),
        (("--gpu", "h100", "--model", "gpt2-large"), "h100-"),
        (("--gpu", "v100-pcie-32gb", "--model", "gpt2-largest"), "gpt2-large"),
        (("--gpu", "toy", "--model", "gpt2-large"), "cpu machine"),
        (("--gpu", "h100-sxm", "--trace", "no-such.json"), "no-such.json"),
        (("--gpu", "h100-sxm", "--script", "SCRIPT:broken"), "no such layer"),
        (("--gpu", "h100-sxm", "--model", "gpt2", "--kineto", "k.json"), "got --model and --kineto"),
    ],
    ids=["no source", "unknown gpu", "unknown model", "not a gpu", "no trace", "script fails", "kineto alone"],
)
def test_bad_input_is_one_line_and_status_2(tmp_path, capsys, request, arguments, text):
    """A script's own exception as a shell calls it, the others in this process."""
    (tmp_path / "train.py").write_text(SCRIPT)
    words = ("predict", *(str(each).replace("SCRIPT", f"{tmp_path}/train.py") for each in arguments))
    alone = request.node.callspec.id == "script fails"
    done = e2e(*words) if alone else called(capsys, words)
    assert done.returncode == 2 and done.stdout == ""
    assert text in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith("error: ")
    assert ("Traceback" in done.stderr) == ("SCRIPT:broken" in arguments)  # where the user's own script fails


def test_only_predict_takes_a_program(capsys):
    done = called(capsys, ["sweep", "--gpu", "l4", "--gpus", "1", "--", "python", "train.py"])
    assert done.returncode == 2 and done.stderr.startswith("error: sweep: takes no program")


TRACES = data_folder() / "traces" / "linear_2080Ti"


@pytest.mark.skipif(not TRACES.is_dir(), reason=f"{TRACES.parent.name}: the folder of public traces is not here")
def test_a_recorded_run_is_priced_with_the_overheads_of_its_own_host():
    """40 iterations were recorded in 24.8 ms each, host-bound; the profiler's share is taken out."""
    files = ("--trace", TRACES / "linear_et.json.gz", "--kineto", TRACES / "linear_kineto.json.gz")
    done = e2e("predict", *files, "--gpu", "rtx-2080-ti", "--json")
    assert done.returncode == 0, done.stderr
    record = json.loads(done.stdout)
    assert record["host_bound_fraction"] > 0.8
    assert 0.015 < record["iteration_seconds"] < 0.027
