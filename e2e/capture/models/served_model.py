"""The layers of a language model, from its Hugging Face configuration: what a serving engine computes and stores.

A model is a list of groups of equal layers. A layer mixes tokens (softmax attention with grouped queries, a window or
sinks; latent attention, DeepSeek-V2, arXiv 2405.04434; linear attention with a fixed state) and applies a feed-forward
block (dense, or experts of which each token uses a few).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from costmodel.base.errors import InputError
from costmodel.operators.attention import LinearKind
from e2e.capture.models.configurations import read_configuration, served, with_defaults


@dataclass(frozen=True)
class SoftmaxAttention:
    """Softmax attention of ``heads`` queries over ``kv_heads`` keys and values of ``head_dim`` elements."""

    heads: int
    kv_heads: int
    head_dim: int
    # Most keys visible to a query; 0 for all.
    window: int = 0
    # A learned score per head takes part in the softmax.
    sinks: bool = False
    # Queries and keys are normalised; each over all heads at once, so that ranks add up their squares.
    normalised: bool = False
    normalised_together: bool = False
    # The output is multiplied by a gate as wide as the queries.
    gated: bool = False

    def cache_elements(self, ranks: int) -> int:
        """Elements of one token that each of ``ranks`` keeps of the whole text: none with a window."""
        return 0 if self.window else 2 * max(self.kv_heads // ranks, 1) * self.head_dim

    def held_bytes(self, ranks: int, bits: float) -> float:
        """Bytes that a sequence holds on each of ``ranks`` whatever its length, of ``bits`` an element: the window."""
        return self.window * 2 * max(self.kv_heads // ranks, 1) * self.head_dim * bits / 8

    def parameters(self, hidden: int) -> int:
        """Number of weights."""
        return hidden * self.head_dim * (self.heads * (3 if self.gated else 2) + 2 * self.kv_heads)


@dataclass(frozen=True)
class LatentAttention:
    """Attention with keys and values compressed to ``kv_rank`` elements a token, beside ``rope_dim`` rotated ones."""

    heads: int
    # 0: queries are not compressed.
    query_rank: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    # Sparse attention: heads and width of the indexer, and keys that it selects (DeepSeek-V3.2); 0: none.
    index_heads: int = 0
    index_dim: int = 0
    selected: int = 0

    def cache_elements(self, ranks: int) -> int:
        """Elements of the compressed keys and values of one token, and of the indexer's key, on each rank."""
        return self.kv_rank + self.rope_dim + self.index_dim

    def held_bytes(self, ranks: int, bits: float) -> float:
        """0: all grows with the tokens."""
        return 0.0

    def parameters(self, hidden: int) -> int:
        """Number of weights."""
        query = self.heads * (self.nope_dim + self.rope_dim)
        found = hidden * (self.kv_rank + self.rope_dim)
        found += (hidden + query) * self.query_rank if self.query_rank else hidden * query
        found += self.kv_rank * self.heads * (self.nope_dim + self.value_dim) + self.heads * self.value_dim * hidden
        if self.index_heads:
            found += (self.query_rank or hidden) * self.index_heads * self.index_dim + hidden * self.index_dim
        return found


@dataclass(frozen=True)
class LinearMixer:
    """Linear attention with a state of ``key_dim`` x ``value_dim`` per value head, after a short convolution."""

    kind: LinearKind
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    convolution: int

    def cache_elements(self, ranks: int) -> int:
        """0: the state does not grow with the tokens."""
        return 0

    def held_bytes(self, ranks: int, bits: float) -> float:
        """Bytes of the state, in FP32, and of the last inputs of the convolution, in 16 bits, on each of ``ranks``."""
        states = self.value_heads * self.key_dim * self.value_dim * 4
        return (states + (self.convolution - 1) * self.channels * 2) / ranks

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim

    def parameters(self, hidden: int) -> int:
        """Number of weights: queries, keys, values, gate, two scalars per head, output."""
        values = self.value_heads * self.value_dim
        return hidden * (self.channels + 2 * values + 2 * self.value_heads)


Mixer = SoftmaxAttention | LatentAttention | LinearMixer


@dataclass(frozen=True)
class FeedForward:
    """Dense block of width ``inner``, 0 for none; ``gated``: the first product gives gate and value."""

    inner: int
    gated: bool = True

    def parameters(self, hidden: int) -> int:
        """Number of weights."""
        return hidden * self.inner * (3 if self.gated else 2)


