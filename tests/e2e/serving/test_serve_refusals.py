"""What ``e2e serve`` refuses, in one line and before any work."""

from __future__ import annotations

import json
import random
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import e2e
from costmodel.base.errors import InputError, MachineError, ProjectError, ShortageError
from e2e.capture.models.configurations import served, with_defaults
from e2e.capture.models.served_model import served_model
from e2e.commands.cli import app

GPU: dict[str, Any] = {"gpu": "h100-sxm"}
BASE = {"model": "llama-3.1-8b", **GPU}


def serve_line(*words: str) -> Any:
    return CliRunner().invoke(app, ["serve", *words])


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (GPU, "give --model NAME or --model-config FILE"),
        ({"model": "llama-3.1-8b"}, "give --gpu NAME"),
        ({**BASE, "model_config": "x.json"}, "give --model NAME or --model-config FILE"),
        ({**GPU, "model": "lama-3.1-8b"}, "did you mean llama-3.1-8b"),
        ({**GPU, "model": "bert-base-uncased"}, "decoders only"),
        ({**GPU, "model": "resnet-50"}, "decoders only"),
        ({**GPU, "model_config": "none.json"}, "none.json: cannot be read"),
        ({**BASE, "engine": "vlm"}, "did you mean vllm"),
        ({**BASE, "engine": "vllm=latest"}, "'latest' is no version"),
        ({**BASE, "engine_options": "token-bugdet=1"}, "did you mean token-budget"),
        ({**BASE, "engine_options": "memory-share=nan"}, "memory-share: Input should be"),
        ({**BASE, "engine_options": "server=5"}, "is not a quantity"),
        ({**BASE, "engine_options": "sequences=1.5"}, "sequences: Input should be a valid integer"),
        ({**BASE, "engine_options": "schedule=fair"}, "schedule: Input should be 'mixed'"),
        ({**BASE, "precision": "fp8-tensorwise"}, "is a recipe of training"),
        ({**BASE, "precision": "weights=fp7"}, "choose one of bf16"),
        ({**BASE, "gpu": "a100-sxm-80gb", "precision": "activations=fp8"}, "no arithmetic in FP8"),
        ({**BASE, "gpu": "v100-sxm2-32gb"}, "Ampere and later"),
        ({**BASE, "gpus": 3}, "heads of attention do not divide"),
        ({**BASE, "gpus": 0}, "--gpus 0: must be a whole number"),
        ({**BASE, "parallel": "tp=2"}, "do not divide --gpus 1"),
        ({**BASE, "parallel": "sp=2"}, "write NAME=VALUE with tp"),
        ({**GPU, "model": "qwen3-30b-a3b", "gpus": 4, "parallel": "tp=4,ep=3"}, "must divide tp=4"),
        ({**BASE, "input_length": 0}, "--input-length 0: must be a whole number"),
        ({**BASE, "output_length": 10**12}, "--output-length 1000000000000: must be at most"),
        ({**BASE, "shortest_length": float("nan")}, "give a finite number"),
        ({**BASE, "shortest_length": 1.5}, "must be from"),
        ({**BASE, "concurrency": 0}, "--concurrency 0: must be a whole number"),
        ({**BASE, "concurrency": 4, "rate": 1.0}, "give one"),
        ({**BASE, "rate": float("inf")}, "give a finite number"),
        ({**BASE, "rate": 0.0}, "--rate 0.0: must be from"),
        ({**BASE, "rate": 1.0, "requests": 5, "duration": "5s"}, "give one"),
        ({**BASE, "rate": 1e5, "duration": "1000s"}, "at most 1,000,000"),
        ({**BASE, "requests": 10**7}, "at most 1,000,000"),
        ({**BASE, "requests": "none.csv"}, "none.csv: cannot be read"),
        ({**BASE, "rate": 1.0, "requests": "none.csv"}, "leave it out"),
        ({**BASE, "requests": "-4"}, "--requests -4: must be a whole number, 1 or more, or the file"),
        ({**BASE, "requests": "1e3"}, "--requests 1e3: must be a whole number, 1 or more, or the file"),
        ({**BASE, "requests": "none.csv", "input_length": 8}, "--input-length: none.csv says how requests are"),
        ({**BASE, "requests": "none.csv", "prefix_length": 8}, "--prefix-length: none.csv says how requests are"),
        ({**BASE, "prefix_share": 0.5}, "give --prefix-length too"),
        ({**BASE, "router": "prefix", "replicas": 2}, "give --prefix-length too"),
        ({**BASE, "router": "least-loaded"}, "--router least-loaded: one copy serves all; give --replicas"),
        ({**BASE, "report": "x.txt"}, "--report x.txt: a report is a page for a browser"),
        ({**BASE, "router": "least-loaded", "disaggregate": "prefill=1,decode=1"}, "leave one out"),
        ({**BASE, "gpus": 2, "parallel": "tp=2,ep=2"}, "llama-3.1-8b has no experts"),
        (
            {**BASE, "speculate": "tokens=1,acceptance=1,draft=lama-3.1-8b"},
            "config.json (--model-config or draft=FILE)",
        ),
        ({**BASE, "ttft": "fast"}, "--ttft fast"),
        ({**BASE, "tpot": "40"}, "'40' is not a quantity"),
        ({**BASE, "tpot": "0ms"}, "above zero"),
        ({**BASE, "routing": "chaos"}, "--routing 'chaos'"),
    ],
)
def test_in_one_line(given: dict[str, Any], told: str):
    with pytest.raises(InputError) as error:
        e2e.serve(**given)
    assert told in str(error.value) and "\n" not in str(error.value) and error.value.status == 2


