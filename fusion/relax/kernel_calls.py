"""Which layers the kernels of a network compute, in the order in which a run calls them.

The library that is shipped knows its kernels by their symbols alone, and equal layers share one. So the variables that
the calls are bound to, which carry the names of ONNX nodes, are written down before memory planning loses them.
"""

from __future__ import annotations

import tvm
from tvm import relax

from fusion.model.layer_names import result_name

# Calls that are left at this point of the pipeline and each run one function of the library.
_CALLS = frozenset({"relax.call_tir", "relax.call_tir_inplace", "relax.call_dps_packed"})


def kernel_layers(mod: tvm.IRModule, function: str = "main") -> tuple[str, ...]:
    """A name for every kernel call of ``function`` in program order, of the variable that it defines; that of the
    result (:func:`fusion.model.layer_names.result_name`) where it, or a view of it, is one.

    Nothing where the function is not a plain sequence of calls: which kernels run is decided by the data then.
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
    """The variables that a function returns."""
    while isinstance(body, relax.Var) and isinstance(values.get(body), (relax.Var, relax.Tuple)):
        body = values[body]
    fields = body.fields if isinstance(body, relax.Tuple) else [body]
    return [field for field in fields if isinstance(field, relax.Var)]


def _source(value: relax.Expr) -> relax.Var | None:
    """The variable of which ``value`` is another name or a view."""
    if _operator(value) == "relax.reshape":
        value = value.args[0]
    return value if isinstance(value, relax.Var) else None


def _operator(value: relax.Expr) -> str | None:
    return getattr(value.op, "name", None) if isinstance(value, relax.Call) else None
