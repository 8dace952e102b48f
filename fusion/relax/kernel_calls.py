"""Names of the layers that the kernels of a network compute, in the order of the calls of a run.

The compiled library identifies its kernels by their symbols only, and equal layers share one. The variables that the
calls are bound to have the names of ONNX nodes, so they are recorded before memory planning drops them.
"""

from __future__ import annotations

import tvm
from tvm import relax

from fusion.model.layer_names import result_name

# Calls that remain at this point of the pipeline; each runs one function of the library.
_CALLS = frozenset({"relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed"})


def kernel_layers(mod: tvm.IRModule, function: str = "main") -> tuple[str, ...]:
    """Return the name of the variable that each kernel call of ``function`` defines, in program order; the name of the
    result (:func:`fusion.model.layer_names.result_name`) if the variable, or a view of it, is one.

    Empty if the function is not a plain sequence of calls: then the data decide which kernels run.
    """
    body = mod[function].body
    bindings = [binding for block in body.blocks for binding in block.bindings]
    if any(isinstance(binding.value, relax.If) for binding in bindings):
        return ()
    sources = {binding.var: _source(binding.value) for binding in bindings}
    values = {binding.var: binding.value for binding in bindings}
    results = _results(body.body, values)
    outputs: dict[relax.Var, str] = {}
    for index, result in enumerate(results):
        while sources.get(result) is not None:
            result = sources[result]
        outputs.setdefault(result, result_name(index))
    return tuple(
        outputs.get(binding.var, binding.var.name) for binding in bindings if _operator(binding.value) in _CALLS
    )


def _results(body: relax.Expr, values: dict[relax.Var, relax.Expr]) -> list[relax.Var]:
    """Return the variables that a function returns."""
    while isinstance(body, relax.Var) and isinstance(values.get(body), (relax.Var, relax.Tuple)):
        body = values[body]
    fields = body.fields if isinstance(body, relax.Tuple) else [body]
    return [field for field in fields if isinstance(field, relax.Var)]


def _source(value: relax.Expr) -> relax.Var | None:
    """Return the variable of which ``value`` is an alias or a view, else None."""
    if _operator(value) == "relax.reshape":
        value = value.args[0]
    return value if isinstance(value, relax.Var) else None


def _operator(value: relax.Expr) -> str | None:
    return getattr(value.op, "name", None) if isinstance(value, relax.Call) else None
