"""Bytes, host times and intervals that can be counted by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

import e2e
from costmodel.machines.cluster import load_cluster
from costmodel.operators.collective_transfer import CollectiveTransfer
from e2e.serving.cache_room import CacheRoom, cache_room
from e2e.serving.serving_answer import deployment_of
from e2e.serving.serving_request import ServingRequest
from e2e.serving.step_price import Prompt, StepPrice

# Llama 3.1 8B: 32 layers of queries and outputs of 4,096, keys and values of 1,024, three matrices of 14,336; embedding
# and head of 128,256 words.
LLAMA_8B = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336) + 2 * 128256 * 4096


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_dense_weights_are_shared_by_the_ranks(ranks: int):
    deployment = deployment_of(ServingRequest(model="llama-3.1-8b", gpu="h100-sxm", gpus=ranks))
    assert deployment.weight_bytes() == pytest.approx(2 * LLAMA_8B / ranks)


def test_stages_share_layers_but_not_the_head():
    deployment = deployment_of(ServingRequest(model="llama-3.1-8b", gpu="h100-sxm", gpus=2, parallel="tp=1,pp=2"))
    ends = 2 * 128256 * 4096
    assert deployment.weight_bytes() == pytest.approx(2 * ((LLAMA_8B - ends) / 2 + ends))


@pytest.mark.parametrize("parallel", ["tp=8", "tp=8,ep=8"])
def test_experts_are_shared_by_matrix_or_whole(parallel: str):
    deployment = deployment_of(ServingRequest(model="deepseek-r1", gpu="h200-sxm", gpus=8, parallel=parallel))
    # 671 billion parameters of one byte; embedding and head have two
    assert deployment.weight_bytes() == pytest.approx((671e9 + 2 * 129280 * 7168) / 8, rel=0.01)


def test_a_token_of_the_cache_has_keys_and_values_of_every_layer():
    asked = ServingRequest(model="llama-3.1-8b", gpu="h100-sxm", precision="kv=fp8")
    assert deployment_of(asked).cache_bytes() == 32 * 2 * 8 * 128
    assert deployment_of(replace(asked, precision="")).cache_bytes() == 2 * 32 * 2 * 8 * 128


def test_the_share_of_the_memory_is_of_what_the_engine_says():
    """vLLM counts neither its context nor its graphs; TensorRT-LLM's share is of what weights and context leave."""

    def rooms(share: str, engine: str) -> CacheRoom:
        return cache_room(deployment_of(ServingRequest(
            model="llama-3.1-8b", gpu="h100-sxm", engine=engine, engine_options=f"memory-share={share}",
        )))  # fmt: skip

    whole = float(load_cluster("h100-sxm", 1).machine.memory[-1].usable)
    vllm, sglang, trtllm = (rooms("0.5", engine) for engine in ("vllm", "sglang", "trtllm"))
    assert vllm.usable_bytes == sglang.usable_bytes == whole / 2 and trtllm.usable_bytes == whole
    assert vllm.reserve_bytes < 0.2 * 2**30 < 2**30 < sglang.reserve_bytes
    free = whole - trtllm.weight_bytes - trtllm.activation_bytes - trtllm.reserve_bytes
    assert trtllm.cache_bytes == pytest.approx(free / 2)


