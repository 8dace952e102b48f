"""Rules for tensors that are stacked along a new axis, then weighted and summed along it (split attention, selective
kernels, weighted pyramids): the parts are summed directly, and no stack is written.
"""

from __future__ import annotations

import functools

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.rewriter import Definitions, RuleTable

# A chain of more additions than this is not simpler.
MOST_PARTS = 8
_BINARY = ("relax.multiply", "relax.add")


def sum_of_parts(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``sum(stack(x_i) [* w], axis) -> x_1 [* w_1] + x_2 [* w_2] + ...``, and means likewise."""
    shape, result, axes = static_shape(call.args[0]), static_shape(call), call.attrs.axis
    if shape is None or result is None or axes is None or len(axes) != 1 or str(call.ty.dtype) != "float32":
        return None
    axis = int(axes[0]) % len(shape)
    parts = _parts(call.args[0], axis, graph) if 2 <= shape[axis] <= MOST_PARTS else None
    if parts is None:
        return None
    total = functools.reduce(relax.op.add, parts)
    if call.op.name == "relax.mean":
        total = relax.op.multiply(total, relax.const(np.float32(1.0 / len(parts))))
    return relax.op.reshape(total, result) if call.attrs.keepdims else total


def _parts(expr: relax.Expr, axis: int, graph: Definitions) -> list[relax.Expr] | None:
    """Return the parts that are stacked along ``axis``, without that axis; None if they would have to be cut out."""
    shape = static_shape(expr)
    if shape is None:
        return None
    stacked = graph.call(expr, "relax.concat")
    fields = None if stacked is None else graph.value(stacked.args[0])
    if stacked is not None and isinstance(fields, relax.Tuple) and stacked.attrs.axis is not None:
        alone = all(int(field.ty.shape[axis]) == 1 for field in fields.fields)
        if int(stacked.attrs.axis) % len(shape) != axis or not alone:
            return None
        return [relax.op.reshape(field, _without(shape, axis)) for field in fields.fields]
    apart = graph.call(expr, "relax.reshape")
    if apart is not None and axis == 1 and len(shape) == 5:
        return _channels(apart.args[0], shape)
    product = graph.call(expr, *_BINARY) if graph.has_single_user(expr) else None
    return None if product is None else _products(product, shape, axis, graph)


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], *shape[axis + 1 :])


def _channels(image: relax.Expr, shape: tuple[int, ...]) -> list[relax.Expr] | None:
    """Return the parts of the channels of an image that was reshaped to ``shape``, or None."""
    batch, parts, channels, height, width = shape
    if static_shape(image) != (batch, parts * channels, height, width):
        return None
    starts = range(0, parts * channels, channels)
    return [relax.op.strided_slice(image, [1], [start], [start + channels]) for start in starts]


def _products(call: relax.Call, shape: tuple[int, ...], axis: int, graph: Definitions) -> list[relax.Expr] | None:
    """Return the parts of a product or sum with weights per part, or None."""
    for data, weights in (call.args, reversed(call.args)):
        own = static_shape(weights)
        parts = _parts(data, axis, graph) if static_shape(data) == shape else None
        if parts is None or own is None or len(own) != len(shape) or own[axis] not in (1, shape[axis]):
            continue
        each = []
        for index, part in enumerate(parts):
            weight = weights
            if own[axis] > 1:
                weight = relax.op.strided_slice(weights, [axis], [index], [index + 1])
            each.append(relax.Call(call.op, [part, relax.op.reshape(weight, _without((*own,), axis))], call.attrs))
        return each
    return None


STACK_RULES: RuleTable = {"relax.sum": (sum_of_parts,), "relax.mean": (sum_of_parts,)}
