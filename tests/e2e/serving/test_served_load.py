"""A served model under a load: what is conserved, what grows with what, and what the figures say."""

from __future__ import annotations

import gzip
import json
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import e2e
from e2e.serving.serving_answer import ServingAnswer, serve
from e2e.serving.serving_report import users_curve, write_serving_page, write_serving_timeline
from e2e.serving.serving_request import ServingRequest
from e2e.serving.serving_result import ServingResult, serving_result

BASE: dict[str, Any] = {
    "model": "llama-3.1-8b", "gpu": "h100-sxm", "input_length": 512, "output_length": 64, "concurrency": 8,
    "requests": 40,
}  # fmt: skip


@lru_cache
def _answer(given: tuple[tuple[str, Any], ...]) -> ServingAnswer:
    return serve(ServingRequest(**dict(given)))


def answer(**changed: Any) -> ServingAnswer:
    """The answer to :data:`BASE` with options ``changed``; ``None`` leaves one out."""
    given = {**BASE, **changed}
    return _answer(tuple((name, value) for name, value in given.items() if value is not None))


def figures(**changed: Any) -> ServingResult:
    """Its figures."""
    return serving_result(answer(**changed))


# --- conservation -----------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ["vllm", "sglang", "trtllm"])
@pytest.mark.parametrize("load", [{"concurrency": 8}, {"concurrency": None, "rate": 20.0}])
def test_every_request_is_served_whole(engine: str, load: dict[str, Any]):
    found = answer(engine=engine, shortest_length=0.5, **load)
    run, sent = found.run, found.workload
    assert sent.count == 40 and (run.first > run.sent).all()
    assert ((run.last > run.first) | (sent.outputs == 1)).all()
    assert sum(run.gap_tokens) == pytest.approx((sent.outputs - 1).sum())
    assert run.prompt_tokens == sent.inputs.sum()
    # Tokens of one sequence arrive in its decoding time.
    assert np.dot(run.gaps, run.gap_tokens) == pytest.approx((run.last - run.first).sum())


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_pauses_of_preempted_sequences_are_between_their_tokens(engine: str):
    found = answer(engine=engine, gpu="l40s", input_length=100, output_length=1024, concurrency=300, requests=300)
    assert found.run.preempted and np.average(found.run.gaps, weights=found.run.gap_tokens) == pytest.approx(
        found.tpot_seconds.mean()
    )


def test_lengths_are_drawn_between_the_shortest_and_the_longest():
    load = answer(shortest_length=0.8).workload
    assert load.inputs.min() >= 0.8 * 512 and load.inputs.max() <= 512
    assert load.inputs.mean() == pytest.approx(0.9 * 512, rel=0.01)


def test_requests_arrive_at_the_asked_rate():
    arrivals = answer(concurrency=None, rate=20.0, requests=100).workload.arrivals
    assert arrivals is not None and arrivals[0] == 0 and arrivals[-1] == pytest.approx(100 / 20, rel=0.05)
    assert np.std(np.diff(arrivals)) == pytest.approx(1 / 20, rel=0.3)


def test_little_law():
    """Sequences in the system = arrivals per second x their time in it."""
    found = answer(concurrency=None, rate=20.0, requests=100)
    run = found.run
    moments = np.linspace(0, run.last.max(), 20_001)
    inside = (run.sent[:, None] <= moments) & (moments < run.last[:, None])
    inflow = len(run.sent) / run.last.max()
    assert inside.sum(axis=0).mean() == pytest.approx(inflow * (run.last - run.sent).mean(), rel=0.01)


def test_the_same_request_has_the_same_answer():
    assert serving_result(serve(ServingRequest(**BASE))) == serving_result(serve(ServingRequest(**BASE)))


# --- relations --------------------------------------------------------------------------------------


def test_more_gpus_are_faster_for_each_user():
    one, two = (figures(gpus=gpus) for gpus in (1, 2))
    assert two.tpot_seconds.mean < one.tpot_seconds.mean and two.ttft_seconds.mean < one.ttft_seconds.mean
    assert two.output_tokens_per_second_per_gpu < one.output_tokens_per_second_per_gpu


def test_faster_memory_decodes_faster():
    assert figures(gpu="h200-sxm").tpot_seconds.mean < figures().tpot_seconds.mean
    assert figures(gpu="h200-sxm").cache["tokens"] > figures().cache["tokens"]


