"""Configurations of models with published training speeds, by name; sources beside each."""

from __future__ import annotations

from typing import Any


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


def _llama(**sizes: Any) -> dict[str, Any]:
    return {"model_type": "llama", **sizes}


_LLAMA_3_8B = {"vocab_size": 128256, "intermediate_size": 14336, "num_key_value_heads": 8}
_LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}

TRAINING_PRESETS: dict[str, dict[str, Any]] = {
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
    "llama-2-13b": _llama(
        hidden_size=5120, intermediate_size=13824, num_hidden_layers=40, num_attention_heads=40,
        max_position_embeddings=4096,
    ),
    "llama-2-70b": _llama(**_LLAMA_70B, max_position_embeddings=4096),
    "llama-3-70b": _llama(**_LLAMA_70B, vocab_size=128256, max_position_embeddings=8192),
    "llama-3.1-8b": _llama(**_LLAMA_3_8B, max_position_embeddings=131072),
    "llama-3.1-405b": _llama(
        hidden_size=16384, intermediate_size=53248, num_hidden_layers=126, num_attention_heads=128,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=131072,
    ),
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
