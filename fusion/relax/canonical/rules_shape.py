"""Rules for operators that compute no values: removed if they have no effect, else one reshape; look-ups
are bounded.
"""

from __future__ import annotations

from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.rewriter import Definitions, RuleTable

_BINARY = (
    *("relax.add", "relax.subtract", "relax.multiply", "relax.divide", "relax.maximum", "relax.minimum"),
    "relax.power",
)


def reshape(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite squeeze, expand_dims, flatten and reshape as ``reshape`` to a static shape; chains become one."""
    source, result = static_shape(call.args[0]), static_shape(call)
    if source is None or result is None:
        return None
    if source == result:
        return call.args[0]
    inner = graph.call(call.args[0], "relax.reshape")
    if inner is not None and _is_spread(inner, graph):
        inner = None
    data = call.args[0] if inner is None else inner.args[0]
    if call.op.name == "relax.reshape" and inner is None:
        return None
    return relax.op.reshape(data, result)


def _is_spread(call: relax.Call, graph: Definitions) -> bool:
    """True if ``call`` ends a depth-to-space, whose image must be kept: sequences made from it are views of it."""
    permuted, shape = graph.call(call.args[0], "relax.permute_dims"), static_shape(call)
    return permuted is not None and shape is not None and len(shape) == 4 and len(permuted.ty.shape) == 6


def permute_dims(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Rewrite a transposition that only moves axes of size one as a reshape."""
    shape = static_shape(call.args[0])
    if shape is None:
        return None
    axes = call.attrs.axes
    order = [int(axis) % len(shape) for axis in axes] if axes is not None else list(range(len(shape)))[::-1]
    real = [axis for axis in order if shape[axis] != 1]
    return relax.op.reshape(call.args[0], [shape[axis] for axis in order]) if real == sorted(real) else None


def drop_cast(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Remove a cast to the dtype that the tensor already has."""
    return call.args[0] if str(call.args[0].ty.dtype) == str(call.ty.dtype) else None


def drop_dropout(item: relax.TupleGetItem, graph: Definitions) -> relax.Expr | None:
    """Remove dropout, which does nothing in inference."""
    call = graph.call(item.tuple_value, "relax.nn.dropout")
    return call.args[0] if call is not None and item.index == 0 else None


def open_tuple(item: relax.TupleGetItem, graph: Definitions) -> relax.Expr | None:
    """Rewrite ``(a, b)[0] -> a``."""
    value = graph.value(item.tuple_value)
    return value.fields[item.index] if isinstance(value, relax.Tuple) else None


def single_concat(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Remove a concatenation of one tensor."""
    fields = graph.value(call.args[0])
    return fields.fields[0] if isinstance(fields, relax.Tuple) and len(fields.fields) == 1 else None


def drop_broadcast(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Remove a broadcast of one operand to the shape of the other, which the operator does by itself."""
    for index, arg in enumerate(call.args):
        repeated, result = graph.call(arg, "relax.broadcast_to"), static_shape(call)
        source = None if repeated is None else static_shape(repeated.args[0])
        if repeated is None or source is None or result is None or static_shape(call.args[1 - index]) != result:
            continue
        aligned = (1,) * (len(result) - len(source)) + source
        operands = list(call.args)
        operands[index] = relax.op.reshape(repeated.args[0], aligned)
        return relax.Call(call.op, operands, call.attrs)
    return None


def bounded_take(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    """Clip the indices of a look-up to the table: with TVM's default, an index beyond it would crash."""
    if call.attrs.mode != "fast" or graph.constant(call.args[1]) is not None:
        return None
    axis = None if call.attrs.axis is None else int(call.attrs.axis)
    return relax.op.take(call.args[0], call.args[1], axis, mode="clip")


SHAPE_RULES: RuleTable = {
    "relax.reshape": (reshape,),
    "relax.squeeze": (reshape,),
    "relax.expand_dims": (reshape,),
    "relax.flatten": (reshape,),
    "relax.nn.batch_flatten": (reshape,),
    "relax.permute_dims": (permute_dims,),
    "relax.astype": (drop_cast,),
    "relax.concat": (single_concat,),
    "relax.take": (bounded_take,),
    **dict.fromkeys(_BINARY, (drop_broadcast,)),
    "TupleGetItem": (drop_dropout, open_tuple),
}
