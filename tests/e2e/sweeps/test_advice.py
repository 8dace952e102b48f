"""What to change: found by predicting it."""

from __future__ import annotations

from dataclasses import replace

import pytest

import e2e
from e2e.explain.prediction import BEST, Alternative, sort_alternatives
from e2e.parallelism.spec import parse_parallel
from e2e.sources.requests import Model, SpreadModel
from e2e.sweeps.advice import possible_changes

torch = pytest.importorskip("torch")


def make_step(batch_size):
    model = torch.nn.Sequential(torch.nn.Linear(256, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 256)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(batch_size, 256, device="cuda")

    def step():
        optimizer.zero_grad()
        model(data).square().mean().backward()
        optimizer.step()

    return model, step


def test_every_alternative_is_what_predict_says_of_it_and_the_best_come_first():
    lines: list[str] = []
    asked = {"script": make_step, "gpu": "h100-sxm", "batch_size": 64}
    found = e2e.predict(**asked, advice=lines.append)
    advice = found.advice
    assert advice is not None and not advice.stopped and not advice.left
    by_change = {each.change: each for each in advice.alternatives}
    for change, options in {
        "--dtype tf32": {"dtype": "tf32"},
        "--compile": {"compile": True},
        "--cuda-graph": {"cuda_graph": True},
        "--optimizer fused": {"optimizer": "fused"},
        "--batch-size 128": {"batch_size": 128},
    }.items():
        alone = e2e.predict(**{**asked, **options})
        assert by_change[change].iteration_seconds == alone.iteration_seconds
        each = (found.iteration_seconds / 64) / (alone.iteration_seconds / alone.throughput.samples)
        assert by_change[change].gain == pytest.approx(each)
    together, *alone = advice.best
    gains = [each.gain for each in alone]
    assert gains == sorted(gains, reverse=True) and len({each.kind for each in alone}) == len(gains) == BEST
    assert together.kind == "together" and "--cuda-graph" in together.change
    assert together.gain > max(each.gain for each in alone if each.kind != "batch")
    assert any("--compile" in line for line in lines)


def test_a_script_is_run_again_only_where_the_setting_changes_what_it_calls():
    """Of 16 bits there is no TF32 to try, and questions are asked of the step as it is alone."""
    made: list[int] = []

    class Counted:
        """Called as a function is; what is compared by its fields has no hash."""

        __hash__ = None  # type: ignore[assignment]

        def __call__(self, batch_size=4):
            made.append(batch_size)
            model = torch.nn.Linear(256, 256).to("cuda", torch.bfloat16)
            optimizer = torch.optim.AdamW(model.parameters())

            def step():
                model(torch.randn(batch_size, 256, device="cuda", dtype=torch.bfloat16)).square().mean().backward()
                optimizer.step()

            return model, step

    said: list[str] = []
    found = e2e.predict(script=Counted(), gpu="t4", advice=said.append, what_if=["batch=6"])
    searched = [line for line in said if "advice, batch size" in line]
    tried = {each.change for each in found.advice.alternatives}
    assert {"--compile", "--cuda-graph", "--optimizer fused", "--batch-size 8"} <= tried and "--dtype tf32" not in tried
    # As it is and in the question: once each.
    once = [made.count(size) for size in (6,)]
    assert once == [1] and found.what_if[1].gain_per_sample == pytest.approx(found.what_if[1].gain * 6 / 4)
    fused = sum("--optimizer fused" in each.change for each in found.advice.alternatives)
    larger = sum(each.kind == "batch" for each in found.advice.alternatives)
    assert len(made) <= 2 + fused + larger + len(searched)


def test_the_largest_batch_fits_and_one_more_does_not():
    found = e2e.predict(script=make_step, gpu="t4", batch_size=64, advice=True)
    largest = found.advice.largest_batch
    assert largest is not None and not largest.at_least
    at, beyond = (e2e.predict(script=make_step, gpu="t4", batch_size=largest.batch_size + more) for more in (0, 1))
    assert at.fits is True and beyond.fits is not True
    assert at.ranks[0].allocated_bytes == largest.allocated_bytes
    assert any(each.change == f"--batch-size {largest.batch_size}" for each in found.advice.alternatives)


def test_ctrl_c_keeps_what_is_known():
    def say(line: str) -> None:
        if "2 of" in line:
            raise KeyboardInterrupt

    found = e2e.predict(script=make_step, gpu="h100-sxm", batch_size=64, advice=say)
    assert found.advice.stopped == "stopped with Ctrl-C" and len(found.advice.alternatives) == 2
    assert "--cuda-graph" in found.advice.left
    assert found.iteration_seconds > 0


def test_what_cannot_be_predicted_says_why_and_comes_last():
    slow, fast = Alternative("slow", "", 2.0, 1, 0.5, 1, True), Alternative("fast", "", 1.0, 1, 1.5, 1, True)
    full, broken = Alternative("full", "", 1.0, 1, 3.0, 9, False), Alternative("broken", "", problem="no")
    assert [each.change for each in sort_alternatives([broken, full, slow, fast])] == ["fast", "slow", "full", "broken"]
    assert [each.helps for each in (slow, fast, full, broken)] == [False, True, False, False]


def changes(request: Model) -> list[str]:
    step = e2e.predict("gpt2", gpu=request.gpu, sequence_length=32, dtype="float32")
    return [each.change for each in possible_changes(request, step)]


def test_only_what_the_step_does_not_have_is_tried():
    plain = Model("gpt2", sequence_length=32, gpu="h100-sxm")
    expected = "--dtype tf32|--dtype bfloat16|--attention flash|--compile|--optimizer fused|--cuda-graph|--batch-size 2"
    assert set(expected.split("|")) <= set(changes(plain))
    configured = replace(plain, dtype="bfloat16", attention="flash", cuda_graph=True, compile=True, optimizer="fused")
    assert changes(configured) == ["--batch-size 2", "--batch-size 4"]
    assert "--dtype bfloat16" not in changes(replace(plain, gpu="v100-pcie-32gb"))


def test_other_ways_to_spread_a_model_see_as_many_samples():
    spec = parse_parallel("fsdp=2,tp=4,pp=2,micro-batches=8,recompute=full")
    request = SpreadModel("gpt2", batch_size=1, sequence_length=32, parallel=spec, gpu="h100-sxm", gpus=16)
    step = e2e.predict("gpt2", gpu="h100-sxm", sequence_length=32)
    others = {}
    for each in possible_changes(request, step):
        other = each.apply(request)
        if each.change.startswith("--parallel"):
            others[each.change] = other.parallel
            samples = other.samples * other.parallel.micro_batches * other.parallel.replicas
            assert samples == 16 and other.parallel.world_size == 16
    assert any(other.tp == 2 for other in others.values()) and any(other.pp == 1 for other in others.values())
    assert any(other.recompute == "none" for other in others.values())
    assert any(other.sequence_parallel for other in others.values())
