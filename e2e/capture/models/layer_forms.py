"""Kernels of a library model's layers: mixtures of experts, and 8-bit products.

Applied to a built model before it is split over ranks: the forms read the weights when they run. Imports ``torch``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch

from costmodel.base.errors import InputError
from e2e.capture.models import float8
from e2e.capture.models.expert_layers import Products, grouped_products, products_by_expert, use_grouped_experts
from e2e.capture.models.stacks import stack_of
from e2e.step.options import StepOptions
from e2e.step.precision import RECIPES, Precision, Recipe, recipe_of


def apply_forms(
    model: torch.nn.Module, config: Mapping[str, Any], options: StepOptions, source: str, micro_batches: int = 1
) -> None:
    """Change ``model`` in place according to ``options`` and the configuration's ``quantization_config``.

    Raise ``InputError``, which names ``source``, for an unknown quantization, and for training with one.
    """
    recipe = recipe_of(options.precision, options.dtype)
    stored = stored_recipe(config, source)
    if stored is not None:
        _check_stored(options, source, config["quantization_config"])
        caster = float8.Caster(stored)
        float8.serve(model, caster)
        use_grouped_experts(model, float8.serving_products(caster))
        return
    by_expert = stack_of(options.stack).by_expert
    products: Products = products_by_expert if by_expert else grouped_products
    if recipe is not None:
        caster = float8.Caster(recipe, micro_batches, by_expert, options.weights_arrive)
        if not float8.convert(model, caster):
            raise InputError(
                f"{source}: --precision {recipe.name}: no linear layer whose extents divide by 16; "
                "leave --precision out"
            )
        products = float8.expert_products(caster) if recipe.experts else products
    if options.moe == "grouped":
        use_grouped_experts(model, products, waits=by_expert)


def _check_stored(options: StepOptions, source: str, stored: Mapping[str, Any]) -> None:
    if options.mode != "inference":
        raise InputError(
            f"{source}: its quantization_config is for inference; give --mode inference, or remove it to train in 16 "
            "bits (--precision trains in 8)"
        )
    if options.dtype not in ("bfloat16", "float16"):
        raise InputError(f"{source}: its quantization_config computes beside 16 bits; give --dtype bfloat16")
    if options.cache_length is not None and options.attention != "flash3-fp8" and _keeps_cache_in_8_bits(stored):
        raise InputError(
            f"{source}: its quantization_config keeps the cache in 8 bits; give --attention flash3-fp8, or remove "
            "kv_cache_scheme"
        )


def _keeps_cache_in_8_bits(stored: Mapping[str, Any]) -> bool:
    return any(stored.get(key) for key in ("kv_cache_scheme", "kv_cache_quant_algo"))


def stored_recipe(config: Mapping[str, Any], source: str) -> Recipe | None:
    """Return the recipe of weights stored in 8 bits in ``config``, or None without a ``quantization_config``."""
    stored = config.get("quantization_config")
    if not stored:
        return None
    method = str(stored.get("quant_method", "")) if isinstance(stored, Mapping) else "?"
    if method == "fp8":
        return RECIPES["fp8-block" if stored.get("weight_block_size") else "fp8-tensorwise"]
    if method == "fbgemm_fp8":
        return RECIPES["fp8-rowwise"]
    if method == "compressed-tensors":
        groups = [each for each in (stored.get("config_groups") or {}).values() if isinstance(each, Mapping)]
        weights = [each.get("weights") or {} for each in groups]
        inputs = [each.get("input_activations") or {} for each in groups]
        if weights and all(each.get("type") == "float" and each.get("num_bits") == 8 for each in (*weights, *inputs)):
            strategies = {str(each.get("strategy")) for each in (*weights, *inputs)}
            return RECIPES["fp8-tensorwise" if strategies == {"tensor"} else "fp8-rowwise"]
    if method == "modelopt" and str(stored.get("quant_algo", "")).upper() in _MODELOPT:
        return RECIPES[_MODELOPT[str(stored["quant_algo"]).upper()]]
    raise InputError(
        f"{source}: quantization_config of {method!r} is not known {_reason(stored)}; remove it to predict the model "
        "in 16 bits"
    )


# quant_algo of NVIDIA Model Optimizer -> recipe.
_MODELOPT: dict[str, Precision] = {
    "FP8": "fp8-tensorwise",
    "FP8_PER_CHANNEL_PER_TOKEN": "fp8-rowwise",
    "MXFP8": "mxfp8",
}
_FOUR_BITS = ("mxfp4", "nvfp4", "load_in_4bit", "awq")


def _reason(stored: Any) -> str:
    """Return the reason why a quantization is not supported, in brackets."""
    text = json.dumps(stored, default=str).lower()
    if any(name in text for name in _FOUR_BITS) or _bits_of(stored) == 4:
        return "(weights of 4 bits: no table has their products on any GPU here)"
    return "(8-bit floats are: fp8, fbgemm_fp8, compressed-tensors, modelopt)"


def _bits_of(stored: Any) -> int | None:
    """Return the bits of the weights, if the configuration gives them."""
    if not isinstance(stored, Mapping):
        return None
    found = stored.get("bits") or stored.get("w_bit") or stored.get("num_bits")
    if isinstance(found, int):
        return found
    groups = stored.get("config_groups")
    nested = [_bits_of(each.get("weights")) for each in groups.values()] if isinstance(groups, Mapping) else []
    return next((each for each in nested if each), None)
