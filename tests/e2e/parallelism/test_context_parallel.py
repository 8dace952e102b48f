"""Ranks that share every sequence: what they exchange, compute and keep, by hand."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from costmodel.base.errors import InputError
from e2e.parallelism import ParallelGraph, parse_parallel
from e2e.step.options import StepOptions
from tests.e2e.parallelism.small_models import spread_model

LAYERS, WIDTH, LENGTH, HEADS, KV_HEADS, BATCH = 4, 64, 32, 4, 2, 2
ACTIVATIONS = BATCH * LENGTH * WIDTH * 2  # bytes in bfloat16
GPT = {"model_type": "gpt2", "n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS}
LLAMA = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
}


def spread(config: dict[str, Any], text: str, attention: str = "eager") -> ParallelGraph:
    step = StepOptions(batch_size=BATCH, sequence_length=LENGTH, dtype="bfloat16", attention=attention)
    return spread_model({**config, "vocab_size": 512, "n_positions": LENGTH}, text, step)


def exchanged(built: ParallelGraph) -> Counter[tuple[str, int]]:
    """(kind, bytes) of what the ranks of a sequence exchange in one rank's step."""
    tasks = built.graph.ranks[0].tasks
    found = [
        task.collective for task in tasks if task.collective is not None and task.collective.group.startswith("cp")
    ]
    return Counter((each.kind, each.size_bytes) for each in found)


def operators(built: ParallelGraph, name: str) -> list[Any]:
    tasks = built.graph.ranks[0].tasks
    return [each for task in tasks for each in task.operators if type(each).__name__ == name]