@pytest.mark.parametrize("gpu", ["h100-sxm", "a100-sxm-80gb"])  # the second one multiplies 16 bits
def test_weights_of_fewer_bits_decode_faster_and_leave_room(gpu: str):
    small, large = figures(gpu=gpu, precision="weights=fp8"), figures(gpu=gpu)
    assert small.tpot_seconds.mean < large.tpot_seconds.mean
    assert small.memory["weight_bytes"] < large.memory["weight_bytes"] and small.cache["tokens"] > large.cache["tokens"]


def test_a_version_that_is_known_from_recipes_alone_says_so():
    told = figures(engine="vllm=0.12", requests=8).notes
    assert any("behind Dynamo: a budget of" in each for each in told)
    by_its_own_budget = [each for each in figures(engine="sglang=0.5.1", requests=8).notes if "Dynamo" in each]
    assert by_its_own_budget == [
        "SGLang 0.5.1 is taken as NVIDIA's recipes start it behind Dynamo; name a later version for its own server"
    ]
    for engine in ("vllm=0.11", "vllm=0.13", "sglang=0.5.0", "sglang=0.5.2", "sglang", "trtllm=1.1"):
        assert not any("Dynamo" in each for each in figures(engine=engine, requests=8).notes), engine


@pytest.mark.parametrize(("asked", "experts"), [("weights=fp8,activations=fp8", "mxfp4"), ("weights=bf16", "fp8")])
def test_types_of_experts_that_a_model_does_not_have_change_nothing(asked: str, experts: str):
    told = figures(precision=f"{asked},experts={experts}")
    assert (told.tpot_seconds, told.notes) == (figures(precision=asked).tpot_seconds, figures(precision=asked).notes)


def test_cache_of_eight_bits_holds_twice_the_tokens():
    assert figures(precision="kv=fp8").cache["tokens"] == pytest.approx(2 * figures().cache["tokens"], rel=0.001)


def test_shorter_prompts_start_earlier():
    assert figures(input_length=128).ttft_seconds.mean < figures().ttft_seconds.mean


def test_the_first_message_waits_for_as_many_tokens_as_it_holds():
    one, ten = answer(engine="sglang"), answer(engine="sglang", engine_options="stream=10")
    assert ten.ttft_seconds == pytest.approx(one.ttft_seconds + 9 * one.tpot_seconds)
    assert ten.tpot_seconds == pytest.approx(one.tpot_seconds * 54 / 63)


def test_more_users_wait_longer_and_get_more_together():
    results = [figures(concurrency=users, requests=5 * users) for users in (1, 8, 32)]
    assert [each.tpot_seconds.mean for each in results] == sorted(each.tpot_seconds.mean for each in results)
    assert [each.output_tokens_per_second for each in results] == sorted(
        each.output_tokens_per_second for each in results
    )


def test_a_small_cache_limits_and_a_large_one_does_not():
    tight = figures(concurrency=64, requests=128, engine_options="memory-share=0.235")
    wide = figures(concurrency=64, requests=128)
    assert tight.cache["tokens"] < wide.cache["tokens"] and tight.ttft_seconds.mean > wide.ttft_seconds.mean
    assert tight.bound == "cache" and wide.bound != "cache" and tight.cache["most_used_share"] <= 1


def test_arrivals_at_a_low_rate_are_like_one_user():
    slow, one = figures(concurrency=None, rate=0.2, requests=20), figures(concurrency=1, requests=20)
    assert slow.tpot_seconds.mean == pytest.approx(one.tpot_seconds.mean, rel=0.02)
    assert slow.ttft_seconds.p50 == pytest.approx(one.ttft_seconds.p50, rel=0.05)


def test_overload_is_told():
    """A rate above what many users get from the same GPU."""
    most = figures(concurrency=64, requests=128).requests_per_second
    assert figures(concurrency=None, rate=3 * most, requests=400).overloaded
    assert not figures(concurrency=None, rate=most / 4, requests=100).overloaded


def test_balanced_experts_are_no_slower_than_uneven_ones():
    moe = {"model": "qwen3-30b-a3b", "gpus": 4, "parallel": "tp=4,ep=4"}
    even, uneven = (figures(routing=routing, **moe) for routing in ("balanced", "power-law=1.2"))
    assert even.ttft_seconds.mean <= uneven.ttft_seconds.mean * 1.01


# --- figures ----------------------------------------------------------------------------------------


