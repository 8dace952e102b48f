"""Configurations of published models, as in Hugging Face's ``config.json``: of ``--model`` (:data:`PRESETS`), by their
names on the hub (:func:`published`), and as engines serve them, with the number types of their stored weights
(:func:`served`).

A configuration holds what differs from the defaults of its class in Transformers (:data:`DEFAULTS`). Sources: the
``config.json`` of each model; ``dtype`` is that of its weights. Presets with published training speeds name their
sources. Loads no library.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError
from costmodel.base.input_files import decoded, read_text

Config = Mapping[str, Any]


# What Transformers' configuration classes set where a configuration says nothing: sizes that serving reads.
# ``sliding_window_pattern`` and ``full_attention_interval`` say which layers have a window or linear attention.
DEFAULTS: dict[str, dict[str, int]] = {
    "llama": {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000, "max_position_embeddings": 2048,
        "num_attention_heads": 32, "intermediate_size": 11008},
    "mistral": {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 4096, "intermediate_size": 14336},
    "mixtral": {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 32000, "max_position_embeddings": 131072,
        "num_attention_heads": 32, "num_key_value_heads": 8, "num_local_experts": 8, "intermediate_size": 14336,
        "num_experts_per_tok": 2},
    "qwen2": {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 151936, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False,
        "intermediate_size": 22016},
    "qwen2_moe": {"hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 151936, "max_position_embeddings":
        32768, "num_attention_heads": 16, "num_key_value_heads": 16, "sliding_window": 4096, "use_sliding_window":
        False, "num_experts": 60, "intermediate_size": 5632, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632, "num_experts_per_tok": 4},
    "qwen3": {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 151936, "max_position_embeddings": 32768,
        "num_attention_heads": 32, "head_dim": 128, "num_key_value_heads": 32, "sliding_window": 4096,
        "use_sliding_window": False, "intermediate_size": 22016},
    "qwen3_moe": {"hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 151936, "max_position_embeddings":
        32768, "num_attention_heads": 32, "num_key_value_heads": 4, "sliding_window": 4096, "use_sliding_window":
        False, "num_experts": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts_per_tok": 8},
    "qwen3_next": {"hidden_size": 2048, "num_hidden_layers": 48, "vocab_size": 151936, "max_position_embeddings":
        32768, "num_attention_heads": 16, "head_dim": 256, "num_key_value_heads": 2, "num_experts": 512,
        "intermediate_size": 5632, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 10, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads":
        32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
    "qwen3_5_moe_text": {"hidden_size": 2048, "num_hidden_layers": 40, "vocab_size": 248320,
        "max_position_embeddings": 32768, "num_attention_heads": 16, "head_dim": 256, "num_key_value_heads": 2,
        "num_experts": 256, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
        "num_experts_per_tok": 8, "linear_num_key_heads": 16, "linear_key_head_dim": 128, "linear_num_value_heads":
        32, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4, "full_attention_interval": 4},
    "gpt2": {"n_embd": 768, "n_layer": 12, "vocab_size": 50257, "tie_word_embeddings": True, "n_positions": 1024,
        "n_head": 12},
    "gptj": {"n_embd": 4096, "n_layer": 28, "vocab_size": 50400, "n_positions": 2048, "n_head": 16},
    "gpt_neox": {"hidden_size": 6144, "num_hidden_layers": 44, "vocab_size": 50432, "max_position_embeddings": 2048,
        "num_attention_heads": 64, "intermediate_size": 24576},
    "gpt_oss": {"hidden_size": 2880, "num_hidden_layers": 36, "vocab_size": 201088, "max_position_embeddings": 131072,
        "num_attention_heads": 64, "head_dim": 64, "num_key_value_heads": 8, "sliding_window": 128,
        "num_local_experts": 128, "intermediate_size": 2880, "num_experts_per_tok": 4, "sliding_window_pattern": 2},
    "opt": {"hidden_size": 768, "num_hidden_layers": 12, "vocab_size": 50272, "tie_word_embeddings": True,
        "max_position_embeddings": 2048, "num_attention_heads": 12, "ffn_dim": 3072},
    "phi": {"hidden_size": 2048, "num_hidden_layers": 24, "vocab_size": 51200, "max_position_embeddings": 2048,
        "num_attention_heads": 32, "intermediate_size": 8192},
    "phi3": {"hidden_size": 3072, "num_hidden_layers": 32, "vocab_size": 32064, "max_position_embeddings": 4096,
        "num_attention_heads": 32, "intermediate_size": 8192},
    "gemma": {"hidden_size": 3072, "num_hidden_layers": 28, "vocab_size": 256000, "tie_word_embeddings": True,
        "max_position_embeddings": 8192, "num_attention_heads": 16, "head_dim": 256, "num_key_value_heads": 16,
        "intermediate_size": 24576},
    "gemma2": {"hidden_size": 2304, "num_hidden_layers": 26, "vocab_size": 256000, "tie_word_embeddings": True,
        "max_position_embeddings": 8192, "num_attention_heads": 8, "head_dim": 256, "num_key_value_heads": 4,
        "sliding_window": 4096, "intermediate_size": 9216, "sliding_window_pattern": 2},
    "gemma3_text": {"hidden_size": 2304, "num_hidden_layers": 26, "vocab_size": 262208, "tie_word_embeddings": True,
        "max_position_embeddings": 131072, "num_attention_heads": 8, "head_dim": 256, "num_key_value_heads": 4,
        "sliding_window": 4096, "intermediate_size": 9216, "sliding_window_pattern": 6},
    "falcon": {"hidden_size": 4544, "num_hidden_layers": 32, "vocab_size": 65024, "tie_word_embeddings": True,
        "max_position_embeddings": 2048, "num_attention_heads": 71, "multi_query": True},
    "nemotron": {"hidden_size": 6144, "num_hidden_layers": 32, "vocab_size": 256000, "max_position_embeddings": 4096,
        "num_attention_heads": 48, "intermediate_size": 24576},
    "glm4_moe": {"hidden_size": 4096, "num_hidden_layers": 46, "vocab_size": 151552, "max_position_embeddings":
        131072, "num_attention_heads": 96, "num_key_value_heads": 8, "n_routed_experts": 128, "first_k_dense_replace":
        1, "intermediate_size": 10944, "moe_intermediate_size": 1408, "n_shared_experts": 1, "num_experts_per_tok":
        8},
    "glm_moe_dsa": {"hidden_size": 6144, "num_hidden_layers": 78, "vocab_size": 154880, "max_position_embeddings":
        202752, "num_attention_heads": 64, "head_dim": 64, "num_key_value_heads": 64, "kv_lora_rank": 512,
        "q_lora_rank": 2048, "qk_nope_head_dim": 192, "qk_rope_head_dim": 64, "v_head_dim": 256, "n_routed_experts":
        256, "first_k_dense_replace": 3, "intermediate_size": 12288, "moe_intermediate_size": 2048,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "index_n_heads": 32, "index_head_dim": 128, "index_topk":
        2048},
    "minimax_m2": {"hidden_size": 3072, "num_hidden_layers": 62, "vocab_size": 200064, "max_position_embeddings":
        196608, "num_attention_heads": 48, "head_dim": 128, "num_key_value_heads": 8, "num_local_experts": 256,
        "intermediate_size": 1536, "num_experts_per_tok": 8},
    "deepseek_v2": {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 102400, "max_position_embeddings":
        2048, "num_attention_heads": 32, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "intermediate_size": 11008,
        "moe_intermediate_size": 1407, "n_shared_experts": 2},
    "deepseek_v3": {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129280, "max_position_embeddings":
        4096, "num_attention_heads": 128, "num_key_value_heads": 128, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 256,
        "first_k_dense_replace": 3, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_shared_experts": 1,
        "num_experts_per_tok": 8},
    "deepseek_v32": {"hidden_size": 7168, "num_hidden_layers": 61, "vocab_size": 129280, "max_position_embeddings":
        163840, "num_attention_heads": 128, "head_dim": 64, "num_key_value_heads": 128, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts":
        256, "first_k_dense_replace": 3, "intermediate_size": 18432, "moe_intermediate_size": 2048,
        "n_shared_experts": 1, "num_experts_per_tok": 8, "index_n_heads": 64, "index_head_dim": 128, "index_topk":
        2048},
    "olmo2": {"hidden_size": 4096, "num_hidden_layers": 32, "vocab_size": 50304, "max_position_embeddings": 2048,
        "num_attention_heads": 32, "intermediate_size": 11008},
}  # fmt: skip


def _mpt(width: int, heads: int, layers: int) -> dict[str, Any]:
    """Return the configuration of an MPT model in llm-foundry's benchmarks (mosaicml/llm-foundry,
    scripts/train/benchmarking).

    The published parameter counts are those of tied embeddings of 50,368 words, learned positions (which grow with the
    sequence length, by the width per token) and biases everywhere, i.e. GPT-2 without dropout.
    """
    return {
        "model_type": "gpt2",
        "vocab_size": 50368,
        "n_embd": width,
        "n_head": heads,
        "n_layer": layers,
        "n_positions": 2048,
        "activation_function": "gelu",
        "attn_pdrop": 0.0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
    }


_LLAMA_3_8B = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
_LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}

_TRAINED: dict[str, dict[str, Any]] = {
    "mpt-125m": _mpt(768, 12, 12),
    "mpt-350m": _mpt(1024, 16, 24),
    "mpt-760m": _mpt(1536, 12, 24),
    "mpt-1b": _mpt(2048, 16, 24),
    "mpt-3b": _mpt(2560, 20, 32),
    "mpt-7b": _mpt(4096, 32, 32),
    "mpt-13b": _mpt(5120, 40, 40),
    "mpt-30b": _mpt(7168, 56, 48),
    "mpt-70b": _mpt(8192, 64, 80),
    # Published Hugging Face configurations of meta-llama.
    "llama-2-13b": {"model_type": "llama",
        "hidden_size": 5120, "intermediate_size": 13824, "num_hidden_layers": 40, "num_attention_heads": 40,
        "max_position_embeddings": 4096,
    },
    "llama-2-70b": {"model_type": "llama", **_LLAMA_70B, "max_position_embeddings": 4096},
    "llama-3-70b": {"model_type": "llama", **_LLAMA_70B, "vocab_size": 128256, "max_position_embeddings": 8192},
    "llama-3.1-8b": {"model_type": "llama", **_LLAMA_3_8B, "max_position_embeddings": 131072},
    "llama-3.1-405b": {"model_type": "llama",
        "hidden_size": 16384, "intermediate_size": 53248, "num_hidden_layers": 126, "num_attention_heads": 128,
        "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 131072,
    },
    # Configuration of xai-org/grok-1 (its run.py), in the form of Mixtral.
    "grok-1": {
        "model_type": "mixtral",
        "vocab_size": 131072,
        "hidden_size": 6144,
        "intermediate_size": 32768,
        "num_hidden_layers": 64,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "max_position_embeddings": 8192,
    },
    # As in config.json of Qwen/Qwen3-235B-A22B.
    "qwen3-235b-a22b": {
        "model_type": "qwen3_moe",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 94,
        "num_attention_heads": 64,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "max_position_embeddings": 40960,
    },
    # nvidia/Nemotron-4-15B (Parmar et al., arXiv 2402.16819, table 1): squared ReLU, half of each head rotated.
    "nemotron-4-15b": {
        "model_type": "nemotron",
        "vocab_size": 256000,
        "hidden_size": 6144,
        "intermediate_size": 24576,
        "num_hidden_layers": 32,
        "num_attention_heads": 48,
        "num_key_value_heads": 8,
        "max_position_embeddings": 4096,
    },
}  # fmt: skip


# Model type and the keys that differ from the defaults of the library's configuration class; sources: the published
# configurations of each name, GPT-3 sizes as in table 2.1 of Brown et al. (2020). Its XL row has 24 heads of 128 with a
# width of 2048, which do not agree; the width here is 24 x 128 as in the measurements of Lee et al. (ASPLOS 2025).
PRESETS: dict[str, dict[str, Any]] = {
    "gpt2": {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]},
    "gpt2-medium": {"model_type": "gpt2", "n_embd": 1024, "n_layer": 24, "n_head": 16},
    "gpt2-large": {"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20},
    "gpt2-xl": {"model_type": "gpt2", "n_embd": 1600, "n_layer": 48, "n_head": 25},
    "gpt3-xl": {"model_type": "gpt2", "n_embd": 3072, "n_layer": 24, "n_head": 24, "n_positions": 2048},
    "gpt3-2.7b": {"model_type": "gpt2", "n_embd": 2560, "n_layer": 32, "n_head": 32, "n_positions": 2048},
    "bert-base": {"model_type": "bert"},
    "bert-large": {
        "model_type": "bert",
        "hidden_size": 1024,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "intermediate_size": 4096,
    },
    "opt-1.3b": {
        "model_type": "opt",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "ffn_dim": 8192,
        "word_embed_proj_dim": 2048,
    },
    "xlnet-base": {"model_type": "xlnet", "d_model": 768, "n_layer": 12, "n_head": 12, "d_inner": 3072},
    "xlnet-large": {"model_type": "xlnet", "d_model": 1024, "n_layer": 24, "n_head": 16, "d_inner": 4096},
    "llama-2-7b": {"model_type": "llama"},
    "llama-3-8b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "intermediate_size": 14336,
        "num_key_value_heads": 8,
        "max_position_embeddings": 8192,
    },
    "llama-3.2-1b": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "mixtral-8x7b": {"model_type": "mixtral", "num_local_experts": 8},
    "qwen3-30b-a3b": {
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    },
    # As in config.json of openai/gpt-oss-20b and gpt-oss-120b, with weights of 16 bits (as they are trained).
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
    },
    "gpt-oss-120b": {
        "model_type": "gpt_oss",
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 36,
        "num_local_experts": 128,
        "num_experts_per_tok": 4,
        "vocab_size": 201088,
    },
    # As in config.json of deepseek-ai/DeepSeek-V3, weights of 16 bits, without the layer of multi-token prediction.
    "deepseek-v3": {"model_type": "deepseek_v3", "vocab_size": 129280, "first_k_dense_replace": 3},
    "switch-base-8": {
        "model_type": "switch_transformers",
        "d_ff": 3072,
        "num_decoder_layers": 12,
        "num_sparse_encoder_layers": 6,
        "num_sparse_decoder_layers": 6,
        "num_experts": 8,
    },
    # As in scripts/asplos/data/DLmodel_configs/switchxl4.json of sitar-lab/NeuSight.
    "switch-xl-4": {
        "model_type": "switch_transformers",
        "d_model": 1024,
        "d_kv": 128,
        "d_ff": 16384,
        "num_heads": 32,
        "num_layers": 24,
        "num_decoder_layers": 24,
        "num_sparse_encoder_layers": 12,
        "num_sparse_decoder_layers": 12,
        "num_experts": 4,
        "expert_capacity": 64,
    },
}
# Common name of this size of the latest family.
PRESETS["llama-8b"] = PRESETS["llama-3-8b"]
PRESETS.update(_TRAINED)

_BF16 = {"dtype": "bfloat16"}
_FP16 = {"dtype": "float16"}


def _of(preset: str, **differing: Any) -> Config:
    return {**PRESETS[preset], **differing}


def _llama(width: int, inner: int, layers: int, heads: int, groups: int, **more: Any) -> Config:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    heads_of = {"num_attention_heads": heads, "num_key_value_heads": groups}
    return {"model_type": "llama", **sizes, **heads_of, **_BF16, **more}


def _qwen(kind: str, width: int, inner: int, layers: int, heads: int, groups: int, **more: Any) -> Config:
    vocabulary = {"vocab_size": 151936, "max_position_embeddings": 32768}
    return {**_llama(width, inner, layers, heads, groups), **vocabulary, "model_type": kind, **more}


def _opt(width: int, layers: int, heads: int, **more: Any) -> Config:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": "opt", **sizes, "ffn_dim": 4 * width, "word_embed_proj_dim": width, **_FP16, **more}


def _t5(width: int, inner: int, layers: int, heads: int, **more: Any) -> Config:
    sizes = {"d_model": width, "d_ff": inner, "num_layers": layers, "num_decoder_layers": layers, "num_heads": heads}
    return {"model_type": "t5", **sizes, "decoder_start_token_id": 0, **more}


def _flan(width: int, inner: int, layers: int, heads: int) -> Config:
    return _t5(width, inner, layers, heads, feed_forward_proj="gated-gelu", tie_word_embeddings=False, d_kv=64)


def _pythia(width: int, layers: int, heads: int, vocabulary: int = 50304) -> Config:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": "gpt_neox", **sizes, "intermediate_size": 4 * width, "vocab_size": vocabulary, **_FP16}


def _bert(width: int, layers: int, heads: int, vocabulary: int = 30522) -> Config:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {"model_type": "bert", **sizes, "intermediate_size": 4 * width, "vocab_size": vocabulary}


def _roberta(width: int, layers: int, heads: int, vocabulary: int = 50265, kind: str = "roberta") -> Config:
    positions = {"max_position_embeddings": 514, "type_vocab_size": 1, "layer_norm_eps": 1e-5}
    return {**_bert(width, layers, heads, vocabulary), "model_type": kind, **positions}


def _bart(layers: int, width: int, **more: Any) -> Config:
    sizes = {"layers": layers, "ffn_dim": 4 * width, "attention_heads": width // 64}
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in sizes.items()}
    return {"model_type": "bart", "d_model": width, **sides, "decoder_start_token_id": 2, **more}


def _vit(width: int, layers: int, heads: int, patch: int = 16) -> Config:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads, "patch_size": patch}
    return {"model_type": "vit", **sizes, "intermediate_size": 4 * width}


def _mistral(width: int, inner: int, layers: int, vocabulary: int, longest: int, **more: Any) -> Config:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocabulary}
    return {
        "model_type": "mistral",
        **sizes,
        "max_position_embeddings": longest,
        "sliding_window": None,
        **_BF16,
        **more,
    }


def _latent(kind: str, width: int, inner: int, layers: int, heads: int, **more: Any) -> Config:
    """Return the configuration of a model with latent attention in the form of DeepSeek-V2 and V3."""
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {"model_type": kind, **sizes, "num_attention_heads": heads, "num_key_value_heads": heads, **_BF16, **more}


def _glm(width: int, inner: int, layers: int, **more: Any) -> Config:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers}
    return {"model_type": "glm4_moe", **sizes, "num_nextn_predict_layers": 1, **_BF16, **more}


def _gemma(kind: str, width: int, inner: int, layers: int, heads: int, groups: int, head: int, **more: Any) -> Config:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "head_dim": head}
    return {"model_type": kind, **sizes, "num_attention_heads": heads, "num_key_value_heads": groups, **_BF16, **more}


def _phi(width: int, inner: int, layers: int, heads: int, groups: int, **more: Any) -> Config:
    return {**_llama(width, inner, layers, heads, groups), "model_type": "phi3", **more}


def _whisper(width: int, layers: int, **more: Any) -> Config:
    sizes = {"layers": layers, "attention_heads": width // 64, "ffn_dim": 4 * width}
    sides = {f"{side}_{key}": value for side in ("encoder", "decoder") for key, value in sizes.items()}
    return {"model_type": "whisper", "d_model": width, **sides, "decoder_start_token_id": 50258, **more}


_DEBERTA = {
    "model_type": "deberta-v2", "vocab_size": 128100, "relative_attention": True, "position_buckets": 256,
    "norm_rel_ebd": "layer_norm", "share_att_key": True, "type_vocab_size": 0, "position_biased_input": False,
    "pos_att_type": ["p2c", "c2p"], "max_relative_positions": -1,
}  # fmt: skip
_LLAMA_3 = {"vocab_size": 128256, "max_position_embeddings": 131072, "rope_theta": 500000.0}
_SMOL = {"vocab_size": 49152, "tie_word_embeddings": True}
_TIED = {"tie_word_embeddings": True}
_LONG_VOCABULARY = {"vocab_size": 152064}
_QWEN_3 = {"head_dim": 128, "max_position_embeddings": 40960}

# Names without their owner, in lower case; endings such as "-instruct" and "-hf" make no difference.
_NAMES: dict[str, Config] = {
    **{name: _of(name) for name in ("gpt2", "gpt2-medium", "gpt2-large", "gpt2-xl")},
    "distilgpt2": _of("gpt2", n_layer=6),
    "tiny-gpt2": _of("gpt2", n_layer=2, n_embd=2, n_head=2),
    "bert-base-uncased": _bert(768, 12, 12),
    "bert-base-cased": _bert(768, 12, 12, 28996),
    "bert-large-uncased": _bert(1024, 24, 16),
    "bert-large-cased": _bert(1024, 24, 16, 28996),
    "bert-base-multilingual-cased": _bert(768, 12, 12, 119547),
    **dict.fromkeys(
        ("all-minilm-l6-v2", "paraphrase-minilm-l6-v2", "multi-qa-minilm-l6-cos-v1"),
        {**_bert(384, 6, 12), "intermediate_size": 1536},
    ),
    **dict.fromkeys(
        ("all-minilm-l12-v2", "minilm-l12-h384-uncased", "bge-small-en-v1.5", "e5-small-v2"),
        {**_bert(384, 12, 12), "intermediate_size": 1536},
    ),
    **dict.fromkeys(("bge-base-en-v1.5", "e5-base-v2"), _bert(768, 12, 12)),
    **dict.fromkeys(("bge-large-en-v1.5", "e5-large-v2"), _bert(1024, 24, 16)),
    "distilbert-base-uncased": {"model_type": "distilbert"},
    "distilbert-base-cased": {"model_type": "distilbert", "vocab_size": 28996},
    "roberta-base": _roberta(768, 12, 12),
    "roberta-large": _roberta(1024, 24, 16),
    "distilroberta-base": _roberta(768, 6, 12),
    "xlm-roberta-base": _roberta(768, 12, 12, 250002, "xlm-roberta"),
    "xlm-roberta-large": _roberta(1024, 24, 16, 250002, "xlm-roberta"),
    **dict.fromkeys(
        ("mpnet-base", "all-mpnet-base-v2", "paraphrase-mpnet-base-v2", "multi-qa-mpnet-base-dot-v1"),
        {"model_type": "mpnet", "vocab_size": 30527, "max_position_embeddings": 514},
    ),
    "albert-base-v2": {
        "model_type": "albert", "hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072,
    },
    "deberta-v3-base": {**_DEBERTA, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
                        "intermediate_size": 3072},
    "deberta-v3-large": {**_DEBERTA, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
                         "intermediate_size": 4096},
    "t5-small": _t5(512, 2048, 6, 8),
    "t5-base": _t5(768, 3072, 12, 12),
    "t5-large": _t5(1024, 4096, 24, 16),
    "t5-3b": _t5(1024, 16384, 24, 32, d_kv=128),
    "flan-t5-small": _flan(512, 1024, 8, 6),
    "flan-t5-base": _flan(768, 2048, 12, 12),
    "flan-t5-large": _flan(1024, 2816, 24, 16),
    "flan-t5-xl": _flan(2048, 5120, 24, 32),
    "bart-base": _bart(6, 768),
    "bart-large": _bart(12, 1024),
    "bart-large-cnn": _bart(12, 1024, vocab_size=50264),
    "opt-125m": _opt(768, 12, 12),
    "opt-350m": _opt(1024, 24, 16, word_embed_proj_dim=512, do_layer_norm_before=False),
    "opt-1.3b": _opt(2048, 24, 32),
    "opt-2.7b": _opt(2560, 32, 32),
    "opt-6.7b": _opt(4096, 32, 32),
    "opt-13b": _opt(5120, 40, 40),
    "opt-30b": _opt(7168, 48, 56),
    "pythia-70m": _pythia(512, 6, 8),
    "pythia-160m": _pythia(768, 12, 12),
    "pythia-410m": _pythia(1024, 24, 16),
    "pythia-1b": _pythia(2048, 16, 8),
    "pythia-1.4b": _pythia(2048, 24, 16),
    "pythia-2.8b": _pythia(2560, 32, 32),
    "pythia-6.9b": _pythia(4096, 32, 32, 50432),
    "pythia-12b": _pythia(5120, 36, 40, 50688),
    "gpt-neo-125m": {"model_type": "gpt_neo", "hidden_size": 768, "num_layers": 12, "num_heads": 12,
                     "attention_types": [[["global", "local"], 6]]},
    "gpt-j-6b": {"model_type": "gptj", **_FP16},
    "llama-2-7b": _of("llama-2-7b", max_position_embeddings=4096, **_FP16),
    "llama-2-13b": _of("llama-2-13b", **_FP16),
    "llama-2-70b": _of("llama-2-70b", **_FP16),
    "llama-7b": _of("llama-2-7b", **_FP16),
    "llama-3-8b": _of("llama-3-8b", rope_theta=500000.0, **_BF16),
    "llama-3-70b": _of("llama-3-70b", rope_theta=500000.0, **_BF16),
    "llama-3.1-8b": _of("llama-3.1-8b", rope_theta=500000.0, **_BF16),
    "llama-3.1-70b": _of("llama-3-70b", **_LLAMA_3, **_BF16),
    "llama-3.1-405b": _of("llama-3.1-405b", rope_theta=500000.0, **_BF16),
    "llama-3.2-1b": _of("llama-3.2-1b", rope_theta=500000.0, **_BF16),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 8, **_LLAMA_3, **_TIED),
    "llama-3.3-70b": _of("llama-3-70b", **_LLAMA_3, **_BF16),
    "tinyllama-1.1b": _llama(2048, 5632, 22, 32, 4),
    "smollm2-135m": _llama(576, 1536, 30, 9, 3, **_SMOL),
    "smollm2-360m": _llama(960, 2560, 32, 15, 5, **_SMOL),
    "smollm2-1.7b": _llama(2048, 8192, 24, 32, 32, **_SMOL),
    "mistral-7b": {"model_type": "mistral", "max_position_embeddings": 32768, **_BF16},
    **{f"mistral-7b{kind}{version}": _mistral(4096, 14336, 32, vocabulary, 32768)
       for kind in ("", "-instruct") for version, vocabulary in (("-v0.2", 32000), ("-v0.3", 32768))},
    "mistral-nemo": _mistral(5120, 14336, 40, 131072, 131072, head_dim=128),
    "mistral-small-24b": _mistral(5120, 32768, 40, 131072, 32768, head_dim=128),
    "mistral-large": _mistral(12288, 28672, 88, 32768, 131072, num_attention_heads=96),
    "mixtral-8x7b": _of("mixtral-8x7b", **_BF16),
    "mixtral-8x22b": _of("mixtral-8x7b", hidden_size=6144, intermediate_size=16384, num_hidden_layers=56,
                         num_attention_heads=48, max_position_embeddings=65536, **_BF16),
    "phi-2": {"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
              "num_attention_heads": 32, "partial_rotary_factor": 0.4, **_FP16},
    "phi-3-mini-4k": {"model_type": "phi3", **_BF16},
    "phi-3-medium-4k": _phi(5120, 17920, 40, 40, 10),
    "phi-3.5-mini": _phi(3072, 8192, 32, 32, 32, max_position_embeddings=131072),
    "phi-4": _phi(5120, 17920, 40, 40, 10, vocab_size=100352, max_position_embeddings=16384),
    "phi-4-mini": _phi(3072, 8192, 32, 24, 8, vocab_size=200064, max_position_embeddings=131072, **_TIED),
    "gemma-2b": {"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
                 "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, **_BF16},
    "gemma-7b": {"model_type": "gemma", **_BF16},
    "gemma-2-2b": {"model_type": "gemma2", **_BF16},
    "gemma-2-9b": _gemma("gemma2", 3584, 14336, 42, 16, 8, 256),
    "gemma-2-27b": _gemma("gemma2", 4608, 36864, 46, 32, 16, 128),
    "gemma-3-1b": _gemma("gemma3_text", 1152, 6912, 26, 4, 1, 256, sliding_window=512, vocab_size=262144,
                         max_position_embeddings=32768),
    "gemma-3-4b": _gemma("gemma3_text", 2560, 10240, 34, 8, 4, 256, sliding_window=1024),
    "gemma-3-12b": _gemma("gemma3_text", 3840, 15360, 48, 16, 8, 256, sliding_window=1024),
    "gemma-3-27b": _gemma("gemma3_text", 5376, 21504, 62, 32, 16, 128, sliding_window=1024),
    "falcon-7b": {"model_type": "falcon", **_BF16},
    **{f"qwen2{dot}-{size}": _qwen("qwen2", *sizes, **more) for dot in ("", ".5") for size, sizes, more in (
        ("0.5b", (896, 4864, 24, 14, 2), _TIED), ("1.5b", (1536, 8960, 28, 12, 2), _TIED),
        ("7b", (3584, 18944, 28, 28, 4), _LONG_VOCABULARY), ("72b", (8192, 29568, 80, 64, 8), _LONG_VOCABULARY),
    )},
    "qwen2.5-3b": _qwen("qwen2", 2048, 11008, 36, 16, 2, **_TIED),
    "qwen2.5-14b": _qwen("qwen2", 5120, 13824, 48, 40, 8, **_LONG_VOCABULARY),
    "qwen2.5-32b": _qwen("qwen2", 5120, 27648, 64, 40, 8, **_LONG_VOCABULARY),
    "qwen3-0.6b": _qwen("qwen3", 1024, 3072, 28, 16, 8, **_QWEN_3, **_TIED),
    "qwen3-1.7b": _qwen("qwen3", 2048, 6144, 28, 16, 8, **_QWEN_3, **_TIED),
    "qwen3-4b": _qwen("qwen3", 2560, 9728, 36, 32, 8, **_QWEN_3, **_TIED),
    "qwen3-8b": _qwen("qwen3", 4096, 12288, 36, 32, 8, **_QWEN_3),
    "qwen3-14b": _qwen("qwen3", 5120, 17408, 40, 40, 8, **_QWEN_3),
    "qwen3-32b": _qwen("qwen3", 5120, 25600, 64, 64, 8, **_QWEN_3),
    "qwen3-30b-a3b": _of("qwen3-30b-a3b", max_position_embeddings=40960, **_BF16),
    **dict.fromkeys(("qwen3-235b-a22b", "qwen3-235b"), _of("qwen3-235b-a22b", **_BF16)),
    **dict.fromkeys(("qwen3-coder-480b-a35b", "qwen3-coder-480b"), _of(
        "qwen3-235b-a22b", hidden_size=6144, intermediate_size=8192, moe_intermediate_size=2560, num_hidden_layers=62,
        num_attention_heads=96, num_key_value_heads=8, num_experts=160, max_position_embeddings=262144, **_BF16)),
    **dict.fromkeys(("qwen3-next-80b-a3b", "qwen3-next-80b"), {
        "model_type": "qwen3_next", "max_position_embeddings": 262144, **_BF16}),
    "qwq-32b": _qwen("qwen2", 5120, 27648, 64, 40, 8, **_LONG_VOCABULARY),
    "deepseek-r1-distill-llama-8b": _of("llama-3.1-8b", **_LLAMA_3, **_BF16),
    "deepseek-r1-distill-llama-70b": _of("llama-3-70b", **_LLAMA_3, **_BF16),
    "deepseek-r1-distill-qwen-32b": _qwen("qwen2", 5120, 27648, 64, 40, 8, **_LONG_VOCABULARY),
    "gpt-oss-20b": _of("gpt-oss-20b", **_BF16),
    "gpt-oss-120b": _of("gpt-oss-120b", **_BF16),
    "deepseek-v2": _latent("deepseek_v2", 5120, 12288, 60, 128, n_routed_experts=160, moe_intermediate_size=1536,
                           num_experts_per_tok=6, first_k_dense_replace=1, max_position_embeddings=163840),
    "deepseek-v2-lite": _latent("deepseek_v2", 2048, 10944, 27, 16, q_lora_rank=None, moe_intermediate_size=1408,
                                num_experts_per_tok=6, first_k_dense_replace=1, max_position_embeddings=163840),
    **dict.fromkeys(("deepseek-v3", "deepseek-r1", "deepseek-r1-0528", "deepseek-v3-0324", "deepseek-v3.1"),
                    _of("deepseek-v3", max_position_embeddings=163840, **_BF16)),
    **dict.fromkeys(("deepseek-v3.2", "deepseek-v3.2-exp"), {"model_type": "deepseek_v32", **_BF16}),
    **{f"kimi-{name}": _latent("deepseek_v3", 7168, 18432, 61, 64, n_routed_experts=384, first_k_dense_replace=1,
                               vocab_size=163840, max_position_embeddings=longest)
       for name, longest in (("k2", 131072), ("k2-instruct-0905", 262144), ("k2-thinking", 262144), ("k2.5", 262144))},
    "glm-4.5": _glm(5120, 12288, 92, n_routed_experts=160, first_k_dense_replace=3, moe_intermediate_size=1536,
                    use_qk_norm=True),
    "glm-4.5-air": _glm(4096, 10944, 46),
    "glm-4.6": _glm(5120, 12288, 92, n_routed_experts=160, first_k_dense_replace=3, moe_intermediate_size=1536,
                    use_qk_norm=True, max_position_embeddings=202752),
    "glm-5": {"model_type": "glm_moe_dsa", "num_nextn_predict_layers": 1, **_BF16},
    **dict.fromkeys(("minimax-m2", "minimax-m2.1", "minimax-m2.5"), {
        "model_type": "minimax_m2", "use_qk_norm": True, "num_mtp_modules": 3, **_BF16}),
    **dict.fromkeys(("nvidia-nemotron-3-nano-30b-a3b", "nemotron-3-nano-30b-a3b"), {
        "model_type": "nemotron_h", "hidden_size": 2688, "num_attention_heads": 32, "num_key_value_heads": 2,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME", "head_dim": 128,
        "intermediate_size": 1856, "moe_intermediate_size": 1856, "moe_shared_expert_intermediate_size": 3712,
        "n_routed_experts": 128, "num_experts_per_tok": 6, "n_groups": 8, "ssm_state_size": 128, "mamba_num_heads": 64,
        "mamba_head_dim": 64, "conv_kernel": 4, "num_hidden_layers": 52, "vocab_size": 131072,
        "max_position_embeddings": 262144, **_BF16}),
    "vit-base-patch16-224": _vit(768, 12, 12),
    "vit-base-patch16-224-in21k": _vit(768, 12, 12),
    "vit-large-patch16-224": _vit(1024, 24, 16),
    "resnet-50": {"model_type": "resnet"},
    "convnext-tiny-224": {"model_type": "convnext"},
    "swin-tiny-patch4-window7-224": {"model_type": "swin"},
    "clip-vit-base-patch32": {"model_type": "clip"},
    "clip-vit-large-patch14": {
        "model_type": "clip", "projection_dim": 768,
        "text_config": {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
                        "projection_dim": 768},
        "vision_config": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
                          "num_attention_heads": 16, "patch_size": 14, "projection_dim": 768},
    },
    **dict.fromkeys(("wav2vec2-base", "wav2vec2-base-960h"), {"model_type": "wav2vec2"}),
    "hubert-base-ls960": {"model_type": "hubert"},
    "wav2vec2-large-960h": {**_bert(1024, 24, 16, 32), "model_type": "wav2vec2"},
    "wav2vec2-large-xlsr-53": {**_bert(1024, 24, 16, 32), "model_type": "wav2vec2", "feat_extract_norm": "layer",
                               "conv_bias": True, "do_stable_layer_norm": True},
    "whisper-tiny": _whisper(384, 4),
    "whisper-base": _whisper(512, 6),
    "whisper-small": _whisper(768, 12),
    "whisper-medium": _whisper(1024, 24),
    "whisper-large-v2": _whisper(1280, 32),
    "whisper-large-v3": _whisper(1280, 32, num_mel_bins=128, vocab_size=51866),
    "whisper-large-v3-turbo": _whisper(1280, 32, num_mel_bins=128, vocab_size=51866, decoder_layers=4),
}  # fmt: skip

# Endings of names that share the configuration of the name without them.
_ENDINGS = re.compile(
    r"-(hf|chat|chat-v[\d.]+|instruct|it|pt|base|bnb-4bit|unsloth|v0\.[1-3]|deduped|intermediate-step-[\w.]+|step-[\w.]+"
    r"|2[45]\d\d|thinking)$"
)
# Components of Stable Diffusion 1.x by their folder: class, and what differs from the defaults of the class.
_STABLE_DIFFUSION: dict[str, dict[str, Any]] = {
    "unet": {"_class_name": "UNet2DConditionModel", "sample_size": 64, "cross_attention_dim": 768},
    "vae": {
        "_class_name": "AutoencoderKL", "sample_size": 512, "block_out_channels": [128, 256, 512, 512],
        "down_block_types": ["DownEncoderBlock2D"] * 4, "up_block_types": ["UpDecoderBlock2D"] * 4,
        "layers_per_block": 2,
    },
    "text_encoder": {
        "model_type": "clip_text_model", "hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12,
        "projection_dim": 768, "architectures": ["CLIPTextModel"],
    },
    "scheduler": {
        "_class_name": "PNDMScheduler", "beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear",
        "num_train_timesteps": 1000, "skip_prk_steps": True, "steps_offset": 1,
    },
}  # fmt: skip
# Version 2 has a wider text encoder, whose width its attention takes.
_STABLE_DIFFUSION_2: dict[str, dict[str, Any]] = {
    **_STABLE_DIFFUSION,
    "unet": {
        **_STABLE_DIFFUSION["unet"], "cross_attention_dim": 1024, "attention_head_dim": [5, 10, 20, 20],
        "use_linear_projection": True,
    },
    "text_encoder": {
        **_STABLE_DIFFUSION["text_encoder"], "hidden_size": 1024, "intermediate_size": 4096,
        "num_attention_heads": 16, "num_hidden_layers": 23, "hidden_act": "gelu", "projection_dim": 512,
    },
}  # fmt: skip
_PIPELINES = (
    (re.compile(r"stable-diffusion-2"), _STABLE_DIFFUSION_2),
    (re.compile(r"stable-diffusion-v?1"), _STABLE_DIFFUSION),
)


def published(name: str) -> Config | None:
    """Return the configuration of the model with the hub's ``name``, or None if it is not known here."""
    short = name.rpartition("/")[2].lower().removeprefix("meta-")
    while short not in _NAMES:
        shorter = _ENDINGS.sub("", short)
        if shorter == short:
            return None
        short = shorter
    return _NAMES[short]


