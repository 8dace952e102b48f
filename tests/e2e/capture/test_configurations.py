"""Configurations by name: the defaults of the library, sizes of published models, how weights are stored."""

from __future__ import annotations

import subprocess
import sys

import pytest

from costmodel.base.errors import InputError
from e2e.capture.models.configurations import DEFAULTS, PRESETS, served, with_defaults
from e2e.capture.models.served_model import named_model, served_model

# Layers with windows or linear attention, which the library lists one by one.
PATTERNS = {"gemma2": 2, "gemma3_text": 6, "gpt_oss": 2, "qwen3_next": 4, "qwen3_5_moe_text": 4}


@pytest.mark.parametrize("kind", sorted(DEFAULTS))
def test_defaults_are_those_of_the_library(kind: str):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    own = dict(DEFAULTS[kind])
    period = own.pop("sliding_window_pattern", None) or own.pop("full_attention_interval", None)
    known = CONFIG_MAPPING[kind]
    assert own == {name: getattr(known, name) for name in own} and period == PATTERNS.get(kind)
    if period:
        kinds = known(num_hidden_layers=2 * period).layer_types
        assert [each == "full_attention" for each in kinds] == 2 * [*(period - 1) * [False], True]


@pytest.mark.parametrize(
    ("name", "billions", "stored"),
    [
        ("llama-3.1-8b", 8.03, ("", "")),
        ("meta-llama/Llama-3.1-8B-Instruct", 8.03, ("", "")),
        ("llama-3.3-70b", 70.6, ("", "")),
        ("meta-llama/Meta-Llama-3.1-405B-Instruct-FP8", 405.9, ("fp8", "fp8")),
        ("qwen3-32b", 32.8, ("", "")),
        ("qwen3-235b", 235.1, ("", "")),
        ("Qwen/Qwen3-235B-A22B-FP8", 235.1, ("fp8-block", "fp8-block")),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", 30.5, ("", "")),
        ("Qwen/Qwen2.5-7B-Instruct-AWQ", 7.62, ("int4", "int4")),
        ("qwen3-next-80b", 79.6, ("", "")),
        ("mistralai/Mixtral-8x22B-Instruct-v0.1", 140.6, ("", "")),
        ("gpt-oss-120b", 116.8, ("", "mxfp4")),
        ("deepseek-ai/DeepSeek-R1", 671.0, ("fp8-block", "fp8-block")),
        ("nvidia/DeepSeek-R1-FP4", 671.0, ("nvfp4", "nvfp4")),
        ("moonshotai/Kimi-K2-Instruct", 1026.4, ("fp8-block", "fp8-block")),
        ("kimi-k2.5", 1026.4, ("", "int4")),
        ("zai-org/GLM-4.5-Air", 103.5, ("", "")),
        ("glm-5", 743.9, ("", "")),
        ("MiniMaxAI/MiniMax-M2.5", 228.7, ("fp8-block", "fp8-block")),
        ("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-FP8", 31.6, ("fp8", "fp8")),
        ("google/gemma-3-27b-it", 27.0, ("", "")),
        ("microsoft/phi-4", 14.7, ("", "")),
    ],
)
def test_published_models(name: str, billions: float, stored: tuple[str, str]):
    model = served_model(served(name), name)
    assert model.parameters / 1e9 == pytest.approx(billions, rel=0.003)
    assert (model.stored, model.stored_experts) == stored


def test_llama_4_has_a_shared_expert_of_which_its_configuration_says_nothing():
    scout = {
        "model_type": "llama4_text", "hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 8192, "intermediate_size_mlp": 16384,
        "num_local_experts": 16, "num_experts_per_tok": 1, "vocab_size": 202048,
    }  # fmt: skip
    assert served_model(scout, "x").parameters / 1e9 == pytest.approx(107.8, rel=0.001)  # 109 with its eyes


def test_layers_of_nemotron_h_are_mixers_with_or_without_a_block():
    """52 letters: 23 Mamba-2 mixers, 6 of them without a block, 6 of attention, 23 blocks of experts."""
    model = named_model("nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B")
    found = {(type(each.mixer).__name__, each.block.inner): count for each, count in model.layers}
    assert found == {("LinearMixer", 1856): 17, ("LinearMixer", 0): 6, ("SoftmaxAttention", 1856): 6}


def test_experts_of_ernie_have_names_of_their_own():
    ernie = {
        "model_type": "ernie4_5_moe", "hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20,
        "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 12288, "moe_intermediate_size": 1536,
        "moe_num_experts": 64, "moe_k": 6, "moe_num_shared_experts": 2, "moe_layer_start_index": 1,
        "vocab_size": 103424, "tie_word_embeddings": True,
    }  # fmt: skip
    model = served_model(ernie, "ERNIE-4.5-21B-A3B")
    assert model.parameters / 1e9 == pytest.approx(21.8, rel=0.01) and [count for _, count in model.layers] == [1, 27]


def test_an_unknown_name_is_told_the_nearest():
    with pytest.raises(InputError, match="did you mean deepseek-r1"):
        served("deepseek-r11")


def test_the_language_model_of_a_model_with_more_parts_has_defaults_too():
    model = served_model(with_defaults({"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}), "x")
    assert model.depth == 26 and {layer.mixer.window for layer, _ in model.layers} == {0, 4096}  # type: ignore[union-attr]


def test_the_road_of_serving_loads_no_torch():
    heavy = "{'torch', 'transformers', 'matplotlib', 'pandas'}"
    code = f"import sys, e2e.serving.serving_answer; print(sorted({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_presets_are_configurations():
    assert all("model_type" in each for each in PRESETS.values())
