"""``recompute-modules``: parts of a layer that run again, and the memory that they give back."""

from __future__ import annotations

from collections import Counter

import pytest

from costmodel.base.errors import InputError
from e2e.parallelism import ParallelGraph, parse_parallel
from e2e.step.options import StepOptions
from tests.e2e.parallelism.small_models import spread_model

LAYERS, LENGTH = 4, 32
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 64,
    "intermediate_size": 160,
    "moe_intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "vocab_size": 512,
    "max_position_embeddings": LENGTH,
}


def spread(recompute: str, **more: object) -> ParallelGraph:
    step = StepOptions(batch_size=2, sequence_length=LENGTH, dtype="bfloat16", attention="flash2", stack="megatron")
    return spread_model({**DEEPSEEK, **more}, f"dp=2{recompute}", step)


def added(one: ParallelGraph, other: ParallelGraph) -> Counter[str]:
    """Kernels that ``one`` launches more often than ``other``."""
    names = [Counter(task.name for task in each.graph.ranks[0].tasks) for each in (one, other)]
    return names[0] - names[1]


def activations(built: ParallelGraph) -> int:
    return built.memory[0].breakdown["activations"]


def test_parts_run_again_and_give_back_what_they_made() -> None:
    whole = spread("")
    again = {
        names: spread(f",recompute=selective,recompute-modules={names}")
        for names in ("mla_up_proj", "layernorm", "mlp", "moe_act", "mla_up_proj+mlp")
    }
    more = {names: added(built, whole) for names, built in again.items()}
    assert more["mla_up_proj"]["aten::mm"] == 2 * LAYERS, "queries, and keys with values, of every layer"
    assert not any("attention" in name for name in more["mla_up_proj"])
    assert more["layernorm"].total() == 2 * LAYERS
    assert more["moe_act"] == {"moe::gate": LAYERS - 1}
    assert more["mlp"]["aten::mm"] in (2, 3), "gate and up, one product or two, and down: of the dense layer alone"
    assert more["mla_up_proj+mlp"] == more["mla_up_proj"] + more["mlp"]
    assert all(activations(built) < activations(whole) for built in again.values())
    # Queries and keys of 24, values of 16, 8 heads of each layer but the one whose backward pass runs.
    tokens = 2 * LENGTH * 2
    assert activations(whole) - activations(again["mla_up_proj"]) >= (LAYERS - 1) * tokens * 8 * (24 + 24 + 16)


def test_a_part_that_a_model_lacks_is_said() -> None:
    with pytest.raises(InputError, match="recompute-modules=mla_up_proj: its layers have no such part"):
        text = ",recompute=selective,recompute-modules=mla_up_proj"
        spread(text, model_type="mixtral", num_local_experts=8)
    with pytest.raises(InputError, match="recompute-modules needs recompute=selective"):
        parse_parallel("dp=2,recompute-modules=mlp")
    with pytest.raises(InputError, match="recompute-modules=moe: choose one of core_attn"):
        parse_parallel("dp=2,recompute=selective,recompute-modules=moe")