@pytest.mark.parametrize("attention", ["eager", "flash"])
@pytest.mark.parametrize(("config", "kv"), [(GPT, ACTIVATIONS), (LLAMA, ACTIVATIONS * KV_HEADS // HEADS)])
def test_keys_and_values_are_gathered_in_both_passes_and_their_gradients_summed(config, kv, attention):
    found = exchanged(spread(config, "cp=2,micro-batches=3", attention))
    assert found[("all_gather", kv // 2)] + found[("reduce_scatter", kv)] == found.total()
    assert found[("reduce_scatter", kv)] == 3 * LAYERS * 2
    # Repeated for groups of queries, as unfused attention needs them, keys and values are copies and kept.
    passes = 1 if config is LLAMA and attention == "eager" else 2
    assert found[("all_gather", kv // 2)] == passes * 3 * LAYERS * 2


@pytest.mark.parametrize("config", [GPT, LLAMA])
def test_products_are_shared_evenly(config):
    whole, half = (operators(spread(config, text), "Gemm") for text in ("dp=1", "cp=2"))
    assert sum(each.flops for each in half) * 2 == sum(each.flops for each in whole)


def test_causal_attention_is_shared_evenly():
    whole, half = (operators(spread(LLAMA, text, "flash"), "Attention") for text in ("dp=1", "cp=2"))
    assert {(each.query_length, each.key_length, each.causal) for each in half} == {(LENGTH // 2, LENGTH, True)}
    assert len(whole) == len(half) and sum(each.flops for each in half) * 2 == sum(each.flops for each in whole)


@pytest.mark.parametrize("attention", ["eager", "flash"])
def test_half_of_the_tokens_keep_half_of_the_activations(attention):
    """Gathered keys and values do not outlive the attention."""
    pipeline = "pp=2,schedule=gpipe,micro-batches=16"  # many in flight: the peak is not the optimizer's
    texts = (pipeline, f"cp=2,{pipeline}")
    whole, half = (spread(GPT, text, attention).memory[0] for text in texts)
    assert half.breakdown["activations"] == pytest.approx(whole.breakdown["activations"] / 2, rel=0.05)
    assert half.breakdown["parameters"] == whole.breakdown["parameters"]


def test_ranks_are_numbered_after_tensor_parallel_neighbours():
    built = spread(GPT, "dp=2,cp=2,tp=2,pp=2,micro-batches=2")
    second = built.graph.ranks[1]
    assert second.rank == 8 and built.graph.multiplicity == {0: 8, 8: 8}
    groups = {task.collective.group: task.collective.ranks for task in second.tasks if task.collective is not None}
    assert groups["tp of rank 8"] == (8, 9)
    assert groups["cp of rank 8"] == (8, 10)
    assert groups["data of stage 1"] == (8, 10, 12, 14)
    messages = {task.collective.size_bytes for task in second.tasks if task.name in ("c10d::send", "c10d::recv_")}
    assert messages == {ACTIVATIONS // 2}


def test_a_step_counts_every_sequence_once():
    built = spread(GPT, "dp=3,cp=4,micro-batches=2")
    assert built.samples == BATCH * 2 * 3 and built.sequence_length == LENGTH


def test_gradients_of_all_parts_are_summed():
    def reduced(text: str) -> set[tuple[str, int]]:
        tasks = spread(GPT, text).graph.ranks[0].tasks
        found = [task.collective for task in tasks if task.collective is not None]
        return {(each.kind, len(each.ranks)) for each in found if not each.group.startswith("cp")}

    assert reduced("cp=2") == {("all_reduce", 2)}
    assert reduced("dp=2,cp=2") == {("all_reduce", 4)}
    assert reduced("fsdp=2,cp=4") == {("all_gather", 8), ("reduce_scatter", 8)}
    assert reduced("cp=4,zero=3") == {("all_gather", 4), ("reduce_scatter", 4)}
    assert reduced("dp=2,cp=4,zero=1") == {("all_gather", 4), ("reduce_scatter", 4), ("all_reduce", 2)}


def test_shared_parameters_need_less_memory():
    plain, shared = (spread(GPT, text).memory[0].breakdown for text in ("cp=4", "cp=4,zero=1"))
    # Every share is rounded up to 512 bytes.
    assert plain["optimizer_state"] <= shared["optimizer_state"] * 4 < 1.15 * plain["optimizer_state"]
    assert shared["parameters"] == plain["parameters"]


def test_what_cannot_be_shared_is_said():
    with pytest.raises(InputError, match="cp=3: the sequence length 32 does not divide into 6 pieces"):
        spread(GPT, "cp=3")
    with pytest.raises(InputError, match="tp=4 does not divide a context-parallel rank's part of the sequence, 2"):
        spread(GPT, "cp=16,tp=4,sp=yes")
    config = {"model_type": "xlnet", "d_model": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "d_inner": 128}
    with pytest.raises(InputError, match="attention of model type 'xlnet' cannot be split; use cp=1"):
        spread(config, "cp=2")


def test_a_ring_computes_as_much_in_blocks_and_passes_gradients_on_in_fp32():
    """A block for every rank: the own one is causal, the others see half as much each. Keys of groups are repeated, and
    sent with the values."""
    whole, ring = (spread(LLAMA, f"cp=4,cp-form={form}", "flash2") for form in ("gather", "ring"))
    blocks = operators(ring, "Attention")
    assert len(blocks) == 2 * 4 * LAYERS and sum(each.causal for each in blocks) == 2 * LAYERS
    assert sum(each.flops for each in blocks) == sum(each.flops for each in operators(whole, "Attention")) > 0
    own = ACTIVATIONS // 4
    assert exchanged(ring) == {("all_gather", 2 * own): 2 * LAYERS, ("all_to_all", 2 * 2 * own): 4 * LAYERS}


def test_what_a_ring_gathers_travels_beside_its_first_block():
    from e2e.step.execution_graph import Launch, StreamWait

    rank = spread(LLAMA, "cp=2,cp-form=ring", "flash2").graph.ranks[0]
    seen: list[str] = []
    for action in (each for thread in rank.threads.values() for each in thread):
        if isinstance(action, Launch):
            task = rank.tasks[action.task]
            seen.append(task.collective.kind if task.collective is not None else task.name)
        elif isinstance(action, StreamWait) and action.stream == 0:
            seen.append("wait")
    gathers = [place for place, name in enumerate(seen) if name == "all_gather"]
    assert gathers and all("wait" not in seen[place : seen.index("attention::fused", place)] for place in gathers[:1])


def test_a_window_is_seen_by_ranks_that_share_a_sequence():
    """It was all of the keys once."""
    windowed = {**LLAMA, "model_type": "mistral", "sliding_window": 8}
    (one,) = {each.window for each in operators(spread(windowed, "cp=1", "flash2"), "Attention")}
    found = operators(spread(windowed, "cp=2", "flash2"), "Attention")
    assert {(each.window, each.placed) for each in found} == {(one, "spread")} and one == 8
    with pytest.raises(InputError, match="cp-form=ring is for causal attention without windows"):
        spread(windowed, "cp=2,cp-form=ring", "flash2")


def test_a_ring_is_asked_for_where_ranks_share_sequences():
    with pytest.raises(InputError, match="cp-form is for ranks that share sequences"):
        parse_parallel("dp=2,cp-form=ring")


@pytest.mark.parametrize("attention", ["eager", "flash", "flash2"])
@pytest.mark.parametrize(("config", "kv"), [(GPT, ACTIVATIONS), (LLAMA, ACTIVATIONS * KV_HEADS // HEADS)])
def test_tokens_are_exchanged_for_heads_and_back(config, kv, attention):
    """Queries, keys, values there and results back, of the rank's own tokens; gradients the other way."""
    found = exchanged(spread(config, "cp=2,cp-form=a2a", attention))
    assert found == Counter({("all_to_all", ACTIVATIONS // 2): 4 * LAYERS}) + Counter(
        {("all_to_all", kv // 2): 4 * LAYERS}
    )


def test_a_rank_attends_over_whole_sequences_with_its_share_of_the_heads():
    whole, shared = (operators(spread(LLAMA, text, "flash"), "Attention") for text in ("dp=1", "cp=2,cp-form=a2a"))
    assert {(each.query_length, each.key_length, each.causal) for each in shared} == {(LENGTH, LENGTH, True)}
    assert sum(each.flops for each in shared) * 2 == sum(each.flops for each in whole) > 0
    assert len(shared) == len(whole)


def test_heads_that_do_not_divide_cannot_be_exchanged():
    with pytest.raises(InputError, match="cp-form=a2a: 4 ranks cannot share 2 key-value heads of a rank"):
        spread(LLAMA, "cp=4,cp-form=a2a")
    with pytest.raises(InputError, match="4 ranks cannot share 2 attention heads of a rank"):
        spread(GPT, "cp=4,tp=2,cp-form=a2a")
