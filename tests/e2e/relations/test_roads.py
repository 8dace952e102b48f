"""One job by several roads is one answer; what a question makes faster takes no longer; figures hang together."""

from __future__ import annotations

import json
import re
from functools import partial

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")

from hypothesis import strategies as st

from tests.e2e.relations.relation_rows import (
    CONFIGURATIONS,
    EXACT,
    HERE,
    Relation,
    answer,
    as_it_is,
    held,
    no_surer,
    one_gpu,
    same,
    same_flops,
    several,
    spread,
    to,
    widths,
)

PURE = {"recipe": "pure-bf16"}
# Whose time is that of large kernels, not of the host.
LARGE = {"config": "llama-wide", "batch_size": 8, "sequence_length": 2048}

SCRIPT = """
import torch, transformers

def make_step(batch_size, sequence_length):
    config = transformers.LlamaConfig(**SIZES, attn_implementation="sdpa", use_cache=False)
    with torch.device("cuda"):
        net = transformers.LlamaForCausalLM(config).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters())
    tokens = torch.zeros(batch_size, sequence_length, dtype=torch.long, device="cuda")

    def step():
        net(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return net, step
"""


def script() -> str:
    path = HERE / "train.py"
    path.write_text(f"SIZES = {CONFIGURATIONS['llama']!r}\n{SCRIPT}")
    return f"{path}:make_step"


def by_script(options):
    return {name: each for name, each in options.items() if name not in ("config", "recipe")} | {"script": script()}


def close(before, after, time=0.02, width=0.015):
    """Time, and the interval as wide."""
    if after.iteration_seconds != pytest.approx(before.iteration_seconds, rel=time):
        return False
    return widths(after) == pytest.approx(widths(before), abs=width)


def asked_as(question, **changed):
    """A question, and the same setting asked by itself."""
    return (to(what_if=question), to(**changed))


def answered(before, after):
    """The last row of the first is the second; what a sample gains is the ratio of both."""
    row, one, other = (
        before.what_if[-1],
        *(found.iteration_seconds / found.throughput.samples for found in (before, after)),
    )
    times = (row.iteration_seconds, *row.interval_seconds)
    return times == pytest.approx((after.iteration_seconds, *after.interval_seconds), rel=1e-9) and (
        row.worth == pytest.approx(one / other)
    )


def every_row(holds):
    """Of the step as it is and of every row of its questions."""
    return lambda before, after: all(holds(before, row) for row in after.what_if)


def no_longer(before, row):
    low, high = row.gain_interval or (row.gain, row.gain)
    return (
        row.iteration_seconds <= before.iteration_seconds * (1 + EXACT)
        and low <= row.gain * (1 + EXACT)
        and (row.gain <= high * (1 + EXACT))
    )


def unchanged(before, row):
    return row.iteration_seconds == pytest.approx(before.iteration_seconds, rel=1e-9) and row.gain == pytest.approx(1.0)


def halved(before, after):
    return after.what_if[-1].iteration_seconds == pytest.approx(before.iteration_seconds / 2, rel=0.01)


def mfu_times_time(before, after):
    """The slower step uses less of its GPUs, by as much."""
    one, other = (found.utilisation.mfu * found.iteration_seconds for found in (before, after))
    return other == pytest.approx(one, rel=EXACT)


def cost(before, after):
    return after.cost.per_step / before.cost.per_step == pytest.approx(
        after.iteration_seconds * after.gpus / (before.iteration_seconds * before.gpus)
    )


