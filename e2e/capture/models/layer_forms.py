"""Forms of a library model's layers: products in 8 bits, low-rank adapters, mixtures of experts. Imports ``torch``.

:func:`apply_forms` changes a built model before it is split over ranks: the forms read the weights when they run.

8 bits: linear layers by a recipe of :class:`e2e.step.options.Recipe`. ``float8::amax`` and ``float8::cast`` are
operators without effect that represent one kernel each; the products are PyTorch's ``_scaled_mm`` and
``_scaled_grouped_mm``, with operands in their layout. The input of several layers (queries, keys, values) is cast once:
Transformer Engine has one layer for them, and ``torch.compile`` shares torchao's casts. Weights that FSDP gathers in 8
bits (``enable_fsdp_float8_all_gather`` of torchao) are cast by their shards, outside the layers. Inference: weights are
stored in 8 bits, activations are cast for every layer.

Adapters (``--lora``) beside frozen weights: ``y = W x + (alpha / rank) B A x`` (Hu et al., arXiv 2106.09685) adds two
thin products, a scaling and an addition; ``W`` has no gradient. As in NeMo's performance recipes and PEFT's defaults,
queries, keys and values are adapted.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from costmodel.base.errors import InputError
from e2e.capture.models.expert_layers import Products, grouped_products, products_by_expert, use_grouped_experts
from e2e.capture.models.stacks import stack_of
from e2e.step.options import RECIPES, Precision, Recipe, StepOptions, recipe_of

_LIBRARY = torch.library.Library("float8", "DEF")
_LIBRARY.define("amax(Tensor given) -> Tensor")
# ``split_sums``: see :class:`costmodel.operators.device_work.ScaledGemm`; Transformer Engine's recipes and torchao's
# tensor-wise one set it for gradients only.
_LIBRARY.define("cast(Tensor given, str scaling, int share) -> Tensor")
_LIBRARY.define("cast_both(Tensor given, str scaling, int share) -> (Tensor, Tensor)")
_LIBRARY.define("each_amax(Tensor given, Tensor ends) -> Tensor")
_LIBRARY.define("each_cast(Tensor given, Tensor ends, str scaling) -> Tensor")
_LIBRARY.define("each_cast_both(Tensor given, Tensor ends, str scaling) -> (Tensor, Tensor)")
_LIBRARY.define("each_mm(Tensor first, Tensor second, Tensor ends, str scaling, bool split_sums) -> Tensor")
_LIBRARY.define("each_gradient(Tensor first, Tensor second, Tensor ends, str scaling) -> Tensor")
_LIBRARY.define("mm(Tensor first, Tensor second, str scaling, bool split_sums) -> Tensor")
_LIBRARY.define("grouped_mm(Tensor first, Tensor second, Tensor ends, str scaling) -> Tensor")
_LIBRARY.define("grouped_gradient(Tensor first, Tensor second, Tensor ends, str scaling) -> Tensor")
_EIGHT = torch.float8_e4m3fn
_UNIT = 16  # _scaled_mm requires extents that are multiples of 16; other layers are unchanged


def _cast(given: torch.Tensor, scaling: str, share: int) -> torch.Tensor:
    return torch.empty_like(given, dtype=_EIGHT)


def _cast_both(given: torch.Tensor, scaling: str, share: int) -> tuple[torch.Tensor, torch.Tensor]:
    return _cast(given, scaling, share), _cast(given, scaling, share)


def _mm(first: torch.Tensor, second: torch.Tensor, scaling: str, split_sums: bool) -> torch.Tensor:
    return first.new_empty((first.shape[0], second.shape[1]), dtype=torch.bfloat16)


def _grouped_mm(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor, scaling: str) -> torch.Tensor:
    return first.new_empty((first.shape[0], second.shape[2]), dtype=torch.bfloat16)


def _grouped_gradient(first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor, scaling: str) -> torch.Tensor:
    return first.new_empty((ends.shape[0], first.shape[1], second.shape[1]), dtype=torch.bfloat16)


_LIBRARY.impl("amax", lambda given: given.new_empty((1,), dtype=torch.float32), "Meta")
_LIBRARY.impl("cast", _cast, "Meta")
_LIBRARY.impl("cast_both", _cast_both, "Meta")
_LIBRARY.impl("mm", _mm, "Meta")
_LIBRARY.impl("grouped_mm", _grouped_mm, "Meta")
_LIBRARY.impl("grouped_gradient", _grouped_gradient, "Meta")
_LIBRARY.impl("each_amax", lambda given, ends: given.new_empty(ends.shape, dtype=torch.float32), "Meta")
_LIBRARY.impl("each_cast", lambda given, ends, scaling: _cast(given, scaling, 1), "Meta")
_LIBRARY.impl("each_cast_both", lambda given, ends, scaling: _cast_both(given, scaling, 1), "Meta")
_LIBRARY.impl(
    "each_mm", lambda first, second, ends, scaling, split_sums: _grouped_mm(first, second, ends, scaling), "Meta"
)
_LIBRARY.impl("each_gradient", _grouped_gradient, "Meta")
_ops = torch.ops.float8


class Caster:
    """Casts of a recipe.

    ``share``: number of micro-batches of a step over which the cast of a kept weight is spread evenly. ``by_expert``:
    the products of a mixture are one launch per expert, and so are its casts, unless their scale is known before (one
    kernel then casts the rows of all experts).
    """

    def __init__(self, recipe: Recipe, share: int = 1, by_expert: bool = False) -> None:
        self.recipe, self.share, self.by_expert = recipe, share, by_expert
        self._last: tuple[Any, Any] = (None, None)

    def activations(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the operand of the forward product, and its copy for the gradient if one kernel makes both;
        consecutive layers on the same input share the cast.
        """
        if self._last[0] is not given:
            self._last = (given, self.operands(given))
        result: tuple[torch.Tensor, torch.Tensor | None] = self._last[1]
        return result

    def weight(self, given: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return :meth:`operands` of the weight (n, k) of a linear layer."""
        return self.operands(given, self.share if self.recipe.weights_kept else 1)

    def operands(
        self, given: torch.Tensor, share: int = 1, alone: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return ``given`` in 8 bits, and transposed if the recipe makes ``both`` and not ``alone``."""
        if self.recipe.search:
            _ops.amax(given)
        if self.recipe.both and not alone:
            first, second = _ops.cast_both(given, self.recipe.scaling, share)
            return first, second
        return _ops.cast(given, self.recipe.scaling, share), None

    def rows_of_experts(self, given: torch.Tensor, ends: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return :meth:`operands` of rows sorted by expert."""
        recipe = self.recipe
        if not self.by_expert or (recipe.scaling == "tensor" and not recipe.search):
            return self.operands(given)
        if recipe.search:
            _ops.each_amax(given, ends)
        if recipe.both:
            first, second = _ops.each_cast_both(given, ends, recipe.scaling)
            return first, second
        return _ops.each_cast(given, ends, recipe.scaling), None

    def multiply(
        self, first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor, *, gradient: bool = False
    ) -> torch.Tensor:
        """Multiply rows of experts by their matrices. ``gradient``: the rows are gradients."""
        scaling = self.recipe.scaling
        result: torch.Tensor = (
            _ops.each_mm(first, second, ends, scaling, gradient)
            if self.by_expert
            else _ops.grouped_mm(first, second, ends, scaling)
        )
        return result

    def multiply_gradients(self, first: torch.Tensor, second: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Return the gradients of the matrices from rows and their gradients."""
        product = _ops.each_gradient if self.by_expert else _ops.grouped_gradient
        result: torch.Tensor = product(first, second, ends, self.recipe.scaling)
        return result


class ScaledLinear(torch.autograd.Function):
    """Product of input (..., k) and transposed weight (n, k), forward and both gradients in 8 bits."""

    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, caster: Caster) -> torch.Tensor:
        ctx.caster, ctx.shape = caster, given.shape
        scaling = caster.recipe.scaling
        eight, turned = caster.activations(given)
        wide, turned_weight = caster.weight(weight)
        ctx.save_for_backward(*(given, weight) if turned is None else (turned, turned_weight))
        rows = eight.reshape(-1, eight.shape[-1])
        return _ops.mm(rows, wide.t(), scaling, False).view(*given.shape[:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None, None]:
        caster, scaling = ctx.caster, ctx.caster.recipe.scaling
        of_input, of_weight, _ = ctx.needs_input_grad  # frozen weights have no gradient
        first, second = ctx.saved_tensors
        gradient = gradients[0].reshape(-1, gradients[0].shape[-1])
        eight, turned = caster.operands(gradient, alone=not of_weight)
        if not caster.recipe.both:
            # torchao keeps the wide operands and casts them again, also the gradient, along the other dimension.
            if of_input:
                second, _ = caster.operands(second)
            if of_weight:
                first, _ = caster.operands(first)
                turned = eight if caster.recipe.scaling == "tensor" else caster.operands(gradient)[0]
        return (
            _ops.mm(eight, second, scaling, True).view(ctx.shape) if of_input else None,
            _ops.mm(turned.t(), first.reshape(-1, first.shape[-1]), scaling, True) if of_weight else None,
            None,
        )


class ScaledExperts(torch.autograd.Function):
    """Product of rows (all, k) sorted by expert and (experts, k, n), forward and both gradients in 8 bits."""

    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor, caster: Caster
    ) -> torch.Tensor:
        ctx.caster = caster
        eight, turned = caster.rows_of_experts(rows, ends)
        wide, turned_matrices = caster.operands(matrices, caster.share if caster.recipe.weights_kept else 1)
        saved = (rows, matrices) if turned is None else (turned, turned_matrices)
        ctx.save_for_backward(*saved, ends)
        return caster.multiply(eight, wide, ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        caster = ctx.caster
        rows, matrices, ends = ctx.saved_tensors
        eight, turned = caster.rows_of_experts(gradients[0], ends)
        if turned is None:
            rows, matrices, turned = caster.rows_of_experts(rows, ends)[0], caster.operands(matrices)[0], eight
        of_rows = caster.multiply(eight, matrices.transpose(1, 2), ends, gradient=True)
        return of_rows, caster.multiply_gradients(rows, turned, ends), None, None


def convert_to_8_bits(
    model: torch.nn.Module, caster: Caster, left_out: tuple[str, ...] = ("lm_head", "gate", "router")
) -> int:
    """Set the 8-bit form in linear layers of ``model``, in place; return their number.

    Layers with a name in ``left_out`` (heads and routers), or with extents that are not multiples of 16, are unchanged.
    """
    head = getattr(model, "get_output_embeddings", lambda: None)()
    converted = 0
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind not in ("Linear", "Conv1D") or module is head or name.rpartition(".")[2] in left_out:
            continue
        if any(extent % _UNIT for extent in module.weight.shape):  # type: ignore[union-attr]
            continue
        module.forward = _linear(module, caster, kind == "Conv1D")
        converted += 1
    return converted


def _linear(module: Any, caster: Caster, turned: bool) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(given: torch.Tensor) -> torch.Tensor:
        weight = module.weight.t() if turned else module.weight
        output: torch.Tensor = ScaledLinear.apply(given, weight, caster)
        return output if module.bias is None else output + module.bias

    return forward


def expert_products(caster: Caster) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the products for :func:`e2e.capture.models.expert_layers.use_grouped_experts`."""

    def products(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = ScaledExperts.apply(rows, matrices, ends, caster)
        return output

    products.pads = caster.by_expert  # type: ignore[attr-defined]
    return products


def serve_in_8_bits(model: torch.nn.Module, caster: Caster) -> None:
    """Set the inference form, with weights stored in 8 bits, in linear layers and experts of ``model``."""
    for name, module in model.named_modules():
        kind, weight = type(module).__name__, getattr(module, "weight", None)
        fits = isinstance(weight, torch.Tensor) and not any(extent % _UNIT for extent in weight.shape)
        if kind == "Linear" and fits and name.rpartition(".")[2] not in ("lm_head", "gate", "router"):
            module.weight = torch.nn.Parameter(_eight_bits(module.weight), requires_grad=False)  # type: ignore[arg-type]
            module.forward = _serving(module, caster)


def _eight_bits(weight: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(weight, dtype=_EIGHT)


def _serving(module: Any, caster: Caster) -> Callable[[torch.Tensor], torch.Tensor]:
    def forward(given: torch.Tensor) -> torch.Tensor:
        eight, _ = caster.activations(given)
        rows = eight.reshape(-1, eight.shape[-1])
        output: torch.Tensor = _ops.mm(rows, module.weight.t(), caster.recipe.scaling, False)
        output = output.view(*given.shape[:-1], module.weight.shape[0])
        return output if module.bias is None else output + module.bias

    return forward


def serving_products(caster: Caster) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the products of experts with weights stored in 8 bits."""

    def products(rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        eight, _ = caster.operands(rows, alone=True)
        output: torch.Tensor = _ops.grouped_mm(eight, matrices, ends, caster.recipe.scaling)
        return output

    return products


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
        caster = Caster(stored)
        serve_in_8_bits(model, caster)
        use_grouped_experts(model, serving_products(caster))
        return
    by_expert = stack_of(options.stack).by_expert
    products: Products = products_by_expert if by_expert else grouped_products
    if recipe is not None:
        caster = Caster(recipe, micro_batches, by_expert)
        if not convert_to_8_bits(model, caster):
            raise InputError(
                f"{source}: --precision {recipe.name}: no linear layer whose extents divide by 16; "
                "leave --precision out"
            )
        products = expert_products(caster) if recipe.experts else products
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


ADAPTED = ("q_proj", "k_proj", "v_proj", "packed_proj", "c_attn", "query", "key", "value")


def add_adapters(model: nn.Module, rank: int, source: str) -> None:
    """Freeze ``model`` and adapt its products of queries, keys and values; raise ``InputError`` if it has none, or if
    the rank is too high.
    """
    found = [module for name, module in model.named_modules() if name.rpartition(".")[2] in ADAPTED and _weighs(module)]
    if not found:
        raise InputError(
            f"--lora {rank}: {source} has no products of queries, keys and values to adapt; leave --lora out"
        )
    widest = max(min(module.weight.shape) for module in found)  # type: ignore[union-attr, arg-type]
    if rank > widest:
        raise InputError(f"--lora {rank}: no product of {source} has more than {widest:,} rows; give a lower rank")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in found:
        _adapt(module, rank)


def _weighs(module: nn.Module) -> bool:
    return isinstance(getattr(module, "weight", None), nn.Parameter) and module.weight.dim() == 2  # type: ignore[operator]


def _adapt(module: Any, rank: int) -> None:
    rows, columns = module.weight.shape
    if type(module).__name__ == "Conv1D":  # GPT-2 stores (in, out)
        rows, columns = columns, rows
    kind = {"dtype": module.weight.dtype, "device": "meta"}
    module.lora_down = nn.Parameter(torch.empty(rank, columns, **kind))
    module.lora_up = nn.Parameter(torch.empty(rows, rank, **kind))
    module.forward = _adapted(module, module.forward)


def _adapted(module: Any, forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def run(given: torch.Tensor) -> torch.Tensor:
        thin = nn.functional.linear(given, module.lora_down)
        return forward(given) + nn.functional.linear(thin, module.lora_up) * 2.0

    return run
