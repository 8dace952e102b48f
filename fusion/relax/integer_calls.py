"""Integer layers in Relax: calls of the functions that specify them, tagged with the operator.

The function is :func:`schedules.contract.operator_workload.workload` of the operator, so that a layer without a kernel
is compiled as any other function and gives the same bytes. It is compiled alone: TVM cannot fuse several of them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import tvm
from tvm import relax, tirx

from costmodel.operators.layers import Conv2d, Dense
from costmodel.operators.serialization import from_record, to_record
from fusion.relax.bindings import OPAQUE, operator_name
from schedules.contract.operator_workload import workload

_OPERATOR = "fusion.operator"


def integer_call(builder: relax.BlockBuilder, operator: Conv2d | Dense, arguments: Sequence[relax.Expr]) -> relax.Expr:
    """Return a call of ``operator`` (``int8``) on the arguments of its workload; adds the function to the module of
    ``builder``.
    """
    function = workload(operator)["main"].without_attr("global_symbol")
    function = function.with_attr(_OPERATOR, json.dumps(to_record(operator)))
    kind = "conv" if isinstance(operator, Conv2d) else "dense"
    function = function.with_attr("op_pattern", OPAQUE)
    variable = builder.add_func(function, f"quantised_{kind}")
    return relax.call_tir(variable, list(arguments), out_ty=relax.TensorType(operator.output_shape, "uint8"))


def operator_of(mod: tvm.IRModule, expr: relax.Expr) -> tuple[Any, list[relax.Expr]] | None:
    """Return the operator that a call computes, and its arguments; None for any other expression."""
    if operator_name(expr) != "relax.call_tir":
        return None
    function = mod[expr.args[0]]
    if not isinstance(function, tirx.PrimFunc) or _OPERATOR not in (function.attrs or {}):
        return None
    return from_record(json.loads(str(function.attrs[_OPERATOR]))), list(expr.args[1].fields)
