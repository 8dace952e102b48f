"""Rules that fold batch norms, scales and shifts into the weight and bias of the convolution or matrix product with
constant weights before or after them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.rewriter import Definitions, RuleTable, constant_of, is_float

CONVOLUTIONS = ("relax.nn.conv1d", "relax.nn.conv2d", "relax.nn.conv3d")
MATMUL = "relax.matmul"


@dataclass(frozen=True, eq=False)
class Affine:
    """Affine operator ``operator(data, weight) [+ bias]`` with constant weight."""

    call: relax.Call
    call_source: relax.Expr
    sum_source: relax.Expr | None
    weight: np.ndarray
    # One value per output channel.
    bias: np.ndarray | None

    @property
    def is_convolution(self) -> bool:
        return self.call.op.name in CONVOLUTIONS

    @property
    def channels(self) -> int:
        return self.weight.shape[0] if self.is_convolution else self.weight.shape[-1]

    def scaled(self, scale: np.ndarray) -> np.ndarray:
        """Return the weight times ``scale`` (channels,), computed in double precision."""
        shape = (-1,) + (1,) * (self.weight.ndim - 1) if self.is_convolution else (1, -1)
        return (self.weight.astype(np.float64) * scale.reshape(shape)).astype(self.weight.dtype)

    def bias_shape(self) -> tuple[int, ...]:
        """Return the canonical shape of the bias: (1, C, 1, 1) after a convolution, (C,) after a matrix product."""
        return (1, -1) + (1,) * (self.weight.ndim - 2) if self.is_convolution else (-1,)


def match_affine(expr: relax.Expr, graph: Definitions) -> Affine | None:
    """Return ``expr`` as an affine operator with a single user, else None."""
    if not graph.has_single_user(expr):
        return None
    total = graph.call(expr, "relax.add")
    source = expr if total is None else total.args[0]
    call = graph.call(source, MATMUL, *CONVOLUTIONS)
    if call is None or (total is not None and not graph.has_single_user(source)):
        return None
    weight = graph.constant(call.args[1])
    if weight is None or not has_plain_weight(call, weight):
        return None
    affine = Affine(call, source, None if total is None else expr, weight, None)
    if total is None:
        return affine
    bias = per_channel(total.args[1], affine, graph)
    return None if bias is None else Affine(call, source, expr, weight, bias)


def has_plain_weight(call: relax.Call, weight: np.ndarray) -> bool:
    """True if output channels are the weight's first axis (convolution) or second axis (matrix product)."""
    if weight.dtype.kind != "f" or str(call.ty.dtype) != str(weight.dtype):
        return False
    if call.op.name == MATMUL:
        return weight.ndim == 2
    data, kernel, out = call.attrs.data_layout, call.attrs.kernel_layout, call.attrs.out_layout
    blocked = not (data + kernel).isupper()  # NCHW16c writes the block in lower case
    return data.startswith("NC") and kernel.startswith("OI") and out in ("", data) and not blocked


def per_channel(expr: relax.Expr, affine: Affine, graph: Definitions) -> np.ndarray | None:
    """Return a constant with one value per output channel (or one for all) as (channels,) in double precision; else
    None.
    """
    shape = static_shape(affine.call)
    return None if shape is None else graph.along(expr, shape, 1 if affine.is_convolution else len(shape) - 1)


def _rebuild(affine: Affine, graph: Definitions, scale: np.ndarray | None, bias: np.ndarray) -> relax.Expr:
    """Return ``operator(data, weight * scale) + bias``; the operator keeps its name."""
    weight = affine.weight if scale is None else affine.scaled(scale)
    args = [affine.call.args[0], constant_of(weight)]
    call = graph.named_as(relax.Call(affine.call.op, args, affine.call.attrs), affine.call_source)
    if not bias.any() and affine.bias is None and scale is not None:
        return call
    total = relax.op.add(call, constant_of(bias.astype(affine.weight.dtype).reshape(affine.bias_shape())))
    return total if affine.sum_source is None else graph.named_as(total, affine.sum_source)


