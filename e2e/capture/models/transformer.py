"""Transformers built from Hugging Face configurations, of presets by name or of files; weights are never read or
downloaded. Presets with published training speeds name their sources.

Steps that decode (``--cache-length``) have a cache of keys and values of earlier tokens. It is written in place, one
row per new token, and read without a copy, as in serving engines and the static cache of Transformers; the library's
default cache copies itself for every token. Layers with a sliding window keep all tokens here and attend to those in
the window. Imports ``torch``.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from costmodel.base.errors import InputError, MissingDependencyError, ModelError
from e2e.capture.attention import CACHED_TOKENS, register_fused, register_latent
from e2e.capture.models.configurations import read_configuration
from e2e.capture.script_errors import oversized_told
from e2e.step.options import AttentionForm


def decoding_arguments(
    model: Any, ids: torch.Tensor, tokens: int, source: str, dtype: torch.dtype | None = None
) -> Mapping[str, Any]:
    """Return the arguments of a Transformers ``model`` for new tokens ``ids`` (batch, length) after ``tokens`` cached
    ones, stored as ``dtype`` (None: the model's type).

    Raise ``InputError`` if the model's cache is not of keys and values, or if the model has an encoder.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

    if getattr(model.config, "is_encoder_decoder", False):
        raise InputError(
            f"{source}: --cache-length: it has an encoder too; leave --cache-length out, or give a --script"
        )
    cache = DynamicCache(config=model.config)
    kinds = {type(layer) for layer in cache.layers}
    if not kinds or not kinds <= {DynamicLayer, DynamicSlidingWindowLayer}:
        named = ", ".join(sorted(kind.__name__ for kind in kinds)) or "no cache"
        raise InputError(f"{source}: --cache-length is for caches of keys and values, it has {named}; give a --script")
    in_place = _in_place(DynamicLayer)
    cache.layers = [in_place(tokens, dtype) for _ in cache.layers]
    for module in model.modules():
        setattr(module, CACHED_TOKENS, tokens)
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "use_cache"):
            config.use_cache = True
    return {"input_ids": ids, "past_key_values": cache, "use_cache": True}


def _in_place(base: type[Any]) -> type[Any]:
    """Return a layer of the library's cache, which is imported only here."""

    class LayerInPlace(base):  # type: ignore[misc]
        """Keys and values of ``tokens`` tokens and those of the step, which each call writes again."""

        def __init__(self, tokens: int, kept: torch.dtype | None) -> None:
            super().__init__()
            self.tokens, self.kept = tokens, kept
            self.is_initialized = False

        def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
            if not self.is_initialized:
                self.keys, self.values = (self._longer(each) for each in (key_states, value_states))
                self.is_initialized = True
            for kept, new in ((self.keys, key_states), (self.values, value_states)):
                kept[:, :, self.tokens :].copy_(new)
            return self.keys, self.values

        def get_seq_length(self) -> int:
            return self.tokens

        def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
            return self.tokens + query_length, 0

        def _longer(self, new: torch.Tensor) -> torch.Tensor:
            return new.new_empty((*new.shape[:2], self.tokens + new.shape[2], new.shape[3]), dtype=self.kept)

    return LayerInPlace


ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertLMHeadModel",
    "opt": "OPTForCausalLM",
    "xlnet": "XLNetLMHeadModel",
    "llama": "LlamaForCausalLM",
    "switch_transformers": "SwitchTransformersForConditionalGeneration",
}
DEFAULT_LENGTH = 512
# Default sequence length of models with longer position tables, as in most training.
LONGEST_DEFAULT = 4096
LENGTH_KEYS = ("max_position_embeddings", "n_positions", "n_ctx")


def read_config(path: Path) -> dict[str, Any]:
    """Read a Hugging Face ``config.json``; raise ``InputError`` naming the file and the problem, such as more than
    :data:`MOST_LAYERS` layers.
    """
    config = read_configuration(path)
    if config.get("auto_map"):
        raise InputError(
            f"{path}: names a class of its own (auto_map), which is not run; give a --script that builds it"
        )
    _check_layers(config, str(path))
    return config


def library_form(attention: AttentionForm) -> str:
    """Return the library's name of the function for ``attention``: its own products, PyTorch's, or a kernel by name,
    with windows and sinks, or cached latents.
    """
    if attention == "eager":
        return "eager"
    if attention == "mla":
        return register_latent()
    return "sdpa" if attention in ("flash", "efficient", "math") else register_fused()


