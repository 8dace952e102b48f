"""Rules that bring activations and normalisations to one form, independent of the operators that a framework uses for
them.

Norms are ``R.nn.layer_norm`` along one axis and ``R.nn.group_norm`` of images, each with its scale and shift.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.rewriter import Definitions, RuleTable, constant_of, is_float

# Tolerance for constants that frameworks round to their own precision: 1/6 as 0.16666667, 3 as 3.0000001.
_TOLERANCE = 1e-6


def _close(value: float | None, expected: float) -> bool:
    return value is not None and math.isclose(value, expected, rel_tol=_TOLERANCE, abs_tol=_TOLERANCE)


def clip_bounds(call: relax.Call, graph: Definitions) -> tuple[float, float] | None:
    """Return the lower and upper bound of a call to ``R.clip``; None if they are not constant."""
    low, high = graph.scalar(call.args[1]), graph.scalar(call.args[2])
    return None if low is None or high is None else (low, high)


def relu6(call: relax.Call, graph: Definitions) -> relax.Expr:
    """Rewrite ``nn.relu6(x) -> clip(x, 0, 6)``."""
    return relax.op.clip(call.args[0], 0, 6)


def simplify_clip(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Simplify clips: ``clip(x, 0, inf) -> relu(x)``; ``clip(clip(x, a, b), c, d)`` as one clip."""
    bounds = clip_bounds(call, graph)
    if bounds is None:
        return None
    if bounds == (-math.inf, math.inf):
        return call.args[0]
    if bounds[0] == 0 and (bounds[1] == math.inf or bounds[1] >= 3e38) and is_float(call):
        return relax.op.nn.relu(call.args[0])
    inner = _interval(call.args[0], graph)
    if inner is None:
        return None
    source, low, high = inner
    if max(low, bounds[0]) > min(high, bounds[1]):
        return None
    return relax.op.clip(source, max(low, bounds[0]), min(high, bounds[1]))


def _interval(expr: relax.Expr, graph: Definitions) -> tuple[relax.Expr, float, float] | None:
    """Return ``expr``, a clip or relu, as (source, low, high) of ``clip(source, low, high)``; else None."""
    call = graph.call(expr, "relax.clip", "relax.nn.relu")
    if call is None or not is_float(call):
        return None
    if call.op.name == "relax.nn.relu":
        return call.args[0], 0.0, math.inf
    bounds = clip_bounds(call, graph)
    return None if bounds is None else (call.args[0], *bounds)


