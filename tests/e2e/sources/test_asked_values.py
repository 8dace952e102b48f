"""What a prediction says it was asked: every option that counts, and the defaults that were taken."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

import e2e
from costmodel.operators.experts import ExpertRouting
from e2e.report.text_report import render
from e2e.step.options import parse_routing, routing_text

torch = pytest.importorskip("torch")


def make_step(batch_size=48, sequence_length: int = 16):
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.randn(batch_size, sequence_length, 64)

    def step():
        optimizer.zero_grad()
        model(data).sum().backward()
        optimizer.step()

    return model, step


def told(prediction) -> tuple[dict[str, str], dict[str, str]]:
    """What was given, and what was taken by default."""
    given = {each.option: each.value for each in prediction.asked if each.given}
    return given, {each.option: each.value for each in prediction.asked if not each.given}


def test_a_script_tells_its_own_sizes():
    own = e2e.predict(script=make_step, gpu="h100-sxm")
    given, default = told(own)
    assert given == {"--script": f"{__file__}:make_step", "--gpu": "h100-sxm"}
    assert default["--batch-size"] == "48 (the script's own)" and default["--compile"] == "no (eager)"
    rate = own.throughput
    assert (rate.samples, rate.sequence_length, rate.tokens) == (48, 16, 768)
    assert rate.tokens_per_second == pytest.approx(768 / own.iteration_seconds)
    asked = e2e.predict(script=make_step, gpu="h100-sxm", batch_size=4, compile=True, optimizer="fused")
    given, default = told(asked)
    assert given["--batch-size"] == "4" and given["--compile"] == "yes" and given["--optimizer"] == "fused"
    assert asked.throughput.samples == 4 and "--batch-size" not in default
    assert asked.board.memory_bytes == 80 << 30 and asked.board.power_limit_watts == 700


def test_a_built_in_model_says_what_it_took():
    step = e2e.predict("gpt2", gpu="a100-sxm-40gb", sequence_length=32)
    given, default = told(step)
    assert given == {"--model": "gpt2", "--sequence-length": "32", "--gpu": "a100-sxm-40gb"}
    assert step.board.name == "a100-sxm-40gb" and step.board.memory_bytes == 40 << 30
    for option, value in {
        "--batch-size": "1",
        "--mode": "train (forward, backward, optimizer)",
        "--recipe": "plain (PyTorch's modules and AdamW)",
        "--dtype": "bfloat16 (FP32 master weights and states)",
        "--attention": "flash (fused)",
        "--optimizer": "foreach (AdamW)",
        "--cuda-graph": "no",
    }.items():
        assert default[option] == value
    fused = e2e.predict("gpt2", gpu="a100-sxm-40gb", sequence_length=32, optimizer="fused")
    assert fused.optimizer_seconds < step.optimizer_seconds


def test_questions_are_told_as_they_were_asked(tmp_path):
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gpt2", "n_layer": 2}')
    asked = e2e.predict(
        model_config=config, gpu="a100-sxm-40gb", sequence_length=32, what_if=("host=1.5x", "batch=2+kernels:gemm=2x")
    )
    assert told(asked)[0]["--what-if"] == "host=1.5x batch=2+kernels:gemm=2x"


def test_texts_of_routing_are_what_was_asked():
    for text in ("balanced", "power-law=1.2", "power-law=1.2,capacity=1.25"):
        assert routing_text(parse_routing(text)) == text
    assert routing_text(ExpertRouting(capacity=1.5)) == "capacity=1.5"


@pytest.mark.parametrize("model", ["gpt2", "resnet-50", "dlrm"])
def test_a_forward_pass_is_told_without_the_words_of_training_and_of_other_models(model: str):
    step = e2e.predict(model, gpu="v100-sxm2-16gb", mode="inference")
    shown = StringIO()
    render(step, Console(file=shown, width=400))
    for word in ("AdamW", "backward", "optimizer", "master weights", "BF16"):
        assert word not in shown.getvalue()
    assert ("prefill" in shown.getvalue()) == (model == "gpt2")
