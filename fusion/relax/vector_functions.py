"""Vector code for element-wise functions without a template kernel: TVM's own code calls a library for every value.

They are the functions of epilogues (:func:`schedules.loops.emit.activate`), as expressions for vectors of a compiled
loop nest. The module also covers clipping, for which TVM's own code replaces NaN by a bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from tvm import relax, te, tirx

from fusion.relax.bindings import static_shape
from schedules.loops import emit


def _exp(x: Any) -> Any:
    """Return exp of any argument: the square of its root, so that zero and infinity are reached."""
    root = emit.exp(x * tirx.const(0.5, "float32"), 1)
    return root * root


_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "relax.exp": _exp,
    "relax.erf": lambda x: emit.erf(x, 1),
    "relax.sin": lambda x: emit.sine(x, 1),
    "relax.tanh": lambda x: emit.activate(x, "tanh", 1),
    "relax.sigmoid": lambda x: emit.activate(x, "sigmoid", 1),
    "relax.nn.silu": lambda x: emit.activate(x, "silu", 1),
    "relax.nn.gelu": lambda x: emit.activate(x, "gelu", 1),
    "relax.nn.gelu_tanh": lambda x: emit.activate(x, "gelu_tanh", 1),
}


def legalize(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Lower a call of one of the functions on float32 to TIR; other dtypes by TVM's own rule."""
    name, data = call.op.name, call.args[0]
    if str(call.ty.dtype) != "float32":
        return call.op.get_attr("FLegalize")(builder, call)
    function = _FUNCTIONS[name]

    def compute(tensor: te.Tensor) -> te.Tensor:
        return te.compute(tensor.shape, lambda *at: function(tensor[at]), name="values")

    return builder.call_te(compute, data, primfunc_name_hint=name.rpartition(".")[2])


_LIMITS: dict[str, Callable[[Any, Any], Any]] = {"relax.maximum": tirx.max, "relax.minimum": tirx.min}


def legalize_limits(builder: relax.BlockBuilder, call: relax.Call) -> relax.Expr:
    """Lower a call that clips floats such that NaN stays NaN; other dtypes by TVM's own rule."""
    name, dtype, shape = call.op.name, str(call.ty.dtype), static_shape(call)
    if "float" not in dtype or shape is None:
        return call.op.get_attr("FLegalize")(builder, call)
    if name in _LIMITS:
        tensors, bounds = list(call.args), (-math.inf, math.inf)
    elif name == "relax.nn.relu":
        tensors, bounds = [call.args[0]], (0.0, math.inf)
    else:
        tensors, bounds = [call.args[0]], (float(call.args[1].value), float(call.args[2].value))
    low, high = (None if math.isinf(bound) else tirx.const(bound, dtype) for bound in bounds)

    def element(data: Sequence[te.Tensor], at: Sequence[Any]) -> Any:
        if name not in _LIMITS:
            return emit.within(data[0][at], low, high)
        left, right = (_broadcast(each, at) for each in data)
        # If the two do not compare, the second is taken. TVM simplifies ``left == left`` as if NaN did not exist.
        return tirx.Select(tirx.isnan(left), left, _LIMITS[name](left, right))

    def compute(*data: te.Tensor) -> te.Tensor:
        return te.compute(shape, lambda *at: element(data, at), name="values")

    return builder.call_te(compute, *tensors, primfunc_name_hint=name.rpartition(".")[2])


def _broadcast(tensor: te.Tensor, at: Sequence[Any]) -> Any:
    """Return the element of ``tensor`` at a position of the shape that it is broadcast to."""
    last = at[len(at) - len(tensor.shape) :]
    return tensor[tuple(0 if int(size) == 1 else index for size, index in zip(tensor.shape, last, strict=True))]


LEGALIZATIONS = {
    **dict.fromkeys(_FUNCTIONS, legalize),
    **dict.fromkeys(("relax.nn.relu", "relax.clip", *_LIMITS), legalize_limits),
}
