"""What a user can do wrong with ``predict``: one clear line on standard error, exit status 2, nothing invented."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner

import e2e
from costmodel.base.errors import InputError
from e2e.capture import known_models
from e2e.commands.cli import app

SCRIPT = """
import argparse, sys
import torch

def late(batch_size):
    model = torch.nn.Linear(4, 4)
    return model, lambda: model(torch.zeros(batch_size, 5, device="cuda")).sum().backward()

def large(batch_size):
    model = torch.nn.Linear(2**16, 2**16)
    return model, lambda: model(torch.zeros(batch_size, 2**16, device="cuda")).sum().backward()

def strange(batch_size):
    library = torch.library.Library("mine", "FRAGMENT")
    library.define("strange(Tensor x) -> Tensor")
    library.impl("strange", torch.empty_like, "Meta")
    model = torch.nn.Linear(64, 64)
    model.library = library
    return model, lambda: torch.ops.mine.strange(model(torch.zeros(batch_size, 64, device="cuda")).detach())

def other(batch_size):
    return 3

def quits(batch_size):
    model = torch.nn.Linear(4, 4).cuda()
    def step():
        model(torch.zeros(batch_size, 4, device="cuda")).sum().backward()
        sys.exit(0)
    return model, step

def quits_early(batch_size):
    sys.exit("no data")

def parses(batch_size):
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=4)
    model = torch.nn.Linear(parser.parse_args().width, 4).cuda()
    def step():
        print("loss", model(torch.zeros(batch_size, 4, device="cuda")).sum().item())
    return model, step
"""


def predict(*arguments: object):
    return CliRunner().invoke(app, ["predict", *map(str, arguments)])


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


def the_line(done, status: int = 2) -> str:
    assert done.exit_code == status
    *before, last = done.stderr.strip().splitlines()
    assert not before, before
    return last


def test_a_step_that_does_not_fit_is_shown_and_ends_with_4(script):
    done = predict("--script", f"{script}:large", "--gpu", "t4", "--json")
    assert "does not fit: " in the_line(done, 4) and "t4 has 14.2 GiB for tensors" in the_line(done, 4)
    record = json.loads(done.stdout)
    assert record["fits"] is False and record["peak_memory_bytes"] > 2 * 4 * 2**32


def test_an_unknown_operator_is_counted_listed_and_lowers_the_coverage(script):
    done = predict("--script", f"{script}:strange", "--gpu", "v100-pcie-32gb", "--mode", "inference", "--json")
    record = json.loads(done.stdout)
    assert any(
        "1 launches of operators without a model" in line and "mine::strange (1)" in line for line in record["warnings"]
    )
    assert record["coverage"]["analytic"] > 0


def test_a_script_that_fails_late_shows_its_own_frames_and_not_ours(script):
    done = predict("--script", f"{script}:late", "--gpu", "t4")
    assert done.exit_code == 2
    assert "train.py" in done.stderr and "e2e/capture" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {script}:late: the script failed with RuntimeError")


@pytest.mark.parametrize(("function", "said"), [("quits", ""), ("quits_early", " saying 'no data'")])
def test_a_script_that_ends_the_program_is_an_error(script, function, said):
    done = predict("--script", f"{script}:{function}", "--gpu", "t4")
    line = the_line(done)
    assert (
        f"{script}:{function}: the script ended the program (sys.exit, os._exit or argparse){said}; it must return"
        in line
    )


def test_a_script_keeps_its_own_command_line_and_prints_beside_the_json(script, monkeypatch):
    monkeypatch.setattr("sys.argv", ["e2e", "predict", "--script", "train.py:parses"])
    done = predict("--script", f"{script}:parses", "--gpu", "t4", "--mode", "inference", "--json")
    assert done.exit_code == 0, done.stderr
    assert json.loads(done.stdout)["iteration_seconds"] > 0 and done.stderr == 2 * "loss 1.0\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "resnet-5O", "--gpu", "t4"), "nearest: resnet-50"),
        (("--model", "my-own-network", "--gpu", "t4"), "or one of bert-base, "),
        (("--model", "gpt2", "--gpu", "H100SXM"), "did you mean h100-sxm"),
        (("--model", "gpt2", "--gpu", "zx81"), "'zx81'; `python -m costmodel machines` lists all"),
        (("--model", "gpt2", "--gpu", "t4", "--dtype", "amp"), "a --script that enters torch.autocast"),
        (("--model", "gpt2", "--gpu", "t4", "--dtype", "fp16"), "write float16"),
        (("--model", "gpt2", "--gpu", "t4", "--precision", "nf4"), "--lora RANK trains adapters"),
        (("--model", "gpt2", "--gpu", "t4", "--dtype", "float8"), "--precision, such as fp8-tensorwise"),
        (("--script", "/dev/zero:f", "--gpu", "t4"), "it is a pipe or a device, not a file"),
        (("--model", "gpt2", "--gpu", "xeon-amx-2c"), "is a cpu machine"),
        (("--model", "resnet-50", "--gpu", "t4", "--sequence-length", 64), "has no sequences"),
        (("--model", "gpt2", "--gpu", "t4", "--sequence-length", 4096), "beyond its 1024 positions"),
        (("--gpu", "t4"), "give exactly one of --model"),
        (("--trace", "absent.json", "--gpu", "t4"), "absent.json: cannot be read"),
        (("--model-config", "absent.json", "--gpu", "t4"), "absent.json: cannot be read"),
    ],
)
def test_names_sizes_and_files_that_are_wrong(arguments, message):
    assert message in the_line(predict(*arguments))


def test_python_says_of_number_types_what_the_command_line_does():
    for option, name, message in (("dtype", "AMP", "torch.autocast"), ("precision", "qlora", "16 bits")):
        with pytest.raises(InputError, match=message):
            e2e.predict("gpt2", gpu="t4", **{option: name})


def test_every_built_in_model_is_listed_for_people():
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text(encoding="utf-8")
    assert [name for name in known_models() if f"`{name}`" not in page] == []


def test_a_script_that_returns_something_else(script):
    assert "must return (module, step), got int" in the_line(predict("--script", f"{script}:other", "--gpu", "t4"))
