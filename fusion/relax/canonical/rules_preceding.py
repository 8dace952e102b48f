"""Rules that fold a scale and a shift before a convolution or matrix product into its weight and bias."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.rewriter import Definitions, RuleTable, constant_of, is_float
from fusion.relax.canonical.rules_affine import CONVOLUTIONS, MATMUL, has_plain_weight


@dataclass(frozen=True, eq=False)
class ScaledInput:
    """Scaled tensor ``source * scale + shift`` with one value per channel, in double precision."""

    source: relax.Expr
    scale: np.ndarray
    shift: np.ndarray


def match_scaled(expr: relax.Expr, axis: int, graph: Definitions, shared: bool = False) -> ScaledInput | None:
    """Return ``expr`` as constant scales and shifts along ``axis`` of another tensor; None if it has none.

    The values in between have a single user (``shared``: except the last one), so that folding them repeats no work.
    """
    shape = static_shape(expr)
    if shape is None or not is_float(expr):
        return None
    steps: list[tuple[str, np.ndarray]] = []
    while shared or graph.has_single_user(expr):
        call = graph.call(expr, "relax.add", "relax.multiply")
        constant = None if call is None else _along(call.args[1], shape, axis, graph)
        if call is None or constant is None or static_shape(call.args[0]) != shape or _is_bias(call, graph):
            break
        steps.append((call.op.name, constant))
        expr, shared = call.args[0], False
    scale, shift = np.ones(shape[axis]), np.zeros(shape[axis])
    for name, constant in reversed(steps):
        if name == "relax.multiply":
            scale, shift = scale * constant, shift * constant
        else:
            shift = shift + constant
    return ScaledInput(expr, scale, shift) if steps else None


def _is_bias(call: relax.Call, graph: Definitions) -> bool:
    """True if ``call`` adds to or scales a layer with constant weights, whose kernel does it at no cost: it stays with
    that layer.
    """
    layer = graph.call(call.args[0], MATMUL, *CONVOLUTIONS)
    return layer is not None and graph.constant(layer.args[1]) is not None and graph.has_single_user(call.args[0])


def _along(expr: relax.Expr, shape: tuple[int, ...], axis: int, graph: Definitions) -> np.ndarray | None:
    """Return a constant that varies only along ``axis`` as a vector; else None."""
    array = graph.constant(expr)
    if array is None or array.ndim > len(shape):
        return None
    sizes = (1,) * (len(shape) - array.ndim) + array.shape
    if any(size != 1 for position, size in enumerate(sizes) if position != axis):
        return None
    return np.broadcast_to(array.reshape(-1).astype(np.float64), (shape[axis],))


def fold_into_convolution(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``conv(x s + t, w) -> conv(x, w s) + sum(w t)``; with padding, which stays zero, only if
    ``t`` is zero.
    """
    weight = graph.constant(call.args[1])
    if weight is None or not has_plain_weight(call, weight):
        return None
    scaled = match_scaled(call.args[0], 1, graph)
    if scaled is None or (scaled.shift.any() and any(int(width) for width in call.attrs.padding)):
        return None
    # Output channel o reads the input channels of its own group.
    groups, (outputs, inputs) = int(call.attrs.groups), weight.shape[:2]
    read = (np.arange(outputs) // (outputs // groups) * inputs)[:, None] + np.arange(inputs)
    along = (outputs, inputs) + (1,) * (weight.ndim - 2)
    shifted = weight.astype(np.float64) * scaled.shift[read].reshape(along)
    folded = weight.astype(np.float64) * scaled.scale[read].reshape(along)
    bias = shifted.sum(axis=tuple(range(1, weight.ndim))).reshape((1, -1) + (1,) * (weight.ndim - 2))
    return _with_bias(call, scaled.source, folded.astype(weight.dtype), bias.astype(weight.dtype), graph)


def fold_into_product(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``(x s + t) @ w -> x @ (s w) + t @ w``."""
    weight, shape = graph.constant(call.args[1]), static_shape(call.args[0])
    if weight is None or shape is None or not has_plain_weight(call, weight):
        return None
    scaled = match_scaled(call.args[0], len(shape) - 1, graph)
    if scaled is None:
        return None
    exact = weight.astype(np.float64)
    folded, bias = scaled.scale[:, None] * exact, scaled.shift @ exact
    return _with_bias(call, scaled.source, folded.astype(weight.dtype), bias.astype(weight.dtype), graph)


def _with_bias(
    call: relax.Call, source: relax.Expr, weight: np.ndarray, bias: np.ndarray, graph: Definitions
) -> relax.Expr:
    """Return the operator on ``source`` plus ``bias``, if that is not zero; the bias is named after the operator."""
    folded = relax.Call(call.op, [source, constant_of(weight)], call.attrs)
    return graph.with_bias(folded, constant_of(bias)) if bias.any() else folded


PRECEDING_RULES: RuleTable = {
    "relax.nn.conv1d": (fold_into_convolution,),
    "relax.nn.conv2d": (fold_into_convolution,),
    "relax.nn.conv3d": (fold_into_convolution,),
    MATMUL: (fold_into_product,),
}