@dataclass(frozen=True)
class Experts:
    """``count`` experts of width ``inner``, of which a token uses ``per_token``; ``shared``: width of those that all
    tokens use.
    """

    count: int
    per_token: int
    inner: int
    shared: int = 0
    gated: bool = True

    def parameters(self, hidden: int) -> int:
        """Number of weights, the router's included."""
        return hidden * ((3 if self.gated else 2) * (self.count * self.inner + self.shared) + self.count)


@dataclass(frozen=True)
class Layer:
    """One layer of the model."""

    mixer: Mixer
    block: FeedForward | Experts


@dataclass(frozen=True)
class ServedModel:
    """A language model as engines serve it."""

    name: str
    hidden: int
    vocabulary: int
    # Groups of equal layers and their numbers.
    layers: tuple[tuple[Layer, int], ...]
    # The head multiplies by the embedding's matrix.
    tied: bool
    # Longest prompt and output together.
    longest: int
    # How weights are stored, as the configuration says; empty: 16 bits.
    stored: str = ""
    stored_experts: str = ""
    # Layers that predict further tokens (DeepSeek-V3), for speculative decoding.
    predicting: int = 0

    @property
    def depth(self) -> int:
        """Number of layers."""
        return sum(count for _, count in self.layers)

    @property
    def has_experts(self) -> bool:
        """Whether some layers choose among experts."""
        return any(isinstance(layer.block, Experts) for layer, _ in self.layers)

    @property
    def parameters(self) -> int:
        """Number of weights."""
        layers = (
            count * (layer.mixer.parameters(self.hidden) + layer.block.parameters(self.hidden))
            for layer, count in self.layers
        )
        return sum(layers) + self.embedding_parameters

    @property
    def embedding_parameters(self) -> int:
        """Weights of the embedding, and of the head if it has its own."""
        return self.vocabulary * self.hidden * (1 if self.tied else 2)


_MOST_LAYERS = 2000  # the deepest published transformers have 1,000 (arXiv 2203.00555)
_ENCODERS = ("albert", "bert", "deberta-v2", "distilbert", "electra", "mpnet", "roberta", "t5", "vit", "xlm-roberta")
# Entries of models with layers that are not known here, and what these are.
_UNKNOWN = {
    "attn_layer_period": "Mamba layers", "mamba_d_state": "Mamba layers", "ssm_cfg": "Mamba layers",
    "state_size": "Mamba layers", "moe_latent_size": "experts in a latent space",
    "block_configs": "layers of different sizes", "hybrid_layer_pattern": "layers of different sizes",
    "layer_group_size": "lightning attention",
    "linear_attn_config": "Kimi's delta attention", "share_q_dim": "factorised attention",
    "zero_expert_num": "experts that compute nothing",
}  # fmt: skip
# Model types whose attention normalises queries and keys.
_NORMALISED = (
    "qwen3", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe", "gemma3", "glm4_moe", "minimax_m2", "olmo2",
)  # fmt: skip
# Of these, over all heads at once (OLMo 2, arXiv 2501.00656; modeling_minimax_m2.py).
_TOGETHER = ("minimax_m2", "olmo2")
_UNGATED = ("gpt2", "gpt_neox", "opt", "falcon", "phi", "gptj", "starcoder2", "nemotron", "mpt", "bloom")


def named_model(name: str | Path) -> ServedModel:
    """The model of a name, or of the Hugging Face configuration file ``name``."""
    if isinstance(name, str) and not name.endswith(".json"):
        return served_model(served(name), name)
    return served_model(with_defaults(read_configuration(Path(name))), str(name))


def served_model(config: Mapping[str, Any], source: str) -> ServedModel:
    """The model of a Hugging Face configuration; ``InputError`` naming ``source`` if it is no decoder that is known."""
    try:
        return _model(_text_part(config), source)
    except InputError as error:
        raise InputError(f"{source}: {error}") from None