def test_figures_are_in_order():
    found = figures(shortest_length=0.5)
    for each in (found.ttft_seconds, found.tpot_seconds, found.itl_seconds, found.request_seconds):
        assert 0 < each.p50 <= each.p90 <= each.p99 and each["mean"] == each.mean
    for low, value, high in (
        (found.ttft_interval_seconds[0], found.ttft_seconds.mean, found.ttft_interval_seconds[1]),
        (found.tpot_interval_seconds[0], found.tpot_seconds.mean, found.tpot_interval_seconds[1]),
        (found.output_tokens_per_second_interval[0], found.output_tokens_per_second,
         found.output_tokens_per_second_interval[1]),
    ):  # fmt: skip
        assert 0 < low < value < high
    assert found.tokens_per_second_per_user == pytest.approx(1 / found.tpot_seconds.mean)
    assert sum(found.bound_shares.values()) == pytest.approx(1) and sum(found.coverage.values()) == pytest.approx(1)
    assert found.bound == next(iter(found.bound_shares))


def test_typical_steps_stay_below_what_the_gpu_can_do():
    for each in (figures(), figures(model="gpt-oss-20b"), figures(model="deepseek-v2-lite")):
        for step in (each.decode_step, each.prefill_step):
            assert 0 < step.bandwidth_share < 1.05 and 0 < step.arithmetic_share < 1
            assert step.lower < 1 < step.upper and sum(step.parts.values()) == pytest.approx(step.device_seconds)


def test_goodput_counts_requests_that_meet_their_targets():
    found = answer()
    between = float(np.median(found.ttft_seconds)) + 1e-9
    met = figures(ttft=between).goodput
    assert met is not None and met["share"] == pytest.approx((found.ttft_seconds <= between).mean())
    assert figures(tpot=1e-6).goodput == {"share": 0, "requests_per_second": 0} and figures().goodput is None


def test_a_fixed_batch():
    found = answer(concurrency=16, requests=16, shortest_length=1)
    assert len(set(found.run.last.tolist())) <= 2 and found.workload.count == 16


def test_python_and_json_have_the_same_record():
    result = e2e.serve("llama-3.1-8b", **{name: value for name, value in BASE.items() if name != "model"})
    text = json.loads(json.dumps(result.to_json(), allow_nan=False))
    assert text["ttft_seconds"]["p90"] == result.ttft_seconds.p90 and text["fits"] is True
    assert text["request"]["concurrency"] == 8 and list(result.tpot_interval_seconds) == text["tpot_interval_seconds"]
    assert {"goodput", "bound", "bound_shares", "overloaded", "coverage", "notes", "cache", "memory"} <= set(text)


# --- files ------------------------------------------------------------------------------------------


def test_timeline(tmp_path):
    path = tmp_path / "serve.json.gz"
    write_serving_timeline(answer(), path)
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    tracks = {each["args"]["name"] for each in events if each["ph"] == "M"}
    assert {"vLLM", "GPU", "host between steps", "requests", "request 0"} <= tracks
    gpu = [each for each in events if each["ph"] == "X" and (each["pid"], each["tid"]) == (1, 1)]
    ends = [each["ts"] + each["dur"] for each in gpu]
    assert len(gpu) > 64 and all(end <= each["ts"] + 1e-3 for end, each in zip(ends, gpu[1:], strict=False))


def test_page(tmp_path):
    path = tmp_path / "serve.html"
    found = answer(model="llama-3.2-1b", concurrency=2, requests=4)
    curve = users_curve(found)
    assert [users for users, _ in curve] == [1, 2, 4, 8, 16, 32, 64]
    assert [each.tokens_per_second_per_user for _, each in curve] == sorted(
        (each.tokens_per_second_per_user for _, each in curve), reverse=True
    )
    write_serving_page(found, serving_result(found), path)
    page = path.read_text()
    assert "tokens/s per user" in page and page.count("<svg") == 2
    assert page.count(" on average (80% interval ") == 2 and "TPOT, with the 80% interval of its mean" in page


def test_curve_of_a_trace_whose_beginnings_are_routed(tmp_path):
    line = '{"timestamp": 0, "input_length": 1100, "output_length": 8, "hash_ids": [1, 2]}\n'
    (tmp_path / "trace.jsonl").write_text(3 * line)
    asked = ServingRequest(model="llama-3.2-1b", gpu="l4", replicas=2, router="prefix", concurrency=1,
                           requests=tmp_path / "trace.jsonl")  # fmt: skip
    assert users_curve(serve(asked))[0][1].request["input_length"] == 1100


def test_the_loop_of_the_example_is_the_scheduler():
    example = Path(__file__).parents[3] / "examples" / "serving_loop.py"
    said: dict[str, Any] = {}
    exec(example.read_text(encoding="utf-8").replace("print(", "result = ("), said)
    found = answer(input_length=1024, output_length=64, concurrency=16, requests=160)
    assert said["result"] == pytest.approx((found.ttft_seconds.mean(), found.tpot_seconds.mean()), rel=0.02)
