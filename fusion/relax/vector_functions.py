"""Functions of single values that no kernel of ours computes, in vectors: TVM's own call a library for every value.

They are what epilogues compute (:func:`schedules.loops.emit.activate`), as expressions that a compiled loop nest takes
its vectors of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tvm import relax, te, tirx

from schedules.loops import emit


def _exp(x: Any) -> Any:
    """Of any argument: zero and infinity are reached by the square of the root."""
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
    """A call of one of them on float32 as a function of TIR; on other types TVM's own."""
    name, data = call.op.name, call.args[0]
    if str(call.ty.dtype) != "float32":
        return call.op.get_attr("FLegalize")(builder, call)
    function = _FUNCTIONS[name]

    def compute(tensor: te.Tensor) -> te.Tensor:
        return te.compute(tensor.shape, lambda *at: function(tensor[at]), name="values")

    return builder.call_te(compute, data, primfunc_name_hint=name.rpartition(".")[2])


LEGALIZATIONS = dict.fromkeys(_FUNCTIONS, legalize)
