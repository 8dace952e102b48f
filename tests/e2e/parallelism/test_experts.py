"""Mixtures of experts: what a rank computes, holds and exchanges when ranks share them, by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from costmodel.base.errors import InputError, ModelError
from e2e.parallelism import ParallelGraph, Step, build, parse_parallel

LAYERS, WIDTH, INNER, LENGTH, BATCH = 4, 64, 96, 32, 2
EXPERTS, CHOSEN = 8, 2
ROWS = BATCH * LENGTH * CHOSEN  # tokens of all experts together
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": CHOSEN,
    "vocab_size": 512,
    "max_position_embeddings": LENGTH,
}
# Gate, up and down of all experts of a layer; everything else in it: attention, router, two norms.
EXPERT_PARAMETERS = EXPERTS * 3 * WIDTH * INNER
OTHER_PARAMETERS = WIDTH * WIDTH * (2 + 2 * 2 // 4) + EXPERTS * WIDTH + 2 * WIDTH


def spread(folder: Path, text: str, **more: Any) -> ParallelGraph:
    path = folder / "config.json"
    path.write_text(json.dumps({**MIXTRAL, **more}), encoding="utf-8")
    return build(path, parse_parallel(text), Step(batch_size=BATCH, sequence_length=LENGTH, dtype="bfloat16"))


def grouped(built: ParallelGraph) -> list[Any]:
    tasks = built.graph.ranks[0].tasks
    return [each for task in tasks if task.name == "aten::_grouped_mm" for each in task.operators]


def collectives(built: ParallelGraph, group: str) -> list[Any]:
    tasks = built.graph.ranks[0].tasks
    found = [task.collective for task in tasks if task.collective is not None]
    return [each for each in found if group in each.group]


def test_all_experts_are_one_product_of_equally_many_rows_each(tmp_path):
    found = Counter((each.batch, each.m, each.n, each.k) for each in grouped(spread(tmp_path, "dp=1")))
    each = ROWS // EXPERTS
    assert found == {
        (EXPERTS, each, 2 * INNER, WIDTH): LAYERS,  # gate and up
        (EXPERTS, each, WIDTH, INNER): LAYERS,  # down
        (EXPERTS, each, INNER, WIDTH): LAYERS,  # gradients of the rows
        (EXPERTS, each, WIDTH, 2 * INNER): LAYERS,
        (EXPERTS, WIDTH, INNER, each): LAYERS,  # and of the weights
        (EXPERTS, 2 * INNER, WIDTH, each): LAYERS,
    }
    forward = 2 * ROWS * 3 * WIDTH * INNER
    assert sum(each.flops for each in grouped(spread(tmp_path, "dp=1"))) == 3 * LAYERS * forward


def test_tensor_parallel_ranks_split_the_inner_width(tmp_path):
    whole, half = (sum(each.flops for each in grouped(spread(tmp_path, text))) for text in ("tp=1", "tp=2"))
    assert half * 2 == whole
    sums = Counter((each.kind, each.size_bytes) for each in collectives(spread(tmp_path, "tp=2"), "tp"))
    assert sums[("all_reduce", BATCH * LENGTH * WIDTH * 2)] == 4 * LAYERS + 2, "as without experts"


def test_tokens_go_to_their_experts_and_back_in_both_passes(tmp_path):
    built = spread(tmp_path, "dp=4,ep=4,micro-batches=2")
    sizes = Counter((each.kind, each.size_bytes) for each in collectives(built, "ep"))
    assert sizes[("all_to_all", ROWS * WIDTH * 2)] == 2 * 4 * LAYERS
    weights = sizes.total() - sizes[("all_to_all", ROWS * WIDTH * 2)]
    assert weights == 2 * 2 * LAYERS, "routing weights go there, their gradients back"
    assert {tuple(each.ranks) for each in collectives(built, "ep")} == {(0, 1, 2, 3)}


def test_divided_experts_compute_as_much(tmp_path):
    """Each rank has a fourth of the experts for the tokens of four."""
    whole, divided = (grouped(spread(tmp_path, text)) for text in ("dp=4", "dp=4,ep=4"))
    assert {each.batch for each in divided} == {EXPERTS // 4}
    assert sum(each.flops for each in divided) == sum(each.flops for each in whole)


def reduced(built: ParallelGraph) -> dict[str, tuple[int, int]]:
    """Group -> ranks, bytes in all; without what is exchanged inside layers."""
    found: dict[str, tuple[int, int]] = {}
    for each in collectives(built, "stage"):
        ranks, size = found.get(f"{each.kind}: {each.group}", (len(each.ranks), 0))
        found[f"{each.kind}: {each.group}"] = (ranks, size + each.size_bytes)
    return found


def test_gradients_of_experts_are_summed_over_those_that_hold_the_same(tmp_path):
    outside = (2 * 512 + 1) * WIDTH  # embedding, head, last norm
    dense, experts = (LAYERS * OTHER_PARAMETERS + outside) * 2, LAYERS * EXPERT_PARAMETERS * 2
    assert reduced(spread(tmp_path, "dp=8")) == {"all_reduce: data of stage 0": (8, dense + experts)}
    assert reduced(spread(tmp_path, "dp=8,ep=4")) == {
        "all_reduce: data of stage 0": (8, dense),
        "all_reduce: data of experts of stage 0": (2, experts // 4),
    }
    assert reduced(spread(tmp_path, "dp=8,ep=8")) == {"all_reduce: data of stage 0": (8, dense)}


def test_shared_experts_are_gathered_from_those_that_hold_the_same(tmp_path):
    found = reduced(spread(tmp_path, "fsdp=8,ep=4"))
    assert {group: ranks for group, (ranks, _) in found.items()} == {
        "all_gather: shards of stage 0": 8,
        "all_gather: shards of experts of stage 0": 2,
        "reduce_scatter: gradients of stage 0": 8,
        "reduce_scatter: gradients of experts of stage 0": 2,
    }
    assert found["reduce_scatter: gradients of experts of stage 0"][1] == LAYERS * EXPERT_PARAMETERS * 2 // 4
    (ranks,) = {each.ranks for each in collectives(spread(tmp_path, "fsdp=8,ep=4"), "shards of experts")}
    assert ranks == (0, 4)


def test_memory_of_experts_is_divided(tmp_path):
    whole, divided = (spread(tmp_path, text).memory[0].breakdown for text in ("dp=4", "dp=4,ep=4"))
    assert whole["parameters"] - divided["parameters"] == LAYERS * EXPERT_PARAMETERS * 2 * 3 // 4
    both, sharded = (spread(tmp_path, text).memory[0].breakdown for text in ("fsdp=4", "fsdp=4,ep=4"))
    assert sharded["optimizer_state"] == pytest.approx(both["optimizer_state"], rel=1e-3)


@pytest.mark.parametrize(
    ("text", "more", "named"),
    [
        ("dp=3,ep=3", {}, "ep=3 does not divide 8 experts"),
        ("dp=4,ep=3", {}, "ep=3 does not divide dp x cp = 4"),
        ("dp=4,fsdp=2,ep=4", {}, "ep=4 does not divide fsdp x cp = 2"),
        ("dp=4,ep=4", {"model_type": "llama"}, "model type 'llama' have no experts to divide"),
    ],
)
def test_what_cannot_be_divided_is_said(tmp_path, text, more, named):
    with pytest.raises(InputError, match=named):
        spread(tmp_path, text, **more)


DEEPSEEK = {
    "model_type": "deepseek_v3",
    "moe_intermediate_size": INNER,
    "intermediate_size": 128,
    "num_key_value_heads": 4,
    "n_routed_experts": EXPERTS,
    "n_group": 2,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 16,
}


@pytest.mark.parametrize("text", ["dp=2", "dp=2,ep=2", "tp=2", "tp=2,sp=yes", "cp=2", "pp=2,micro-batches=2"])
def test_dense_layers_at_the_front_have_no_experts(tmp_path, text):
    """Two of four: DeepSeek-V3 has three of 61, as many as are captured."""
    built = spread(tmp_path, text, **DEEPSEEK, first_k_dense_replace=2)
    ranks = built.graph.ranks
    count = sum(task.name == "aten::_grouped_mm" for rank in ranks for task in rank.tasks)
    passes = 2 if "micro" in text else 1
    assert count == passes * 2 * 6, "two products, each with two of its gradients, in two layers"


def test_layers_of_other_kinds_hold_other_parameters(tmp_path):
    def held(dense: int) -> int:
        return spread(tmp_path, "dp=1", **DEEPSEEK, first_k_dense_replace=dense).memory[0].breakdown["parameters"]

    # A dense MLP of three products instead of experts, one shared expert, the router and its bias (a buffer in FP32).
    change = 3 * WIDTH * (EXPERTS * INNER + INNER - 128) + EXPERTS * WIDTH
    assert held(1) - held(2) == pytest.approx(2 * change, abs=64) and held(2) - held(3) == held(1) - held(2)


def test_dense_layers_elsewhere_are_refused(tmp_path):
    with pytest.raises(InputError, match="first_k_dense_replace=4: --parallel takes dense layers at the front alone"):
        spread(tmp_path, "dp=2", **DEEPSEEK, first_k_dense_replace=4)
    with pytest.raises(InputError, match=r"mlp_only_layers=\[3\]"):
        spread(tmp_path, "dp=2", model_type="qwen3_moe", num_experts=EXPERTS, mlp_only_layers=[3])


def test_a_product_that_no_rule_splits_is_named(tmp_path):
    """Before, every rank would have computed it whole without a word."""
    with pytest.raises(
        InputError, match=r"layers of model type 'phi3' \(self_attn.qkv_proj\) cannot be split; use tp=1"
    ):
        spread(tmp_path, "tp=2", model_type="phi3", pad_token_id=0)


def test_experts_elsewhere_are_not_left_whole(tmp_path):
    with pytest.raises(InputError, match=r"'granitemoe' \(block_sparse_moe.experts.down_proj, .*\) cannot be split"):
        spread(tmp_path, "tp=2", model_type="granitemoe")


def test_numbers_of_heads_are_split(tmp_path):
    """gpt-oss has a sink for every head, and experts of (in, out) with biases."""
    more = {"model_type": "gpt_oss", "head_dim": 16, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    whole, half = (grouped(spread(tmp_path, text, **more)) for text in ("dp=1", "tp=2"))
    assert sum(each.flops for each in half) * 2 == sum(each.flops for each in whole) > 0
    assert {each.batch for each in grouped(spread(tmp_path, "dp=2,ep=2", **more))} == {EXPERTS // 2}


def test_a_rank_that_cannot_run_its_part_is_an_error_of_one_line(tmp_path):
    """OLMo normalises the queries of all heads together."""
    with pytest.raises(ModelError, match=r"config.json: the model cannot be run: .*; use tp=1") as caught:
        spread(tmp_path, "tp=2", model_type="olmoe")
    assert "\n" not in str(caught.value)


def work(built: ParallelGraph) -> float:
    """Operations of all ranks in products, per sequence."""
    ranks, alike = built.graph.ranks, built.graph.multiplicity
    return (
        sum(
            alike[rank.rank] * operator.flops
            for rank in ranks
            for task in rank.tasks
            for operator in task.operators
            if type(operator).__name__ in ("Gemm", "Attention")
        )
        / built.samples
    )


@pytest.mark.parametrize(
    "text",
    [
        "dp=2,tp=2,ep=2,sp=yes",
        "fsdp=2,cp=2,ep=4,micro-batches=2",
        "cp=2,tp=2,pp=2,zero=2,ep=2,micro-batches=2,schedule=interleaved",
        "dp=2,pp=3,first-layers=0,last-layers=0,micro-batches=3",
    ],
)
def test_however_a_model_is_spread_its_products_stay_the_same(tmp_path, text):
    """The router alone is computed by every tensor-parallel rank."""
    assert work(spread(tmp_path, text)) == pytest.approx(work(spread(tmp_path, "dp=1")), rel=0.03)