def attention_forms(config: Mapping[str, Any], source: str) -> tuple[AttentionForm, ...]:
    """Return the attention forms that the library's model of ``config`` supports, with the training default first;
    empty if there is no such model, which building it reports.
    """
    try:
        import transformers

        known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
        named = config.get("architectures") or [ARCHITECTURES.get(config["model_type"])]
        with quiet():
            settings = known[config["model_type"]](**{key: each for key, each in config.items() if key not in _IGNORED})
        model = _model_class(transformers, settings, named[0], source)
    except Exception:  # the library raises any exception; building the model reports the same with advice
        return ()
    own: tuple[AttentionForm, ...] = ("flash", "efficient", "math") if getattr(model, "_supports_sdpa", True) else ()
    if getattr(model, "_supports_attention_backend", False):
        own += ("flash2", "flash3", "flash3-fp8", "flash4", "cudnn", "flash1", "mla")
    return (*own, "eager")


def build_transformer(config: Mapping[str, Any], attention: str, source: str) -> torch.nn.Module:
    """Build the model of ``config`` on the meta device, ``float32``, uninitialised; ``attention`` of
    :func:`library_form`.
    """
    try:
        import transformers
        from transformers.initialization import no_init_weights
    except ImportError:
        raise MissingDependencyError("transformers is not installed; run pip install 'fusion-costmodel[e2e]'") from None
    model_type = config["model_type"]
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    if model_type not in known:
        raise ModelError(
            f"{source}: model_type {model_type!r} is not known to transformers {transformers.__version__}; "
            "give a --script that builds it"
        )
    named = config.get("architectures") or [ARCHITECTURES.get(model_type)]
    try:
        with quiet():
            settings = known[model_type](**{key: value for key, value in config.items() if key not in _IGNORED})
        with _without_scipy(transformers) if model_type in ARCHITECTURES else nullcontext():
            model_class = _model_class(transformers, settings, named[0], source)
        if attention == "sdpa" and not getattr(model_class, "_supports_sdpa", True):
            raise InputError(
                f"{source}: transformers has no fused attention for {model_type}; use eager attention, or name a "
                "kernel that has (flash2, flash3, cudnn)"
            )
        with torch.device("meta"), no_init_weights(), quiet():
            model = model_class._from_config(settings, attn_implementation=attention, dtype=torch.float32)
            # Some models make weights by a constructor that ignores the default device.
            model.to("meta")
            model.tie_weights()
    except InputError:
        raise
    except Exception as error:  # the library raises any exception on a configuration that it cannot use
        raise ModelError(
            f"{source}: transformers cannot build it ({' '.join(str(error).split())}); correct the configuration"
        ) from error
    _balance_experts(model)
    return model


def _check_layers(config: Mapping[str, Any], source: str) -> None:
    """Raise ``InputError`` for no layers, and for so many that building them would take minutes."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            _check_layers(value, source)
        elif _LAYERS.search(str(key)) and isinstance(value, int) and value > MOST_LAYERS:
            raise InputError(f"{source}: {key} is {value:,}; models of at most {MOST_LAYERS:,} layers are taken")
        elif key in _DEPTHS and isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise InputError(f"{source}: {key} is {value}; a model has a layer at least, correct it")


# Inputs other than text, which some models require.
_OTHER_INPUTS = {"pixel_values", "input_features", "input_values"}
MOST_LAYERS = 2000  # the deepest published transformers have 1,000 (arXiv 2203.00555)
# Keys of the depth of the model itself; other parts may have no layers.
_DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_LAYERS = re.compile(r"(^|_)n?_?layers?$|_layers?_num$|^depth$")
_IGNORED = ("model_type", "architectures", "torch_dtype", "dtype", "transformers_version", "quantization_config")


def _model_class(transformers: Any, settings: Any, name: str | None, source: str) -> Any:
    """Return the class that the configuration names, or the causal language model of its type."""
    if name is not None and hasattr(transformers, name):
        return getattr(transformers, name)
    if name is not None:
        raise InputError(
            f"{source}: architectures names {name!r}, which transformers {transformers.__version__} does not have; "
            "correct it, leave it out, or give a --script that builds it"
        )
    known = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(settings) not in known:
        kind = settings.model_type
        raise InputError(f"{source}: model type {kind!r} has no causal language model; name its class in architectures")
    return known[type(settings)]


@contextmanager
def _without_scipy(transformers: Any) -> Iterator[None]:
    """Skip the library's import of scipy's optimizers (0.3 s) for losses of object detection, which no language model
    has.
    """
    with patch.object(transformers.utils, "is_scipy_available", lambda: False):
        yield


@contextmanager
def quiet() -> Iterator[None]:
    """Silence the library's warnings about missing weights and about its default loss."""
    logger = logging.getLogger("transformers")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def sequence_length(config: Mapping[str, Any], wanted: int | None, source: str) -> int:
    """Return ``wanted``, or the model's maximum up to :data:`LONGEST_DEFAULT`; raise ``InputError`` beyond its position
    table.
    """
    limits = [config[key] for key in LENGTH_KEYS if isinstance(config.get(key), int)]
    longest = min(limits) if limits else None
    if wanted is None:
        return min(longest, LONGEST_DEFAULT) if longest else DEFAULT_LENGTH
    if longest is not None and wanted > longest and config["model_type"] != "llama":
        raise InputError(
            f"{source}: sequence length {wanted} is beyond its {longest} positions; give a shorter --sequence-length"
        )
    return wanted