def _model(config: Mapping[str, Any], source: str) -> ServedModel:
    kind = str(config.get("model_type", ""))
    if config.get("is_encoder_decoder") or kind in _ENCODERS:
        raise InputError(f"has an encoder ({kind}); serving is modelled for decoders only")
    unknown = {entry: what for entry, what in _UNKNOWN.items() if entry in config}
    listed = config.get("attn_type_list")
    if isinstance(listed, list) and 0 in listed:  # MiniMax-01
        unknown["attn_type_list"] = "lightning attention"
    if unknown:
        entry, what = next(iter(unknown.items()))
        raise InputError(f"has {what} ({entry}), which serving does not model")
    hidden = _number(config, "hidden_size", "n_embd", "d_model")
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):
        layers = Counter(_hybrid_layers(config, hidden, pattern))
    else:
        kinds = _layer_kinds(config, _number(config, "num_hidden_layers", "n_layer", "num_layers", most=_MOST_LAYERS))
        layers = Counter(
            Layer(_mixer(config, hidden, each), _block(config, hidden, place)) for place, each in enumerate(kinds)
        )
    longest = ("max_position_embeddings", "n_positions", "max_sequence_length")
    predicting = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules")
    try:
        stored, experts = stored_precision(config)
    except (TypeError, ValueError, AttributeError):
        raise InputError("quantization_config cannot be read; correct it, or leave it out") from None
    return ServedModel(
        name=str(config.get("_name_or_path") or source),
        hidden=hidden,
        vocabulary=_number(config, "vocab_size", most=1 << 24),
        layers=tuple(layers.items()),
        tied=bool(config.get("tie_word_embeddings", kind in ("gpt2", "gemma", "gemma2", "gemma3", "gemma3_text"))),
        longest=_number(config, *longest, default=1 << 20, most=1 << 31),
        stored=stored,
        stored_experts=experts,
        predicting=_number(config, *predicting, default=0),
    )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The language model of a configuration with several parts (``text_config``)."""
    inner = config.get("text_config") or config.get("llm_config")
    if not isinstance(inner, Mapping):
        return config
    shared = {key: config[key] for key in ("quantization_config", "tie_word_embeddings") if key in config}
    return {**shared, **inner}


def _number(config: Mapping[str, Any], *names: str, default: int | None = None, most: int = 1 << 20) -> int:
    """Whole number by the first of ``names``, which differ between libraries, that the configuration has."""
    found = {name: config[name] for name in names if type(config.get(name)) is int}
    if not found and default is None:
        kind = config.get("model_type", "no model_type")
        raise InputError(f"has no {names[0]} ({kind}); serving is modelled for decoders only")
    least = 1 if default is None else 0
    for name, value in found.items():
        if not least <= value <= most:
            raise InputError(f"{name} is {value}; it must be from {least} to {most:,}")
        return value
    return default or 0


def _layer_kinds(config: Mapping[str, Any], count: int) -> list[str]:
    """Kind of attention of each layer, as ``layer_types`` names them."""
    listed = config.get("layer_types")
    if isinstance(listed, list) and len(listed) >= count:
        return [str(each) for each in listed[:count]]
    every = config.get("full_attention_interval") or config.get("sliding_window_pattern")
    if isinstance(every, int) and every > 0:
        other = "linear_attention" if "linear_num_value_heads" in config else "sliding_attention"
        return ["full_attention" if (place + 1) % every == 0 else other for place in range(count)]
    window = config.get("sliding_window")
    sliding = isinstance(window, int) and window > 0 and config.get("use_sliding_window", True)
    return ["sliding_attention" if sliding else "full_attention"] * count


def _hybrid_layers(config: Mapping[str, Any], hidden: int, pattern: str) -> Iterator[Layer]:
    """Layers of Nemotron-H (arXiv 2504.03624): a letter for each mixer (``M`` Mamba-2, ``*`` attention) and each block
    (``-`` dense, ``E`` experts), which a mixer may be without.
    """
    if len(pattern) > _MOST_LAYERS or not re.fullmatch("([M*][-E]?)+", pattern):
        raise InputError(f"hybrid_override_pattern is {pattern[:80]!r}; known are M and *, with - or E after them")
    names = ("n_groups", "ssm_state_size", "mamba_num_heads", "mamba_head_dim", "conv_kernel")
    found: dict[str, Any] = {
        "M": LinearMixer("ssd", *(_number(config, name, default=1) for name in names)),
        "*": _mixer(config, hidden, "full_attention"),
        "E": _block(config, hidden, 0),
        "-": FeedForward(_number(config, "intermediate_size", default=1), False),
        "": FeedForward(0),
    }
    for mixer, block in re.findall("([M*])([-E]?)", pattern):
        yield Layer(found[mixer], found[block])


def _mixer(config: Mapping[str, Any], hidden: int, layer: str) -> Mixer:
    heads = _number(config, "num_attention_heads", "n_head", "num_heads")
    if layer in ("linear_attention", "mamba", "mamba2"):
        names = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
        sizes = [
            *(_number(config, f"linear_{name}") for name in names),
            _number(config, "linear_conv_kernel_dim", default=4),
        ]
        return LinearMixer("gated_delta", *sizes)
    if config.get("kv_lora_rank"):
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
        sizes = [_number(config, "q_lora_rank", default=0), *(_number(config, name) for name in names)]
        indexer = [_number(config, name, default=0) for name in ("index_n_heads", "index_head_dim", "index_topk")]
        return LatentAttention(heads, *sizes, *indexer)
    kind = str(config.get("model_type", ""))
    groups = _number(config, "num_key_value_heads", "num_kv_heads", default=heads) or heads
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        groups = 1
    if heads % groups:
        raise InputError(f"{heads} heads cannot share {groups} key-value heads; check the configuration")
    return SoftmaxAttention(
        heads,
        groups,
        _number(config, "head_dim", default=0) or max(hidden // heads, 1),
        window=_number(config, "sliding_window", default=0) if layer == "sliding_attention" else 0,
        sinks=kind == "gpt_oss",
        normalised=kind.removesuffix("_text") in _NORMALISED or bool(config.get("use_qk_norm")),
        normalised_together=kind in _TOGETHER,
        gated=bool(config.get("attn_output_gate")),
    )


def _block(config: Mapping[str, Any], hidden: int, place: int) -> FeedForward | Experts:
    names = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts")
    count = _number(config, *names, default=0, most=1 << 14)
    listed = config.get("mlp_only_layers")
    dense = place < _number(config, "first_k_dense_replace", "moe_layer_start_index", default=0) or (
        isinstance(listed, list) and place in listed
    )
    step = _number(config, "decoder_sparse_step", "moe_layer_freq", "interleave_moe_layer_step", default=1) or 1
    if count < 2 or dense or (place + 1) % step:
        inner = _number(
            config,
            "intermediate_size_mlp",
            "intermediate_size",
            "n_inner",
            "ffn_dim",
            "ffn_hidden_size",
            default=4 * hidden,
        )
        return FeedForward(inner, config.get("model_type") not in _UNGATED)
    inner = _number(config, "moe_intermediate_size", "intermediate_size")
    shared = _number(config, "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", default=0)
    beside = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    shared = shared or _number(config, *beside, default=0) * inner
    if config.get("model_type") == "llama4_text":  # one, of which its configuration says nothing
        shared = inner
    return Experts(
        count,
        _number(config, "num_experts_per_tok", "experts_per_token", "moe_topk", "moe_k", most=count),
        inner,
        shared,
        config.get("model_type") != "nemotron_h",
    )


def stored_precision(config: Mapping[str, Any]) -> tuple[str, str]:
    """Precision of the weights and of the experts' weights that ``quantization_config`` names; empty: 16 bits."""
    stored = config.get("quantization_config") or config.get("compression_config")
    if not isinstance(stored, Mapping):
        return "", ""
    algorithm = str(stored.get("quant_algo", "")).lower()
    method = str(stored.get("quant_method", algorithm)).lower()
    if method == "mxfp4":
        return "", "mxfp4"
    if "fp8" in method or "fp8" in algorithm:
        kind = "fp8-block" if stored.get("weight_block_size") else "fp8"
        return kind, kind
    if "nvfp4" in algorithm or "fp4" in method:
        return "nvfp4", "nvfp4"
    if method not in ("awq", "gptq", "compressed-tensors"):
        return "", ""
    bits = int(stored.get("bits") or stored.get("w_bit") or 0)
    for group in (stored.get("config_groups") or {}).values():
        weights = group.get("weights") or {}
        bits = int(weights.get("num_bits") or bits)
        if bits == 8 and weights.get("type") == "float":
            return "fp8", "fp8"
    left = " ".join(map(str, stored.get("modules_to_not_convert") or stored.get("ignore") or ())).lower()
    kind = {4: "int4", 8: "int8"}.get(bits, "")
    return ("" if "self_attn" in left or "attention" in left else kind), kind
