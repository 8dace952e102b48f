"""Operators without effect that stand for kernels of CUDA packages, with their gradients. Imports ``torch``.

``package::attention``: fused attention of (batch, length, heads, width), or of one row of sequences with the lengths
``packed``, by a named kernel. ``package::norm``: a layer or RMS norm of any mixture of types, after an addition if
there is a residual. ``package::one_pass``: a kernel that reads its tensors once, and writes others once;
``package::filtered``: one that besides multiplies, as filters of images do; ``package::update_``: one of an optimizer,
over a parameter and its states; ``package::add_mm_``: a product that is added to existing values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

NAMESPACE = "package"
_LIBRARY = torch.library.Library(NAMESPACE, "DEF")
_OPERANDS = "Tensor query, Tensor key, Tensor value, Tensor? bias"
_HOW = "bool causal, int window, float dropout, int[] packed, str kernel"
for _schema in (
    f"attention({_OPERANDS}, {_HOW}) -> Tensor",
    f"attention_backward(Tensor gradient, {_OPERANDS}, {_HOW}, Tensor(a!) of_query, Tensor(b!) of_key, "
    "Tensor(c!) of_value) -> ()",
    "norm(Tensor data, Tensor? residual, Tensor[] parameters, str kind) -> (Tensor, Tensor, Tensor)",
    "norm_backward(Tensor gradient, Tensor? of_sum, Tensor data, Tensor[] parameters, str kind) -> (Tensor, Tensor[])",
    "one_pass(str name, Tensor[] read, Tensor[] like) -> Tensor[]",
    "filtered(str name, Tensor[] read, Tensor like, int[] shape, int instructions) -> Tensor",
    "update_(str name, Tensor gradient, Tensor(a!)[] written) -> ()",
    "add_mm_(Tensor first, Tensor second, Tensor(a!) sums, str scaling) -> ()",
):
    _LIBRARY.define(_schema)


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any) -> torch.Tensor:
    return query.new_empty((*query.shape[:-1], value.shape[-1]))


def _norm(data: torch.Tensor, residual: torch.Tensor | None, parameters: Any, kind: str) -> tuple[torch.Tensor, ...]:
    output = torch.empty_like(data, dtype=parameters[0].dtype if kind.startswith("mixed") else data.dtype)
    total = data.new_empty(0) if residual is None else torch.empty_like(residual)
    return output, total, data.new_empty(data.shape[:-1], dtype=torch.float32)


_LIBRARY.impl("attention", _attention, "Meta")
_LIBRARY.impl("attention_backward", lambda *_: None, "Meta")
_LIBRARY.impl("norm", _norm, "Meta")
_LIBRARY.impl(
    "norm_backward",
    lambda gradient, of_sum, data, parameters, kind: (
        torch.empty_like(data),
        [torch.empty_like(each) for each in parameters],
    ),
    "Meta",
)
_LIBRARY.impl("one_pass", lambda name, read, like: [torch.empty_like(each) for each in like], "Meta")
_LIBRARY.impl("filtered", lambda name, read, like, shape, instructions: like.new_empty(shape), "Meta")
_LIBRARY.impl("update_", lambda *_: None, "Meta")
_LIBRARY.impl("add_mm_", lambda *_: None, "Meta")
OPERATORS = torch.ops.package


class Attention(torch.autograd.Function):
    """Attention of queries, keys and values, given apart or ``stacked`` along dimension -3 (all three, or keys and
    values); gradients are stacked alike.
    """

    @staticmethod
    def forward(ctx: Any, bias: Any, how: tuple[Any, ...], *given: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*given, *(() if bias is None else (bias,)))
        ctx.how, ctx.count = how, len(given)
        return OPERATORS.attention(*_parts(given), bias, *how)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        given, bias = saved[: ctx.count], saved[ctx.count :]
        found = [torch.empty_like(each) for each in given]
        inputs = (*_parts(given), bias[0] if bias else None, *ctx.how)
        OPERATORS.attention_backward(gradients[0], *inputs, *_parts(found))
        return (torch.empty_like(bias[0]) if bias and ctx.needs_input_grad[0] else None, None, *found)


def _parts(given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return queries, keys and values of what is given: three tensors, queries and both others, or all in one."""
    if len(given) == 3:
        return tuple(given)
    return (*given[:-1], *given[-1].unbind(-3))


def attend(
    *given: torch.Tensor,
    kernel: str,
    causal: bool = False,
    window: int = 0,
    dropout: float = 0.0,
    packed: Sequence[int] = (),
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output of attention by ``kernel``, of (batch, length, heads, width); raise what FlashAttention raises
    for other types than its own: in float32 the step would run, and be priced without tensor cores.
    """
    if kernel in ("flash2", "flash3") and given[0].dtype in (torch.float32, torch.float64):
        raise RuntimeError(f"FlashAttention only supports fp16 and bf16 data type, these are {given[0].dtype}")
    how = (bool(causal), int(window), float(dropout), [int(each) for each in packed], kernel)
    return Attention.apply(bias, how, *given)


class Norm(torch.autograd.Function):
    """Norm of the last dimension; with a residual, of the sum, which is returned too."""

    @staticmethod
    def forward(ctx: Any, data: Any, residual: Any, kind: str, *parameters: torch.Tensor) -> Any:
        output, total, _ = OPERATORS.norm(data, residual, list(parameters), kind)
        ctx.save_for_backward(data if residual is None else total, *parameters)
        ctx.kind, ctx.added = kind, None if residual is None else residual.dtype
        return output if residual is None else (output, total)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        data, *parameters = ctx.saved_tensors
        of_sum = gradients[1] if len(gradients) > 1 else None
        of_data, of_parameters = OPERATORS.norm_backward(gradients[0], of_sum, data, parameters, ctx.kind)
        return (of_data, None if ctx.added is None else of_data.to(ctx.added), None, *of_parameters)


def norm(data: torch.Tensor, kind: str, *parameters: torch.Tensor | None, residual: torch.Tensor | None = None) -> Any:
    """Return the norm (``layer_norm`` or ``rms_norm``) of the last dimension in one kernel, whatever the types."""
    return Norm.apply(data, residual, kind, *(each for each in parameters if each is not None))


class OnePass(torch.autograd.Function):
    """Kernel ``name`` that reads ``given`` once and writes a tensor like the first; its gradient reads those at
    ``kept`` again.
    """

    @staticmethod
    def forward(ctx: Any, name: str, kept: tuple[int, ...], *given: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*(given[place] for place in kept))
        ctx.kernel, ctx.given = name, tuple((each.shape, each.dtype, each.device) for each in given)
        return OPERATORS.one_pass(name, list(given), [given[0]])[0]

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        like = [
            torch.empty(shape, dtype=dtype, device=device) if needed else None
            for (shape, dtype, device), needed in zip(ctx.given, ctx.needs_input_grad[2:], strict=True)
        ]
        written = [each for each in like if each is not None]
        found = iter(OPERATORS.one_pass(f"{ctx.kernel}_backward", [gradients[0], *ctx.saved_tensors], written))
        return (None, None, *(None if each is None else next(found) for each in like))


def one_pass(name: str, *given: torch.Tensor, kept: tuple[int, ...] = ()) -> torch.Tensor:
    """Return the result of an element-wise kernel, of the form of the first tensor."""
    return OnePass.apply(name, kept, *given)