def forward_call(
    model: torch.nn.Module,
    batch: int,
    length: int,
    with_loss: bool,
    source: str,
    advice: str = "correct its configuration",
    cached: int | None = None,
    kept_as: torch.dtype | None = None,
) -> Any:
    """Return a function that runs ``model`` on token ids (batch, length) and returns the loss, or the scores without
    one.

    ``cached``: number of earlier tokens (None: no cache), with keys and values in the type ``kept_as`` (None: as
    computed). It raises ``ModelError``, which names ``source`` and gives ``advice``, if the model cannot be run, as
    some configurations cannot.
    """
    wanted = getattr(model, "main_input_name", "input_ids")
    if wanted != "input_ids":
        raise InputError(f"{source}: {type(model).__name__} takes {wanted}, not token ids; give it as a --script")
    ids = torch.zeros((batch, length), dtype=torch.int64, device="meta")
    arguments: dict[str, Any] = {"input_ids": ids}
    if getattr(model.config, "is_encoder_decoder", False):
        arguments["decoder_input_ids"] = ids
    if with_loss:
        arguments["labels"] = ids
    if cached is None:
        without_cache(model)
    else:
        arguments = dict(decoding_arguments(model, ids, cached, source, kept_as))

    def run() -> torch.Tensor:
        try:
            with quiet(), oversized_told():
                output = model(**arguments)
        except (RuntimeError, ValueError, TypeError, LookupError, AttributeError) as error:
            what = " ".join(str(error).split())
            others = _OTHER_INPUTS & set(inspect.signature(model.forward).parameters)
            if others:
                told = f"{type(model).__name__} takes {', '.join(sorted(others))} beside token ids"
                raise ModelError(f"{source}: {told}; give it as a --script") from error
            raise ModelError(f"{source}: the model cannot be run: {what}; {advice}") from error
        if not with_loss:
            return output[0]
        loss = getattr(output, "loss", None)
        return loss if loss is not None else output[0].float().mean()

    if cached is not None:
        with torch.no_grad():
            run()  # makes the cache, which exists before the step
    return run


def without_cache(model: torch.nn.Module) -> None:
    """Disable caches of keys and values. Encoders and decoders have separate configurations."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if config is not None and hasattr(config, "use_cache"):
            config.use_cache = False


def _balance_experts(model: torch.nn.Module) -> None:
    """Give every expert an equal share of the tokens, up to its capacity, since routing depends on values."""
    for module in model.modules():
        if type(module).__name__ == "SwitchTransformersSparseMLP":
            experts: Any = module.experts
            experts.forward = _balanced(experts, module.router.expert_capacity)  # type: ignore[union-attr]
            module.register_forward_pre_hook(_note_length)


def _note_length(layer: Any, arguments: tuple[torch.Tensor, ...]) -> None:
    """Note the sequence length: capacities are per sequence, and experts see tokens of all sequences in one row."""
    layer.experts.length = arguments[0].shape[1]


def _balanced(experts: Any, capacity: int) -> Any:
    """Return the library's loop over experts with equal shares instead of the routed rows; the operators are the
    same.
    """
    from e2e.capture.possible_values import true_share

    def forward(states: torch.Tensor, selected: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        result = torch.zeros_like(states)
        mask = selected.permute(2, 1, 0)
        torch.greater(mask.sum(dim=(-1, -2)), 0).nonzero()
        for place in range(experts.num_experts):
            with true_share(min(1 / experts.num_experts, capacity / experts.length)):
                column, rows = torch.where(mask[place])
            chosen = states[None, rows].reshape(-1, states.shape[-1])
            output = experts[f"expert_{place}"](chosen) * weights[rows, column, None]
            result.index_add_(0, rows, output.to(states.dtype))
        return result

    return forward