ROADS = [
    Relation(
        "a script and the sizes of its model",
        one_gpu(config="llama", batch_size=(2, 8), sequence_length=(128, 2048), **PURE),
        (as_it_is, by_script),
        close,
    ),
    Relation(
        "one GPU and one replica",
        one_gpu(config=("llama", "gpt2", "mixtral")),
        (as_it_is, to(parallel="dp=1")),
        partial(close, width=0.03),  # the host's part of a step is known to a factor
    ),
    Relation(
        "one GPU and one replica for inference",
        one_gpu(config="llama", mode="inference"),
        (as_it_is, to(parallel="dp=1")),
        close,
    ),
    Relation(
        "one GPU and one replica, compiled",
        one_gpu(config="llama", gpu=("h100-sxm", "a100-sxm-80gb")),
        (to(compile=True), to(compile=True, parallel="dp=1")),
        partial(close, time=0.05),
    ),
    Relation(
        "a recipe and what it says",
        one_gpu(config="llama", gpu=("h100-sxm", "a100-sxm-80gb")),
        (to(recipe="plain"), to(dtype="bfloat16", attention="flash")),
        same,
    ),
    Relation("replicas are what is left of the GPUs", several(), (to(parallel="tp=2"), to(parallel="tp=2,dp=4")), same),
    Relation("one node is said or not", several(), (as_it_is, to(nodes=1)), same),
    Relation("keys in any order", several(), (to(parallel="tp=2,dp=4"), to(parallel="dp=4,tp=2")), same),
]
QUESTIONS = [
    Relation(
        "another batch is the step of that batch", one_gpu(batch_size=2), asked_as("batch=8", batch_size=8), answered
    ),
    Relation(
        "another batch of several GPUs is the step of that batch",
        several(batch_size=1),
        asked_as("batch=2", batch_size=2),
        answered,
    ),
    Relation(
        "larger buckets are the step with those buckets",
        several(parallel=("dp=8", "tp=2,dp=4")),
        (to(what_if="bucket-mb=100"), spread(bucket_mb=100)),
        answered,
    ),
    Relation(
        "what is as fast as before changes nothing",
        st.one_of(one_gpu(), several()),
        (as_it_is, to(what_if=("host=1x", "kernels:.*=1x"))),
        every_row(unchanged),
    ),
    Relation(
        "what is made faster takes no longer",
        one_gpu(),
        (as_it_is, to(what_if=("host=2x", "kernels:gemm=3x", "kernels:elementwise=2x"))),
        every_row(no_longer),
    ),
    Relation(
        "what is made faster takes no longer on several GPUs",
        several(),
        (as_it_is, to(what_if=("host=2x", "kernels:gemm=2x", "kernels:allreduce|allgather=4x"))),
        every_row(no_longer),
    ),
    Relation(
        "all twice as fast takes half as long", one_gpu(), (as_it_is, to(what_if="host=2x+kernels:.*=2x")), halved
    ),
    Relation(
        "all kernels twice as fast take half as long where the GPU rules",
        one_gpu(**LARGE),
        (as_it_is, to(what_if="kernels:.*=2x")),
        halved,
    ),
]
SURE = [
    Relation(
        "several GPUs are known no better than one",
        several(gpus=None, parallel=None),
        (as_it_is, to(gpus=8, parallel="dp=8"), to(gpus=64, parallel="dp=64")),
        partial(no_surer, within=0.05),
    ),
    Relation(
        "GPUs known to be alike are known no better than one",
        several(gpus=None, parallel=None),
        (as_it_is, to(gpus=8, parallel="dp=8", speed_spread=0.0)),
        partial(no_surer, within=0.05),
    ),
    Relation(
        "a card without tables is known no better",
        one_gpu(gpu="a100-sxm-80gb", **LARGE),
        (as_it_is, to(gpu="a40")),
        partial(no_surer, within=0.02),
    ),
    Relation(
        "older libraries are known no better",
        one_gpu(gpu=("h100-sxm", "a100-sxm-80gb"), **LARGE),
        (to(recipe="hf-trainer"), to(recipe="llm-foundry")),
        partial(no_surer, within=0.02),
    ),
]
USE = [
    Relation("MFU falls as the step gets slower", several(), (as_it_is, to(speed_spread=0.1)), mfu_times_time),
    Relation(
        "MFU does not count kernels",
        one_gpu(config="llama", gpu=("h100-sxm", "a100-sxm-80gb")),
        (as_it_is, to(optimizer="fused"), to(cuda_graph=True), to(stack="te")),
        mfu_times_time,
    ),
    Relation("compilers leave the FLOPs of a model", one_gpu(), (as_it_is, to(compile=True)), same_flops),
    Relation("cost follows time and GPUs", several(price=2.0, parallel="tp=2"), (as_it_is, to(gpus=16)), cost),
]

test_roads, test_roads_thoroughly = held(ROADS)
test_questions, test_questions_thoroughly = held(QUESTIONS)
test_intervals, test_intervals_thoroughly = held(SURE)
test_use, test_use_thoroughly = held(USE)


@pytest.mark.parametrize("way", [{}, {"gpus": 2, "parallel": "tp=2"}, {"mode": "inference"}])
def test_a_built_in_model_is_its_configuration(way):
    from e2e.capture.models.configurations import PRESETS

    CONFIGURATIONS.setdefault("gpt2-whole", dict(PRESETS["gpt2"]))
    asked = {"gpu": "h100-sxm", "sequence_length": 64, **way}
    assert same(answer(asked | {"model": "gpt2"}), answer(asked | {"config": "gpt2-whole"}))


@pytest.mark.parametrize("parallel", [None, "fsdp=8"])
def test_the_text_says_what_the_record_does(parallel, capsys):
    from e2e.report.text_report import render

    found = answer({"config": "llama", "gpu": "h100-sxm", "gpus": parallel and 8, "parallel": parallel, "batch_size": 2,
                    "sequence_length": 1024})  # fmt: skip
    record = json.loads(json.dumps(found.to_json()))
    render(found)
    text = capsys.readouterr().out

    def after(words: str) -> float:
        told = re.search(words + r" *([\d.,]+)", text)
        assert told is not None, words
        return float(told[1].replace(",", ""))

    near = partial(pytest.approx, rel=0.006)
    assert after("step") == near(1e3 * record["iteration_seconds"])
    low, high = (1e3 * each for each in record["interval_seconds"])
    assert after("80% interval") == near(low) and after("80% interval [^ ]+ ms to") == near(high)
    assert after("throughput") == near(record["throughput"]["samples_per_second"])
    assert after("MFU") == near(100 * record["utilisation"]["mfu"])
    assert after("energy +about") == near(record["energy"]["joules"])
    assert after("memory") == near(record["peak_memory_bytes"] / 2**30)
    assert after("at the peak of") == near(record["memory_room_bytes"] / 2**30)
    assert after("launches") == record["kernels"] and f": {record['memory_verdict']}" in text