def maximum_to_clip(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``maximum(x, c) -> clip(x, c, inf)``, which :func:`simplify_clip` simplifies further."""
    return _bound(call, graph, lambda data, value: relax.op.clip(data, value, math.inf))


def minimum_to_clip(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``minimum(x, c) -> clip(x, -inf, c)``."""
    return _bound(call, graph, lambda data, value: relax.op.clip(data, -math.inf, value))


def _bound(call: relax.Call, graph: Definitions, clip) -> relax.Expr | None:
    for data, bound in (call.args, reversed(call.args)):
        value = graph.scalar(bound)
        if value is not None and graph.scalar(data) is None and is_float(call) and _keeps_shape(call, data):
            return clip(data, value)
    return None


def _keeps_shape(call: relax.Call, data: relax.Expr) -> bool:
    """True if ``call`` has the rank of ``data``: a constant of shape (1, 1, 1) may raise the rank of the
    other operand.
    """
    return len(call.ty.shape) == len(data.ty.shape)


def relu_of_clip(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``relu(clip(x, a, b))`` as one clip; ``relu(relu(x)) -> relu(x)``."""
    inner = _interval(call.args[0], graph)
    if inner is None or inner[2] <= 0:
        return None
    source, low, high = inner
    if high == math.inf:
        return relax.op.nn.relu(source) if low <= 0 else None
    return relax.op.clip(source, max(low, 0.0), high)


def silu(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``x * sigmoid(x) -> nn.silu(x)``."""
    for data, gate in (call.args, reversed(call.args)):
        inner = graph.call(gate, "relax.sigmoid")
        if inner is not None and graph.same(inner.args[0], data) and graph.has_single_user(gate):
            return relax.op.nn.silu(data)
    return None


def _gate_source(expr: relax.Expr, graph: Definitions) -> relax.Expr | None:
    """Return ``x`` if ``expr`` is ``clip(x + 3, 0, 6)``, else None."""
    call = graph.call(expr, "relax.clip")
    if call is None or clip_bounds(call, graph) != (0, 6):
        return None
    total = graph.call(call.args[0], "relax.add")
    if total is None:
        return None
    for data, shift in (total.args, reversed(total.args)):
        if _close(graph.scalar(shift), 3.0) and _keeps_shape(total, data):
            return data
    return None


def _hard_sigmoid(data: relax.Expr) -> relax.Expr:
    dtype = str(data.ty.dtype)
    gate = relax.op.clip(relax.op.add(data, relax.const(3.0, dtype)), 0, 6)
    return relax.op.multiply(gate, relax.const(1.0 / 6.0, dtype))


def hard_sigmoid_source(expr: relax.Expr, graph: Definitions) -> relax.Expr | None:
    """Return ``x`` if ``expr`` is the canonical hard sigmoid of ``x``, else None."""
    call = graph.call(expr, "relax.multiply")
    if call is None or not _close(graph.scalar(call.args[1]), 1.0 / 6.0):
        return None
    return _gate_source(call.args[0], graph)


def hard_sigmoid_of_division(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``clip(x + 3, 0, 6) / 6`` as the canonical hard sigmoid."""
    if not _close(graph.scalar(call.args[1]), 6.0):
        return None
    source = _gate_source(call.args[0], graph)
    return None if source is None else _hard_sigmoid(source)


def hard_sigmoid_of_clip(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``clip(x / 6 + 0.5, 0, 1)``, ONNX's form with alpha = 1/6, as the canonical hard sigmoid; not for other
    slopes.
    """
    if clip_bounds(call, graph) != (0, 1):
        return None
    total = graph.call(call.args[0], "relax.add")
    if total is None or not _close(graph.scalar(total.args[1]), 0.5):
        return None
    product = graph.call(total.args[0], "relax.multiply", "relax.divide")
    if product is None:
        return None
    slope = graph.scalar(product.args[1])
    expected = 1.0 / 6.0 if product.op.name == "relax.multiply" else 6.0
    if not _close(slope, expected) or not _keeps_shape(product, product.args[0]):
        return None
    return _hard_sigmoid(product.args[0])


def hard_swish(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite products of ``x``, ``clip(x + 3, 0, 6)`` and 1/6, in any order, as ``x * hard_sigmoid(x)``."""
    factor = graph.scalar(call.args[1])
    if factor is not None:
        return _hard_swish_of(call.args[0], graph) if _close(factor, 1.0 / 6.0) else None
    for data, gate in (call.args, reversed(call.args)):
        source = _gate_source(gate, graph)
        scaled = None if source is None else _sixth_of(data, graph)
        if scaled is not None and graph.same(scaled, source):
            return relax.op.multiply(scaled, _hard_sigmoid(scaled))
    left, right = call.args
    source = hard_sigmoid_source(left, graph)
    if source is not None and graph.same(source, right):
        return relax.op.multiply(right, left)  # the gate is the right operand
    return None


def hard_swish_of_division(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``x * clip(x + 3, 0, 6) / 6`` as ``x * hard_sigmoid(x)``."""
    return _hard_swish_of(call.args[0], graph) if _close(graph.scalar(call.args[1]), 6.0) else None


def _hard_swish_of(expr: relax.Expr, graph: Definitions) -> relax.Expr | None:
    product = graph.call(expr, "relax.multiply")
    if product is None or not graph.has_single_user(expr):
        return None
    for data, gate in (product.args, reversed(product.args)):
        source = _gate_source(gate, graph)
        if source is not None and graph.same(source, data):
            return relax.op.multiply(data, _hard_sigmoid(data))
    return None


def _sixth_of(expr: relax.Expr, graph: Definitions) -> relax.Expr | None:
    """Return ``x`` if ``expr`` is ``x / 6``, else None."""
    call = graph.call(expr, "relax.multiply", "relax.divide")
    if call is None:
        return None
    expected = 1.0 / 6.0 if call.op.name == "relax.multiply" else 6.0
    return call.args[0] if _close(graph.scalar(call.args[1]), expected) else None


def gelu(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite products of ``x``, ``1 + erf(x / sqrt(2))`` and one half, in any order, as ``nn.gelu(x)``."""
    factors, scale = _factors(call, graph)
    if len(factors) != 2 or not _close(scale, 0.5):
        return None
    for data, gate in (factors, reversed(factors)):
        total = graph.call(gate, "relax.add")
        function = None if total is None else graph.call(total.args[0], "relax.erf")
        if total is None or function is None or not _close(graph.scalar(total.args[1]), 1.0):
            continue
        inner = graph.call(function.args[0], "relax.multiply", "relax.divide")
        slope = None if inner is None else graph.scalar(inner.args[1])
        expected = math.sqrt(0.5) if inner is not None and inner.op.name == "relax.multiply" else math.sqrt(2.0)
        same = inner is not None and _close(slope, expected) and graph.same(inner.args[0], data)
        if same and static_shape(call) == static_shape(data):
            return relax.op.nn.gelu(data)
    return None


def _factors(call: relax.Call, graph: Definitions) -> tuple[list[relax.Expr], float]:
    """Return the tensors that ``call`` multiplies, through products with a single user, and the product
    of its scalars.
    """
    factors: list[relax.Expr] = []
    scale = 1.0
    for arg in call.args:
        value, product = graph.scalar(arg), graph.call(arg, "relax.multiply")
        if value is not None:
            scale *= value
        elif product is not None and graph.has_single_user(arg):
            inner, factor = _factors(product, graph)
            factors, scale = factors + inner, scale * factor
        else:
            factors.append(arg)
    return factors, scale


# Products and roots are vector instructions; a power is a library call per value.
_POWERS: dict[float, Callable[[relax.Expr], relax.Expr]] = {
    1.0: lambda x: x,
    2.0: lambda x: relax.op.multiply(x, x),
    3.0: lambda x: relax.op.multiply(relax.op.multiply(x, x), x),
    0.5: relax.op.sqrt,
    -0.5: relax.op.rsqrt,
}


def simple_power(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``power(x, 2) -> x * x``, and other powers that are products and roots."""
    exponent = graph.scalar(call.args[1])
    simple = None if exponent is None else _POWERS.get(exponent)
    if simple is None or not is_float(call) or static_shape(call) != static_shape(call.args[0]):
        return None
    return simple(call.args[0])


ACTIVATION_RULES: RuleTable = {
    "relax.power": (simple_power,),
    "relax.nn.relu6": (relu6,),
    "relax.nn.relu": (relu_of_clip,),
    "relax.clip": (simplify_clip, hard_sigmoid_of_clip),
    "relax.maximum": (maximum_to_clip,),
    "relax.minimum": (minimum_to_clip,),
    "relax.multiply": (silu, hard_swish, gelu),
    "relax.divide": (hard_sigmoid_of_division, hard_swish_of_division),
}


NORM = "relax.nn.layer_norm"
GROUP_NORM = "relax.nn.group_norm"


@dataclass(frozen=True, eq=False)
class _Centred:
    """Centred tensor ``data - mean(data)`` along ``axis``."""

    data: relax.Expr
    axis: int


def assemble_norm(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``d / sqrt(mean(d d) + e)`` with ``d = x - mean(x)``, written as single operators by an exporter, as a
    layer norm.
    """
    difference, root = call.args
    centred = _centred(difference, graph)
    epsilon = None if centred is None else _root_of_variance(root, difference, centred, graph)
    shape = static_shape(call)
    if centred is None or epsilon is None or shape is None or shape != static_shape(centred.data):
        return None
    size = shape[centred.axis]
    one, zero = relax.const(np.ones(size, np.float32)), relax.const(np.zeros(size, np.float32))
    return relax.op.nn.layer_norm(centred.data, one, zero, axes=[centred.axis], epsilon=epsilon)


def _centred(expr: relax.Expr, graph: Definitions) -> _Centred | None:
    call = graph.call(expr, "relax.subtract")
    if call is None or str(call.ty.dtype) != "float32":
        return None
    axis = _mean_of(call.args[1], call.args[0], graph)
    return None if axis is None else _Centred(call.args[0], axis)


def _mean_of(expr: relax.Expr, data: relax.Expr, graph: Definitions) -> int | None:
    """Return the axis, counted from the front, if ``expr`` is the mean of ``data`` along one axis with its dimension
    kept; else None.
    """
    call, shape = graph.call(expr, "relax.mean"), static_shape(data)
    if call is None or shape is None or not graph.same(call.args[0], data) or not call.attrs.keepdims:
        return None
    axes = call.attrs.axis
    return None if axes is None or len(axes) != 1 else int(axes[0]) % len(shape)


def _root_of_variance(
    expr: relax.Expr, difference: relax.Expr, centred: _Centred, graph: Definitions
) -> float | None:  # fmt: skip
    """Return the epsilon of ``sqrt(mean(d d) + epsilon)``; None if ``expr`` is not of this form."""
    root = graph.call(expr, "relax.sqrt")
    total = None if root is None else graph.call(root.args[0], "relax.add")
    epsilon = None if total is None else graph.scalar(total.args[1])
    if total is None or epsilon is None or not epsilon > 0:
        return None
    mean = graph.call(total.args[0], "relax.mean")
    square = None if mean is None else mean.args[0]
    if square is None or not _is_square(square, difference, graph):
        return None
    return epsilon if _mean_of(total.args[0], square, graph) == centred.axis else None


def _is_square(expr: relax.Expr, source: relax.Expr, graph: Definitions) -> bool:
    call = graph.call(expr, "relax.power", "relax.multiply", "relax.square")
    if call is None or not graph.same(call.args[0], source):
        return False
    if call.op.name == "relax.square":
        return True
    return graph.scalar(call.args[1]) == 2.0 if call.op.name == "relax.power" else graph.same(call.args[1], source)


def scale_of_norm(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Fold a constant factor after a layer norm with a single user into its scale and shift."""
    return _absorbed(call, graph, lambda scale, shift, factor: (scale * factor, shift * factor))


def shift_of_norm(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Fold a constant summand after a layer norm with a single user into its shift."""
    return _absorbed(call, graph, lambda scale, shift, summand: (scale, shift + summand))


def _absorbed(call: relax.Call, graph: Definitions, combine) -> relax.Expr | None:
    norm = graph.call(call.args[0], NORM, GROUP_NORM)
    if norm is None or not graph.has_single_user(call.args[0]) or not is_float(call):
        return None
    shape, axis = static_shape(norm), _axis_of_weights(norm)
    scale, shift = graph.constant(norm.args[1]), graph.constant(norm.args[2])
    if shape is None or axis is None or scale is None or shift is None or static_shape(call) != shape:
        return None
    vector = graph.along(call.args[1], shape, axis)
    if vector is None:
        return None
    new = [constant_of(each.astype(scale.dtype)) for each in combine(scale, shift, vector)]
    return relax.Call(norm.op, [norm.args[0], *new], norm.attrs)


def _axis_of_weights(norm: relax.Call) -> int | None:
    """Return the dimension along which the scale and the shift of a norm vary; None if there are several."""
    rank = len(static_shape(norm) or ())
    if norm.op.name == GROUP_NORM:
        return int(norm.attrs.channel_axis) % rank
    return int(norm.attrs.axes[0]) % rank if len(norm.attrs.axes) == 1 else None


def group_norm_of_rows(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``reshape(norm(reshape(x, (N, G, -1))), shape of x)``, a row per group, as a group norm of ``x``."""
    norm = graph.call(call.args[0], GROUP_NORM) if graph.has_single_user(call.args[0]) else None
    rows = None if norm is None else graph.call(norm.args[0], "relax.reshape")
    if norm is None or rows is None:
        return None
    source, shape, apart = rows.args[0], static_shape(call), static_shape(rows)
    scale, shift = graph.constant(norm.args[1]), graph.constant(norm.args[2])
    if shape is None or apart is None or len(shape) != 4 or len(apart) != 3 or static_shape(source) != shape:
        return None
    groups = int(norm.attrs.num_groups)
    whole = apart[:2] == (shape[0], groups) and shape[1] % groups == 0
    if scale is None or shift is None or not whole or int(norm.attrs.channel_axis) % 3 != 1:
        return None
    weights = [constant_of(np.repeat(each, shape[1] // groups)) for each in (scale, shift)]
    epsilon = float(norm.attrs.epsilon)
    return relax.op.nn.group_norm(source, *weights, groups, channel_axis=1, axes=[2, 3], epsilon=epsilon)


NORM_RULES: RuleTable = {
    "relax.divide": (assemble_norm,),
    "relax.reshape": (group_norm_of_rows,),
    "relax.multiply": (scale_of_norm,),
    "relax.add": (shift_of_norm,),
}
