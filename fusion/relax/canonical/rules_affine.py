"""Rules that fold batch norms, scales and shifts into convolutions and matrix products with constant weights."""

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
    array = graph.constant(expr)
    shape = static_shape(affine.call)
    if array is None or shape is None or array.ndim > len(shape):
        return None
    axis = 1 if affine.is_convolution else len(shape) - 1
    sizes = (1,) * (len(shape) - array.ndim) + array.shape
    if any(size != 1 for position, size in enumerate(sizes) if position != axis):
        return None
    if sizes[axis] not in (1, affine.channels):
        return None  # one channel broadcast to several
    return np.broadcast_to(array.reshape(-1).astype(np.float64), (affine.channels,))


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
