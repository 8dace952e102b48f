"""Steps behind a cache: what decoding reads, latent attention as engines decode it, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from costmodel.base.errors import InputError
from costmodel.operators.attention import Attention
from costmodel.operators.device_work import Gemm, ScaledCast
from e2e.capture.models.catalog import build_from_config
from e2e.capture.session import CapturedWorkload, capture
from e2e.lowering.lower_trace import lower
from e2e.step.memory import peak_memory
from e2e.step.options import StepOptions

torch = pytest.importorskip("torch")

BATCH, CACHED, LAYERS, HEADS, RANK, ROTARY, PLAIN, VALUES = 3, 100, 2, 4, 40, 8, 16, 16
SIZES = {"hidden_size": 64, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "vocab_size": 128}
LATENT = {
    **SIZES, "model_type": "deepseek_v3", "intermediate_size": 96, "moe_intermediate_size": 32, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": HEADS,
    "q_lora_rank": 24, "kv_lora_rank": RANK, "qk_rope_head_dim": ROTARY, "qk_nope_head_dim": PLAIN,
    "v_head_dim": VALUES,
}  # fmt: skip
GROUPED = {**SIZES, "model_type": "llama", "intermediate_size": 96, "num_key_value_heads": 2, "head_dim": 16}
WINDOWED = {**GROUPED, "model_type": "mistral", "sliding_window": 16}
RECURRENT = {**SIZES, "model_type": "mamba2", "num_heads": 8, "head_dim": 16}
ENCODED = {
    "model_type": "t5", "d_model": 32, "num_layers": 1, "vocab_size": 64,
    "architectures": ["T5ForConditionalGeneration"],
}  # fmt: skip


def decoded(config: dict[str, Any], attention: Any, length: int | None = None, cached: int | None = CACHED) -> Any:
    """Records of a step, and the names of its calls."""
    options = StepOptions(mode="inference", dtype="bfloat16", attention=attention, cache_length=cached)
    trace = capture(build_from_config(config, BATCH, length, options, "test"), options)
    graph = lower(trace, options)
    return [each for task in graph.tasks for each in task.operators], [call.name for call in trace.calls]


def attentions(records: list[Any]) -> list[Attention]:
    return [each for each in records if isinstance(each, Attention)]


def test_a_token_sees_the_whole_cache_once():
    records, _ = decoded(GROUPED, "flash2")
    found = attentions(records)
    assert len(found) == LAYERS
    assert found[0] == Attention(
        BATCH, HEADS, 1, CACHED + 1, 16, 2, causal=True, dtype="bfloat16", kernel="flash2"
    )  # fmt: skip
    assert found[0].phase == "decode" and found[0].pairs == CACHED + 1
    # One row of every product per sequence: nothing is computed for cached tokens.
    assert {each.m for each in records if isinstance(each, Gemm)} == {BATCH}


def test_the_cache_is_written_in_place_and_read_by_windows():
    records, names = decoded(WINDOWED, "flash2")
    assert [each.window for each in attentions(records)] == [16] * LAYERS
    assert attentions(records)[0].keys_seen == 16
    # Rotary embeddings concatenate halves of a head; nothing is as long as the cache.
    assert not [each for each in records if getattr(each, "elements", 0) >= BATCH * 2 * CACHED * 16]
    assert names.count("aten::new_empty") == 0


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_memory_tells_the_cache_from_the_weights(dtype):
    options = StepOptions(mode="inference", dtype=dtype, attention="flash", cache_length=CACHED)
    workload = build_from_config(GROUPED, BATCH, None, options, "test")
    found = peak_memory(capture(workload, options)).breakdown
    size = 2 if dtype == "bfloat16" else 4
    blocks = -(-BATCH * 2 * (CACHED + 1) * 16 * size // 512)  # of the keys of a layer: 2 heads of 16
    assert found["cache"] == 2 * LAYERS * blocks * 512
    weights = sum(each.numel() * each.element_size() for each in workload.module.parameters())
    assert weights <= found["parameters"] < weights + 512 * sum(1 for _ in workload.module.parameters()) + 4096


def test_memory_that_a_step_fills_as_a_whole_is_no_cache():
    class Fixed(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("held", torch.zeros(4, 512, device="meta"))

        def forward(self, new: torch.Tensor) -> torch.Tensor:
            self.held.copy_(new)
            return self.held * 2

    model = Fixed()
    workload = CapturedWorkload("test", model, lambda: model(torch.ones(4, 512, device="meta")))
    assert peak_memory(capture(workload, StepOptions(mode="inference"))).breakdown["cache"] == 0


def test_several_tokens_behind_a_cache():
    records, _ = decoded(GROUPED, "flash", length=3)
    (first, *_) = attentions(records)
    assert (first.query_length, first.key_length, first.mask) == (3, CACHED + 3, True)
    with pytest.raises(InputError, match="kernels by name decode one token of each sequence"):
        decoded(GROUPED, "flash2", length=3)


@pytest.mark.parametrize("length", [None, 2])
def test_latents_are_attended_as_they_are_cached(length):
    records, _ = decoded(LATENT, "mla", length)
    tokens = length or 1
    found = attentions(records)
    assert len(found) == LAYERS
    assert found[0] == Attention(
        BATCH, HEADS, tokens, CACHED + tokens, RANK + ROTARY, 1, causal=tokens > 1, dtype="bfloat16", kernel="mla",
        value_dim=RANK, paged=True,
    )  # fmt: skip
    products = [each for each in records if isinstance(each, Gemm) and each.batch == HEADS]
    shapes = [(each.m, each.n, each.k) for each in products]
    assert shapes == [(BATCH * tokens, RANK, PLAIN), (BATCH * tokens, VALUES, RANK)] * LAYERS


def test_the_library_computes_keys_of_the_whole_cache_from_latents():
    records, _ = decoded(LATENT, "eager")
    rows = [each.m for each in records if isinstance(each, Gemm) and each.k == RANK]
    assert rows == [BATCH * (CACHED + 1)] * LAYERS


def test_a_cache_in_8_bits():
    records, _ = decoded(GROUPED, "flash3-fp8")
    found = attentions(records)
    assert [(each.kernel, each.dtype) for each in found] == [("flash3-fp8", "float8")] * LAYERS
    # Queries are cast; keys and values lie there in 8 bits.
    casts = [(each.rows, each.columns) for each in records if isinstance(each, ScaledCast)]
    assert casts == [(BATCH * HEADS, 16)] * LAYERS
    whole, _ = decoded(GROUPED, "flash3-fp8", length=32, cached=None)
    assert [each.rows for each in whole if isinstance(each, ScaledCast)] == [
        BATCH * HEADS * 32, BATCH * 2 * 32, BATCH * 2 * 32,
    ] * LAYERS  # fmt: skip


@pytest.mark.parametrize(
    ("config", "attention", "cached", "message"),
    [
        (GROUPED, "mla", CACHED, "test: --attention mla: it has no latent attention"),
        (LATENT, "mla", None, "test: --attention mla decodes tokens behind a cache; give --cache-length"),
        (RECURRENT, "eager", CACHED, "caches of keys and values"),
        ({**WINDOWED, "max_position_embeddings": 64}, "eager", CACHED, "beyond its 64 positions"),
        (ENCODED, "eager", CACHED, "--cache-length: it has an encoder too"),
        (
            {**GROUPED, "quantization_config": {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}},
            "flash2", CACHED, "keeps the cache in 8 bits; give --attention flash3-fp8",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_decoded_is_told_in_one_line(config, attention, cached, message):
    with pytest.raises(InputError, match=message) as caught:
        decoded(config, attention, cached=cached)
    assert "\n" not in str(caught.value)
