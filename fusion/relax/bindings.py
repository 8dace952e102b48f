"""Relax function as a list of bindings: definition and uses of each variable, and constants."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field

import numpy as np
import tvm
from tvm import relax, tirx

FUNCTION_RESULT = -1
# Operator pattern of TVM (``kOpaque``): FuseOps does not fuse a call to a function that has it.
OPAQUE = 8


@dataclass(frozen=True, eq=False)
class Program:
    """Top-level bindings of a function in program order."""

    function: relax.Function
    bindings: tuple[relax.VarBinding, ...]
    # Index of the binding block that each binding belongs to.
    block: tuple[int, ...]
    position: dict[relax.Var, int] = field(default_factory=dict)
    # For each variable the positions of the bindings that read it, once per use; :data:`FUNCTION_RESULT` stands for the
    # function's own result.
    users: dict[relax.Var, list[int]] = field(default_factory=dict)

    def value(self, expr: relax.Expr) -> relax.Expr | None:
        """Return the value bound to a variable, through aliases; None for a parameter. Other expressions are returned
        unchanged.
        """
        while isinstance(expr, relax.Var):
            if expr not in self.position:
                return None
            expr = self.bindings[self.position[expr]].value
        return expr

    def constant(self, expr: relax.Expr) -> np.ndarray | None:
        """Return the array behind ``expr`` if it is constant, views of constants included; else None."""
        value = self.value(expr)
        if isinstance(value, tvm.ir.GenericConst):
            return value.value.numpy() if hasattr(value.value, "numpy") else None
        name = operator_name(value)
        if value is None or name not in _VIEWS:
            return None
        source, shape = self.constant(value.args[0]), static_shape(value)
        if source is None or shape is None:
            return None
        if name == "relax.permute_dims":
            axes = value.attrs.axes
            return source.transpose(None if axes is None else [int(axis) for axis in axes])
        return source.reshape(shape)

    def scalar(self, expr: relax.Expr) -> float | None:
        """Return the number behind ``expr``, an immediate or a constant of one element; else None."""
        if isinstance(expr, tirx.IntImm | tirx.FloatImm):
            return float(expr.value)
        if isinstance(expr, relax.Var) and expr not in self.position:
            return None
        array = self.constant(expr)
        return float(array.reshape(-1)[0]) if array is not None and array.size == 1 else None

    def is_constant(self, expr: relax.Expr) -> bool:
        return self.constant(expr) is not None


_VIEWS = ("relax.reshape", "relax.permute_dims", "relax.expand_dims", "relax.squeeze")


def read_program(function: relax.Function) -> Program:
    """Index the bindings of ``function``; uses inside nested functions and branches are counted too."""
    bindings: list[relax.VarBinding] = []
    block: list[int] = []
    users: dict[relax.Var, list[int]] = defaultdict(list)
    position: dict[relax.Var, int] = {}
    for number, binding_block in enumerate(function.body.blocks):
        for binding in binding_block.bindings:
            for var in variables(binding.value):
                users[var].append(len(bindings))
            position[binding.var] = len(bindings)
            bindings.append(binding)
            block.append(number)
    for var in variables(function.body.body):
        users[var].append(FUNCTION_RESULT)
    return Program(function, tuple(bindings), tuple(block), position, dict(users))


def variables(expr: relax.Expr) -> list[relax.Var]:
    """Return the variables that ``expr`` reads, once per use."""
    if isinstance(expr, relax.Var):
        return [expr]
    if isinstance(expr, relax.Call):
        return [var for argument in expr.args for var in variables(argument)]
    if isinstance(expr, relax.Tuple):
        return [var for item in expr.fields for var in variables(item)]
    if isinstance(expr, relax.TupleGetItem):
        return variables(expr.tuple_value)
    if isinstance(expr, tvm.ir.GenericConst | tirx.IntImm | tirx.FloatImm):
        return []
    found: Counter[relax.Var] = Counter()
    relax.analysis.post_order_visit(expr, lambda e: found.update([e]) if isinstance(e, relax.Var) else None)
    # Two entries each: a variable that a branch or a nested function reads is never private to one binding outside it.
    return [var for var in found for _ in range(2)]


def operator_name(expr: relax.Expr | None) -> str:
    """Return the name of the operator that ``expr`` calls, such as ``relax.add``; empty for any other expression."""
    if isinstance(expr, relax.Call) and isinstance(expr.op, tvm.ir.Op):
        return expr.op.name
    return ""


def constant_array(expr: relax.Expr | None) -> np.ndarray | None:
    """Return the values of a constant; None for any other expression."""
    return expr.value.numpy() if isinstance(expr, tvm.ir.GenericConst) else None


def static_shape(expr: relax.Expr) -> tuple[int, ...] | None:
    """Return the shape of a tensor if every size is known; else None."""
    ty = expr.ty
    if not isinstance(ty, relax.TensorType) or not isinstance(ty.shape, relax.ShapeExpr):
        return None
    sizes = list(ty.shape.values)  # Listed once: every access to an array of TVM is a call of its library.
    return tuple(int(size) for size in sizes) if all(isinstance(size, tirx.IntImm) for size in sizes) else None


def slices_of(call: relax.Call) -> dict[int, slice] | None:
    """Return the slice that a ``strided_slice`` takes along each of its axes; None unless all bounds are numbers."""
    bounds = [_integers(argument) for argument in call.args[1:]]
    known = [bound for bound in bounds if bound is not None]
    if len(known) < len(bounds) or len(known) < 3:
        return None
    axes, *others = known
    return {axis: slice(*along) for axis, *along in zip(axes, *others, strict=True)}


def _integers(argument: relax.Expr) -> list[int] | None:
    """Return the elements of a tuple of numbers; None if ``argument`` is not one."""
    fields = getattr(argument, "fields", None)
    if fields is None:
        return None
    values = [getattr(field, "value", field) for field in fields]
    try:
        return [int(value) for value in values]
    except (TypeError, ValueError):
        return None


def image_shape(expr: relax.Expr) -> tuple[int, int, int, int] | None:
    """Return the static shape of a tensor of rank four; None for any other expression."""
    shape = static_shape(expr)
    return None if shape is None or len(shape) != 4 else (shape[0], shape[1], shape[2], shape[3])


def same_type(left: relax.Expr, right: relax.Expr) -> bool:
    """True if both are tensors of the same static shape and dtype."""
    shape = static_shape(left)
    return shape is not None and shape == static_shape(right) and str(left.ty.dtype) == str(right.ty.dtype)


def is_float32(expr: relax.Expr) -> bool:
    """True if ``expr`` is a tensor of float32."""
    return isinstance(expr.ty, relax.TensorType) and str(expr.ty.dtype) == "float32"


def is_bytes(expr: relax.Expr) -> bool:
    """True if ``expr`` is a tensor of uint8."""
    return isinstance(expr.ty, relax.TensorType) and str(expr.ty.dtype) == "uint8"
