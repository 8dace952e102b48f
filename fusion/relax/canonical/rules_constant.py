"""Rules that evaluate cheap operators on constants with NumPy: no kernel is compiled to transpose a weight."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from tvm import relax

from fusion.relax.bindings import static_shape
from fusion.relax.canonical.rewriter import Definitions, RewriteRule, RuleTable, constant_of

# Operators between a framework's parameters and their use; TVM's FoldConstant evaluates all others.
_BINARY: dict[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    "relax.add": np.add,
    "relax.subtract": np.subtract,
    "relax.multiply": np.multiply,
    "relax.divide": np.true_divide,
}
_RESHAPES = ("relax.reshape", "relax.squeeze", "relax.expand_dims", "relax.flatten", "relax.nn.batch_flatten")


def transpose(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    array = graph.constant(call.args[0])
    if array is None:
        return None
    axes = None if call.attrs.axes is None else [int(axis) for axis in call.attrs.axes]
    return constant_of(np.ascontiguousarray(array.transpose(axes)))


def reshape(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    array, shape = graph.constant(call.args[0]), static_shape(call)
    return None if array is None or shape is None else constant_of(array.reshape(shape))


def cast(call: relax.Call, graph: Definitions) -> relax.Expr | None:
    array = graph.constant(call.args[0])
    dtype = str(call.ty.dtype)
    known = dtype in ("float32", "float64", "float16", "int8", "int32", "int64", "uint8", "bool")
    return constant_of(array.astype(dtype)) if array is not None and known else None


def _binary(function: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> RewriteRule:
    def evaluate(call: relax.Call, graph: Definitions) -> relax.Expr | None:
        left, right = graph.constant(call.args[0]), graph.constant(call.args[1])
        if left is None or right is None or left.dtype != right.dtype or left.dtype.kind != "f":
            return None
        return constant_of(np.asarray(function(left, right), left.dtype))

    return evaluate


CONSTANT_RULES: RuleTable = {
    "relax.permute_dims": (transpose,),
    "relax.astype": (cast,),
    **dict.fromkeys(_RESHAPES, (reshape,)),
    **{name: (_binary(function),) for name, function in _BINARY.items()},
}