# How engines store weights that are published in fewer than 16 bits, as ``quantization_config`` says it; by names, and
# by endings of names.
_BLOCKS_FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
_INT4_EXPERTS = {"quantization_config": {"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["self_attn"]}}
_PREDICTS_ONE = {"num_nextn_predict_layers": 1}
_STORED: dict[str, Config] = {
    r"gpt-oss-.*": {"quantization_config": {"quant_method": "mxfp4"}},
    r"deepseek-(v3.*|r1|r1-0528)": {**_BLOCKS_FP8, **_PREDICTS_ONE},
    r"kimi-k2(-instruct.*|-base)?|minimax-m2.*": _BLOCKS_FP8,
    r"kimi-k2(-thinking|\.5)": _INT4_EXPERTS,
    r"(qwen|minimax|deepseek).*-fp8": _BLOCKS_FP8,
    r".*-fp8(-dynamic)?": {"quantization_config": {"quant_method": "fp8"}},
    r".*-(nvfp4|fp4)": {"quantization_config": {"quant_algo": "nvfp4"}},
    r".*-(awq|gptq|gptq-int4|int4|w4a16|quantized\.w4a16)": {"quantization_config": {"quant_method": "awq", "bits": 4}},
    r".*": {},
}
_STORED_ENDINGS = re.compile(r"-(fp8|fp8-dynamic|nvfp4|fp4|awq|gptq|gptq-int4|int4|w4a16|quantized\.w4a16|bf16|mxfp4)$")


def served(name: str) -> Config:
    """Return the configuration of the model ``name`` as engines serve it, with the library's defaults and how its
    weights are stored; raise ``InputError`` naming the nearest for a name that is not known.
    """
    short = name.rpartition("/")[2].lower()
    plain = _STORED_ENDINGS.sub("", short)
    found = published(plain) or PRESETS.get(plain)
    if found is None:
        known = sorted({*_NAMES, *PRESETS})
        near = get_close_matches(plain, known, 3, 0.5)
        nearest = f"did you mean {', '.join(near)}? " if near else ""
        raise InputError(f"model {name}: is not known; {nearest}give its config.json (--model-config or draft=FILE)")
    stored = next(each for form, each in _STORED.items() if re.fullmatch(form, short))
    return {**with_defaults(found), **stored, "_name_or_path": name}


def read_configuration(path: Path) -> dict[str, Any]:
    """Read a Hugging Face ``config.json``; raise ``InputError`` naming the file and the problem."""
    try:
        config = decoded(read_text(path, "configuration"), once=True)
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); check its path and permissions") from None
    except ValueError as error:
        raise InputError(f"{path}: not valid JSON ({error}); save the configuration again") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise InputError(f"{path}: not a Hugging Face model configuration; it must have a model_type")
    return config


def with_defaults(config: Config) -> Config:
    """Return ``config`` with the defaults of its class in Transformers, its ``text_config`` likewise."""
    filled = {**DEFAULTS.get(str(config.get("model_type")), {}), **config}
    inner = config.get("text_config")
    return {**filled, "text_config": with_defaults(inner)} if isinstance(inner, Mapping) else filled


def published_parts(name: str) -> Mapping[str, Config]:
    """Return the configurations of a pipeline's parts by their folders; none if it is not known here."""
    short = name.rpartition("/")[2].lower()
    return next((parts for form, parts in _PIPELINES if form.search(short)), {})