def test_windows_and_states_are_held_once_for_a_sequence():
    def asked(model: str) -> int:
        return deployment_of(ServingRequest(model=model, gpu="h200-sxm", gpus=4)).sequence_tokens

    assert asked("llama-3.1-8b") == 0
    assert asked("gpt-oss-120b") == 128  # every other layer sees 128 tokens
    # 36 layers with 32 states of 128 x 128 in FP32 and three inputs of 8,192 channels, on 4 ranks; 12 with one head of
    # 256 on every rank.
    states = 36 * (32 * 128 * 128 * 4 + 3 * 8192 * 2) / 4
    assert asked("qwen3-next-80b-a3b") == -(-states // (12 * 2 * 256 * 2))


@pytest.mark.parametrize(("parallel", "nodes"), [("tp=8", {1}), ("tp=16", {2}), ("tp=8,pp=2", {1})])
def test_ranks_of_several_nodes_reduce_over_the_network(parallel: str, nodes: set[int]):
    asked = ServingRequest(model="llama-3.1-405b", gpu="h100-sxm", gpus=16, parallel=parallel)
    work = StepPrice(deployment_of(asked)).work.rows(8, 8)
    assert {each.operator.nodes for each in work if isinstance(each.operator, CollectiveTransfer)} == nodes


def test_the_host_adds_its_time_for_a_step_and_for_every_sequence():
    price = StepPrice(deployment_of(ServingRequest(model="llama-3.1-8b", gpu="h100-sxm")))

    def seconds(step: float, sequence: float, prompts: int = 0) -> float:
        engine = replace(price.engine, step=step, sequence=sequence)
        return price.with_engine(engine).step_seconds(24, 500, [Prompt(128)] * prompts)

    assert seconds(2e-3, 0.0) - seconds(0.0, 0.0) == pytest.approx(2e-3)
    assert seconds(0.0, 1e-4) - seconds(0.0, 0.0) == pytest.approx(24e-4)
    assert seconds(0.0, 1e-4, 2) - seconds(0.0, 0.0, 2) == pytest.approx(26e-4)


def test_copies_of_the_attention_have_hosts_of_their_own():
    asked = ServingRequest(model="deepseek-r1", gpu="h200-sxm", gpus=8, parallel="tp=8,ep=8,dp-attention=8")
    price = StepPrice(deployment_of(asked))
    slow = price.with_engine(replace(price.engine, sequence=price.engine.sequence + 1e-4))
    added = slow.step_seconds(24, 500, [Prompt(128)]) - price.step_seconds(24, 500, [Prompt(128)])
    assert added == pytest.approx(4e-4), "three sequences and a prompt on the busiest rank"


def test_prompts_of_one_copy_are_computed_by_it_alone():
    """Of 64 prompts each of 8 copies has 8: its attention takes as long as that of 8 prompts on a GPU by itself."""
    shape = {"model": "deepseek-r1", "gpu": "h200-sxm", "gpus": 8}
    price = StepPrice(deployment_of(ServingRequest(parallel="tp=8,ep=8,dp-attention=8", **shape)))  # type: ignore[arg-type]
    kept = [each for each in price.listed(0, 0, [Prompt(512)] * 64) if each.part == "attention"]
    assert {each.operator.batch for each in kept} == {8}
    eight, whole = ([Prompt(512)] * count for count in (8, 64))
    assert price.prompt_seconds(whole) > 6 * price.prompt_seconds(eight)


def _parts(prompt: int = 0, **asked: object) -> dict[str, float]:
    """How often a step of 4 sequences runs kernels of each part."""
    price = StepPrice(deployment_of(ServingRequest(**asked)))  # type: ignore[arg-type]
    found: dict[str, float] = {}
    for each in price.listed(4, 500, [Prompt(prompt)] if prompt else ()):
        found[each.part] = found.get(each.part, 0) + each.count
    return found


def test_tables_of_attention_hold_what_they_were_timed_with():
    vllm, sglang, trtllm = (
        _parts(model="llama-3.1-8b", gpu="h100-sxm", engine=each) for each in ("vllm", "sglang", "trtllm")
    )
    assert (vllm["rotary"], vllm["cache write"]) == (32, 32)
    assert (sglang["rotary"], "cache write" in sglang) == (32, False)
    assert not {"rotary", "cache write"} & set(trtllm)


def test_shared_experts_are_one_of_sglangs_experts():
    """DeepSeek-R1: 3 dense layers and 58 of 256 experts and a shared one; two products of a feed-forward block."""
    asked = {"model": "deepseek-r1", "gpu": "h200-sxm", "gpus": 8}
    assert _parts(engine="sglang=0.5.9", **asked)["feed-forward"] == 3 * 2
    assert _parts(engine="vllm", **asked)["feed-forward"] == 61 * 2
    work = StepPrice(deployment_of(ServingRequest(engine="sglang", **asked))).work  # type: ignore[arg-type]
    (layer,) = {each.operator for each in work.rows(4, 4) if each.part == "experts"}
    assert (len(layer.counts), layer.counts[-1]) == (257, 4)


def test_norms_over_all_heads_are_reduced_among_the_ranks():
    """MiniMax-M2.5, 62 layers: the norms of queries and keys take one more pass and one more all-reduce each layer."""
    found = _parts(model="minimax-m2.5", gpu="b200-sxm", gpus=4, engine="sglang")
    assert (found["all-reduce"], found["norm"]) == (3 * 62, 2 * 62)
    by_head = _parts(model="qwen3-235b", gpu="b200-sxm", gpus=4, engine="sglang")
    assert (by_head["all-reduce"], by_head["norm"]) == (2 * 94, 94)


@pytest.mark.parametrize(
    ("engine", "gpu", "gpus", "budget", "sequences", "graphs"),
    [
        ("vllm", "h100-sxm", 1, 8192, 1024, 512),
        ("vllm", "a100-sxm-80gb", 1, 2048, 256, 512),
        ("vllm", "rtx-4090", 1, 2048, 256, 512),
        ("sglang", "rtx-4090", 1, 2048, 4096, 24),
        ("sglang", "l40s", 4, 4096, 4096, 160),
        ("sglang", "h100-sxm", 2, 8192, 4096, 256),
        ("sglang", "h200-sxm", 8, 8192, 4096, 512),
        ("sglang", "b200-sxm", 1, 16384, 4096, 512),
        ("sglang=0.4", "b200-sxm", 1, 8192, 4096, 256),
    ],
)
def test_an_engine_sets_its_limits_by_the_gpu(engine, gpu, gpus, budget, sequences, graphs):
    asked = ServingRequest(model="llama-3.1-8b", gpu=gpu, gpus=gpus, engine=engine)
    found = deployment_of(asked).engine
    assert (found.token_budget, found.sequences, found.graph_sequences) == (budget, sequences, graphs)
    assert deployment_of(replace(asked, engine_options="token-budget=512")).engine.token_budget == 512


def test_norms_are_part_of_the_all_reduces_of_mixtures_from_sglang_0_5_9():
    asked = {"model": "qwen3-235b", "gpu": "h200-sxm", "gpus": 4}
    before, since = (_parts(engine=f"sglang={version}", **asked)["norm"] for version in ("0.5.6", "0.5.9"))
    assert before - since == 2 * 94


@pytest.mark.parametrize("engine", ["vllm=0.12.0", "sglang=0.5.6.post2", "trtllm=1.0.0rc3"])
def test_a_recipe_gives_a_step_one_prompt_and_a_token_for_every_user(engine: str):
    asked = ServingRequest(model="llama-3.1-8b", gpu="h100-sxm", engine=engine, input_length=2048, concurrency=64)
    assert deployment_of(asked).engine.token_budget == 2048 + 1500 + 64
    assert deployment_of(replace(asked, engine_options="token-budget=4096")).engine.token_budget == 4096
    assert deployment_of(replace(asked, engine=engine.split("=")[0])).engine.token_budget == 8192


def test_intervals_hold_at_least_the_band_of_the_engine():
    asked = {"model": "llama-3.1-8b", "gpu": "h100-sxm", "concurrency": 8, "requests": 16, "output_length": 32}
    engine = deployment_of(ServingRequest(model="llama-3.1-8b", gpu="h100-sxm")).engine
    found = e2e.serve(**asked)
    for interval, spread, band in (
        (found.ttft_interval_seconds, found.ttft_seconds, engine.band_ttft),
        (found.tpot_interval_seconds, found.tpot_seconds, engine.band_tpot),
    ):
        assert spread.mean / (2 * band) < interval[0] <= spread.mean / band * 1.000001
        assert spread.mean * band * 0.999999 <= interval[1] < spread.mean * 2 * band