@pytest.mark.parametrize(("gpu", "told"), [("h100", "may be h100-pcie, h100-sxm"), ("hx100", "did you mean h100-sxm"),
                                           ("toy", "is no GPU")])  # fmt: skip
def test_gpus(gpu: str, told: str):
    with pytest.raises(MachineError, match=told):
        e2e.serve("llama-3.1-8b", gpu=gpu)


def test_an_unknown_option_of_python():
    with pytest.raises(TypeError, match="'batch_size'"):
        e2e.serve("llama-3.1-8b", gpu="h100-sxm", batch_size=4)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("{", "not valid JSON"),
        ("[1]", "must have a model_type"),
        ('{"model_type": "mamba", "hidden_size": 64}', "decoders only"),
        ('{"model_type": "jamba", "attn_layer_period": 8}', "has Mamba layers"),
        ('{"model_type": "nemotron_h", "hidden_size": 64, "hybrid_override_pattern": "MX"}', "hybrid_override_pattern"),
        ('{"model_type": "nemotron-nas", "block_configs": []}', "layers of different sizes"),
        ('{"model_type": "minimax_text_01", "attn_type_list": [0, 1]}', "lightning attention"),
    ],
)
def test_a_configuration_of_no_known_model(text: str, told: str, tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ProjectError, match=told):
        e2e.serve(model_config=path, gpu="h100-sxm")


def test_what_does_not_fit_says_how_much_is_missing():
    with pytest.raises(ShortageError, match=r"\d\d\.\d GB a GPU are missing"):
        e2e.serve("llama-3.1-70b", gpu="h100-sxm")
    done = serve_line("--model", "llama-3.1-70b", "--gpu", "h100-sxm", "--json")
    record = json.loads(done.stdout)
    assert done.exit_code == 4 and record["fits"] is False and "missing" in record["memory_shortage"]
    assert record["memory"]["weight_bytes"] > record["memory"]["usable_bytes"]
    assert done.stderr.startswith("error: llama-3.1-70b: does not fit") and done.stderr.count("\n") == 1


def test_the_command_prints_the_field_words():
    done = serve_line("--model", "llama-3.1-8b", "--gpu", "h100-sxm", "--output-length", "16", "--ttft", "500ms")
    assert done.exit_code == 0, done.stderr
    assert done.stdout.count(" on average (80% interval ") == 2  # of the means of TTFT and TPOT
    assert " output tokens/s (80% interval " in done.stdout
    for word in ("TTFT", "TPOT", "ITL", "throughput", "per user", "goodput", "limited by", "memory", "cache"):
        assert f"\n{word}" in done.stdout
    several = serve_line("--model", "llama-3.1-8b", "--gpu", "h100-sxm", "--replicas", "2", "--rate", "9",
                         "--requests", "9", "--prefix-length", "512").stdout  # fmt: skip
    assert "on 1 x h100-sxm, 2 GPUs in all" in several and "of the prompts' tokens were in it" in several
    wrong = serve_line("--model", "llama-3.1-8b", "--gpu", "h100-sxm", "--rate", "0")
    assert wrong.exit_code == 2 and wrong.stderr.count("\n") == 1


def test_damaged_configurations_are_refused_in_one_line():
    """Any value in place of any other: a model, or one line."""
    drawn, sound = random.Random(3), served("deepseek-v3.2")
    values = [0, -1, 10**9, 1.5, float("nan"), None, "x", [], [1], {"a": 1}, True]
    for _ in range(400):
        config = {**sound, **{name: drawn.choice(values) for name in drawn.sample(sorted(sound), 2)}}
        with suppress(InputError):
            model = served_model(with_defaults(config), "config.json")
            assert 1 <= model.depth <= 2000 and model.hidden >= 1
