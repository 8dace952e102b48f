"""What ``predict`` refuses before long work: models beyond any GPU, other inputs than tokens, files that cannot be."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from typer.testing import CliRunner

from e2e.capture import recorder, script_errors
from e2e.commands.cli import app

GPT2 = {"model_type": "gpt2", "n_layer": 1, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 64}
LLAMA = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 2, "vocab_size": 64}
PART = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_hidden_layers": 1}
CLIP = {
    "model_type": "clip",
    "text_config": {**PART, "vocab_size": 64},
    "vision_config": {**PART, "image_size": 32, "patch_size": 16},
}


def predict(*arguments: object):
    return CliRunner().invoke(app, ["predict", "--gpu", "t4", *map(str, arguments)])


def the_line(*arguments: object) -> str:
    """The one line of a refusal."""
    done = predict(*arguments)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: ")
    return line


@pytest.fixture
def configuration(tmp_path: Path):
    def write(**content: Any) -> Path:
        path = tmp_path / "config.json"
        path.write_text(json.dumps(content))
        return path

    return write


@pytest.fixture
def script(tmp_path: Path):
    """The function ``f`` of a script, whose step is ``step``, with a layer and rows of data on the GPU."""

    def write(step: str, layer: str = "torch.nn.Linear(8, 8).cuda()") -> str:
        (tmp_path / "train.py").write_text(
            "import numpy as np\nimport torch\n\ndef f():\n"
            f"    layer, rows = {layer}, torch.randn(4, 8, device='cuda')\n\n"
            f"    def step():\n        {step}\n\n    return layer, step\n"
        )
        return f"{tmp_path / 'train.py'}:f"

    return write


@pytest.fixture
def nothing_is_captured(monkeypatch: pytest.MonkeyPatch):
    def captured(*_: object, **__: object) -> None:
        raise AssertionError("the step was captured")

    monkeypatch.setattr(recorder.Recorder, "__enter__", captured)


# --- models beyond any GPU ------------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_is_captured")
def test_ten_trillion_parameters_are_refused_by_their_size(configuration):
    sizes = {"hidden_size": 2**16, "intermediate_size": 2**18, "num_attention_heads": 512, "num_hidden_layers": 146}
    line = the_line("--model-config", configuration(**{**LLAMA, **sizes}))
    assert "10 T parameters take 18.3 TiB, 1168 times the memory of one t4" in line and "--parallel" in line


def test_a_script_of_ten_trillion_parameters_is_refused_by_its_size(script):
    large = "torch.nn.ModuleList(torch.nn.Linear(10**6, 10**6, device='cuda') for _ in range(10))"
    line = the_line("--script", script("raise AssertionError", large))
    assert "train.py:f: 10 T parameters" in line


@pytest.mark.parametrize("parallel", [(), ("--gpus", 2, "--parallel", "dp=2")])
@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({**LLAMA, "num_hidden_layers": 2001}, "num_hidden_layers is 2,001"),
        ({**GPT2, "n_layer": 10**9}, "n_layer is 1,000,000,000"),
        ({**CLIP, "vision_config": {**PART, "num_hidden_layers": 10**6}}, "num_hidden_layers is 1,000,000"),
    ],
)
def test_more_layers_than_any_model_has_are_refused(configuration, content, told, parallel):
    line = the_line("--model-config", configuration(**content), *parallel)
    assert told in line and "at most 2,000 layers" in line


# --- other inputs than tokens ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({**CLIP, "architectures": ["CLIPModel"]}, "CLIPModel takes pixel_values beside token ids"),
        (CLIP, "'clip' has no causal language model; name its class in architectures"),
        ({"model_type": "vit", "architectures": ["ViTModel"]}, "ViTModel takes pixel_values, not token ids"),
    ],
)
def test_models_of_pictures_are_told_what_they_take(configuration, content, told):
    line = the_line("--model-config", configuration(**content), "--sequence-length", 8)
    assert told in line and "config.json" in line


# --- files that are written -----------------------------------------------------------------------


@pytest.mark.usefixtures("nothing_is_captured")
@pytest.mark.parametrize("option", ["--report", "--timeline"])
def test_files_that_cannot_be_written_are_told_before_any_work(configuration, tmp_path, option):
    model = ("--model-config", configuration(**GPT2))
    for path, told in (
        (tmp_path, "is a directory; name a file"),
        (tmp_path / "none" / "x", f"there is no folder {tmp_path / 'none'}"),
        (tmp_path / "config.json" / "x", "Not a directory"),
        (tmp_path / ("x" * 300), "File name too long"),
        (tmp_path / "config.json", "is the file of --model-config; name another"),
    ):
        line = the_line(*model, option, path)
        assert line.startswith(f"error: {option} {path}: ") and told in line
    assert json.loads((tmp_path / "config.json").read_text()) == GPT2
    both = ("--report", tmp_path / "same", "--timeline", tmp_path / "same")
    assert "is the file of --timeline" in the_line(*model, *both)
    assert [each.name for each in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.usefixtures("nothing_is_captured")
def test_a_report_that_no_browser_opens_is_told_before_any_work(configuration, tmp_path):
    told = "a report is a page for a browser; name a file that ends in .html"
    for name in ("x.txt", "x", "x.html.gz"):
        line = the_line("--model-config", configuration(**GPT2), "--report", tmp_path / name)
        assert line == f"error: --report {tmp_path / name}: {told}"


@pytest.mark.usefixtures("nothing_is_captured")
@pytest.mark.parametrize("text", ["none.json", "nowhere", "folder/none.json.gz", "profiles*.json"])
def test_overheads_that_are_not_there_are_told_before_any_work(configuration, text):
    assert text in the_line("--model-config", configuration(**GPT2), "--overheads", text)


# --- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--batch-size", "--sequence-length", "--lora", "--gpus", "--nodes"])
def test_sizes_beyond_all_sense_are_told(configuration, option):
    line = the_line("--model-config", configuration(**GPT2), option, 10**30)
    assert line == f"error: {option} {10**30}: must be at most 2,147,483,647"


@pytest.mark.parametrize("parallel", [(), ("--gpus", 2, "--parallel", "dp=2")])
def test_a_tensor_larger_than_any_memory_is_told(configuration, parallel):
    model = configuration(**{**LLAMA, "num_hidden_layers": 1, "max_position_embeddings": 2**31})
    sizes = ("--batch-size", 2**31 - 1, "--sequence-length", 2**31 - 1)
    line = the_line("--model-config", model, *sizes, *parallel)
    assert "elements is larger than any memory; give a smaller batch, shorter sequences" in line


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ("--ranks", "\u00b2"),
        ("--ranks", "9" * 5000),
        ("--network", "infiniband-ndr:\u00b2"),
        ("--network", "infiniband-ndr:"),
        ("--parallel", "dp=\u00b2"),
        ("--parallel", f"dp={'9' * 5000}"),
        ("--what-if", "batch=\u00b2"),
        ("--what-if", f"batch={'9' * 5000}"),
    ],
)
def test_digits_that_are_no_numbers(configuration, option, text):
    options = {"--gpus": 16, "--parallel": "dp=16"} if option in ("--network", "--parallel") else {}
    words = [each for pair in (options | {option: text}).items() for each in pair]
    assert option in the_line("--model-config", configuration(**GPT2), *words)


def test_a_long_capture_tells_how_far_it_is(script, monkeypatch):
    monkeypatch.setattr(script_errors, "FIRST_NOTE_SECONDS", 0.0)
    slow = "import time; layer(rows); time.sleep(1.5)"
    done = predict("--script", script(slow), "--mode", "inference")
    assert done.exit_code == 0
    assert re.search(r"^capturing: \d+ operator calls after \d+ s$", done.stderr, re.MULTILINE)
