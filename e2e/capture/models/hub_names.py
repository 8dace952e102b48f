"""Configurations of models on the Hugging Face hub, by their names there: those of :data:`PRESETS` under another name,
and those that differ from the defaults of their configuration class in a few sizes.

Sources: the ``config.json`` of each model; ``dtype`` is that of its weights. Imports ``torch``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from e2e.capture.models.transformer import PRESETS

Config = Mapping[str, Any]

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
_HEADS_OF_128 = {"head_dim": 128}

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
    "mistral-7b": {"model_type": "mistral", **_BF16},
    "mixtral-8x7b": _of("mixtral-8x7b", **_BF16),
    "phi-2": {"model_type": "phi", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 32,
              "num_attention_heads": 32, "partial_rotary_factor": 0.4, **_FP16},
    "phi-3-mini-4k": {"model_type": "phi3", **_BF16},
    "gemma-2b": {"model_type": "gemma", "hidden_size": 2048, "intermediate_size": 16384, "num_hidden_layers": 18,
                 "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256, **_BF16},
    "gemma-7b": {"model_type": "gemma", **_BF16},
    "gemma-2-2b": {"model_type": "gemma2", **_BF16},
    "falcon-7b": {"model_type": "falcon", **_BF16},
    **{f"qwen2{dot}-{size}": _qwen("qwen2", *sizes, **more) for dot in ("", ".5") for size, sizes, more in (
        ("0.5b", (896, 4864, 24, 14, 2), _TIED), ("1.5b", (1536, 8960, 28, 12, 2), _TIED),
        ("7b", (3584, 18944, 28, 28, 4), _LONG_VOCABULARY), ("72b", (8192, 29568, 80, 64, 8), _LONG_VOCABULARY),
    )},
    "qwen2.5-3b": _qwen("qwen2", 2048, 11008, 36, 16, 2, **_TIED),
    "qwen2.5-14b": _qwen("qwen2", 5120, 13824, 48, 40, 8, **_LONG_VOCABULARY),
    "qwen2.5-32b": _qwen("qwen2", 5120, 27648, 64, 40, 8, **_LONG_VOCABULARY),
    "qwen3-0.6b": _qwen("qwen3", 1024, 3072, 28, 16, 8, **_HEADS_OF_128, **_TIED),
    "qwen3-1.7b": _qwen("qwen3", 2048, 6144, 28, 16, 8, **_HEADS_OF_128, **_TIED),
    "qwen3-4b": _qwen("qwen3", 2560, 9728, 36, 32, 8, **_HEADS_OF_128, **_TIED),
    "qwen3-8b": _qwen("qwen3", 4096, 12288, 36, 32, 8, **_HEADS_OF_128),
    "qwen3-14b": _qwen("qwen3", 5120, 17408, 40, 40, 8, **_HEADS_OF_128),
    "qwen3-32b": _qwen("qwen3", 5120, 25600, 64, 64, 8, **_HEADS_OF_128),
    "qwen3-30b-a3b": _of("qwen3-30b-a3b", **_BF16),
    "gpt-oss-20b": _of("gpt-oss-20b", **_BF16),
    "deepseek-v3": _of("deepseek-v3", **_BF16),
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
    r"-(hf|chat|chat-v[\d.]+|instruct|it|base|bnb-4bit|unsloth|v0\.[1-3]|deduped|intermediate-step-[\w.]+|step-[\w.]+|2507)$"
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


def published_parts(name: str) -> Mapping[str, Config]:
    """Return the configurations of a pipeline's parts by their folders; none if it is not known here."""
    short = name.rpartition("/")[2].lower()
    return next((parts for form, parts in _PIPELINES if form.search(short)), {})