def constant_right(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``c + x -> x + c`` and ``c * x -> x * c``, so that later rules look on one side only."""
    left, right = call.args
    if graph.constant(left) is None or graph.constant(right) is not None:
        return None
    return relax.Call(call.op, [right, left], call.attrs)


def fold_addition(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``(op(x, w) + b) + c -> op(x, w) + (b + c)``; a single bias gets its canonical shape."""
    affine = match_affine(call.args[0], graph)
    shift = None if affine is None else per_channel(call.args[1], affine, graph)
    if affine is None or shift is None:
        return None
    if affine.bias is not None:
        return _rebuild(affine, graph, None, affine.bias + shift)
    canonical = shift.astype(affine.weight.dtype).reshape(affine.bias_shape())
    if static_shape(call.args[1]) == canonical.shape:
        return None
    return relax.op.add(call.args[0], constant_of(canonical))


def fold_subtraction(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``x - c -> x + (-c)`` for floating-point constants."""
    constant = graph.constant(call.args[1])
    if constant is None or constant.dtype.kind != "f" or graph.constant(call.args[0]) is not None:
        return None
    return relax.op.add(call.args[0], constant_of(-constant))


def negate_subtrahend(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``x - (op(y, w) + b) -> x + (op(y, -w) - b)``: kernels add a second tensor to their result, none
    subtracts.
    """
    affine = match_affine(call.args[1], graph)
    if affine is None:
        return None
    bias = np.zeros(affine.channels) if affine.bias is None else -affine.bias
    return relax.op.add(call.args[0], _rebuild(affine, graph, -np.ones(affine.channels), bias))


def fold_multiplication(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``(op(x, w) + b) * s -> op(x, w s) + b s``."""
    affine = match_affine(call.args[0], graph)
    scale = None if affine is None else per_channel(call.args[1], affine, graph)
    if affine is None or scale is None:
        return None
    bias = np.zeros(affine.channels) if affine.bias is None else affine.bias * scale
    return _rebuild(affine, graph, scale, bias)


def fold_division(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``(op(x, w) + b) / s`` as the multiplication by ``1 / s``."""
    affine = match_affine(call.args[0], graph)
    scale = None if affine is None else per_channel(call.args[1], affine, graph)
    if affine is None or scale is None or not scale.all():
        return None
    bias = np.zeros(affine.channels) if affine.bias is None else affine.bias / scale
    return _rebuild(affine, graph, 1.0 / scale, bias)


def fold_batch_norm(item: relax.TupleGetItem, graph: Definitions) -> relax.Expr | None:
    """Fold an inference batch norm into the preceding affine operator, else rewrite it as one multiplication and one
    addition.
    """
    call = graph.call(item.tuple_value, "relax.nn.batch_norm")
    if call is None or call.attrs.training or not is_float(call.args[0]):
        return None
    if item.index > 0:
        return call.args[item.index + 2]  # moving mean and variance pass through inference unchanged
    arrays = (graph.constant(arg) for arg in call.args[1:])
    statistics = [array.astype(np.float64) for array in arrays if array is not None]
    shape = static_shape(call.args[0])
    if shape is None or len(statistics) < 4:
        return None
    scale, shift = _scale_and_shift(call, statistics)
    affine = match_affine(call.args[0], graph)
    axis = int(call.attrs.axis) % len(shape)
    if affine is not None and axis == (1 if affine.is_convolution else len(shape) - 1):
        bias = shift if affine.bias is None else affine.bias * scale + shift
        return _rebuild(affine, graph, scale, bias)
    along = tuple(-1 if position == axis else 1 for position in range(len(shape)))
    dtype = np.dtype(str(call.args[0].ty.dtype))
    scaled = relax.op.multiply(call.args[0], constant_of(scale.astype(dtype).reshape(along)))
    return relax.op.add(scaled, constant_of(shift.astype(dtype).reshape(along)))


def _scale_and_shift(call: relax.Call, statistics: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    gamma, beta, mean, variance = statistics
    with np.errstate(all="ignore"):  # a negative variance gives NaN, as in the model
        scale = (gamma if call.attrs.scale else 1.0) / np.sqrt(variance + float(call.attrs.epsilon))
        return scale, (beta if call.attrs.center else 0.0) - mean * scale


AFFINE_RULES: RuleTable = {
    "relax.add": (constant_right, fold_addition),
    "relax.subtract": (fold_subtraction, negate_subtrahend),
    "relax.multiply": (constant_right, fold_multiplication),
    "relax.divide": (fold_division,),
    "TupleGetItem": (fold_batch_norm,),
}


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
        constant = None if call is None else graph.along(call.args[1], shape, axis)
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
