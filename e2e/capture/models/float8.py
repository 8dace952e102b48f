"""Linear layers with 8-bit products, by a recipe of :mod:`e2e.step.precision`. Imports ``torch``.

``float8::amax`` and ``float8::cast`` are operators without effect that represent one kernel each; the products are
PyTorch's ``_scaled_mm`` and ``_scaled_grouped_mm``, with operands in their layout. The input of several layers
(queries, keys, values) is cast once: Transformer Engine has one layer for them, and ``torch.compile`` shares torchao's
casts. Weights that FSDP gathers in 8 bits (``enable_fsdp_float8_all_gather`` of torchao) are cast by their shards,
outside the layers. Inference: weights are stored in 8 bits, activations are cast for every layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from e2e.step.precision import Recipe

_LIBRARY = torch.library.Library("float8", "DEF")
_LIBRARY.define("amax(Tensor given) -> Tensor")
# ``split_sums``: see :class:`costmodel.operators.scaled_work.ScaledGemm`; Transformer Engine's recipes and torchao's
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
    kernel then casts the rows of all experts). ``weights_arrive``: weights of linear layers are gathered in 8 bits.
    """

    def __init__(self, recipe: Recipe, share: int = 1, by_expert: bool = False, weights_arrive: bool = False) -> None:
        self.recipe, self.share, self.by_expert, self.weights_arrive = recipe, share, by_expert, weights_arrive
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
        if self.weights_arrive:
            # The same memory viewed as a type of half the size: no kernel, and no additional tensor is kept.
            turned = given.stride(-1) != 1
            rows = given.detach().t() if turned else given.detach()
            narrow = rows.view(_EIGHT)[..., : rows.shape[-1]]
            return (narrow.t() if turned else narrow), None
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
                # Cast again along the other dimension, or transposed if gathered in 8 bits.
                second = caster.weight(second)[0].contiguous() if caster.weights_arrive else caster.operands(second)[0]
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


def convert(model: torch.nn.Module, caster: Caster, left_out: tuple[str, ...] = ("lm_head", "gate", "router")) -> int:
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
        module.eight_bits = True  # type: ignore[assignment]
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


def serve(model: torch.nn.Module, caster: Caster) -> None:
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
