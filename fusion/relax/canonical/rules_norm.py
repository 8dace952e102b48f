"""Rules that bring normalisation to one form: ``R.nn.layer_norm`` along one axis, ``R.nn.group_norm`` of images, each
with its scale and shift.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.rewriter import Definitions, RuleTable, constant_of, is_float

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
    constant = graph.constant(call.args[1])
    if constant is None or constant.ndim > len(shape):
        return None
    sizes = (1,) * (len(shape) - constant.ndim) + constant.shape
    if any(size != 1 for position, size in enumerate(sizes) if position != axis):
        return None
    vector = np.broadcast_to(constant.reshape(-1), (shape[axis],)).astype(np.float64)
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
