"""Operators along the rows of plain tensors that get their own kernel instead of a compiled loop nest.

Softmax, layer norm along the last dimension, and products of two computed tensors (attention).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
from tvm import relax

from fusion.relax.bindings import is_float32, operator_name, static_shape
from fusion.relax.layouts import LaidOutValue, Layouts
from fusion.relax.lowered_kernels import KernelLibrary
from fusion.relax.row_kernels import BatchedProduct, ColumnSoftmax, RowNorm, RowSoftmax, RowWork

# Shorter rows do not fill a vector; smaller products take less time than the call of a kernel.
_SHORTEST_ROW = 4
_FEWEST_FLOPS = 20_000


Constants: TypeAlias = Callable[[relax.Expr], np.ndarray | None]


def row_work(call: relax.Expr, constant: Constants) -> RowWork | None:
    """Return ``call`` as work along rows; None if there is no kernel for it. ``constant``: the array of an
    expression.
    """
    shape, name = static_shape(call), operator_name(call)
    if name not in _READERS or shape is None or not shape or not is_float32(call) or 0 in shape:
        return None
    return _READERS[name](call, shape, constant)


def _softmax(call: relax.Call, shape: tuple[int, ...], constant: Constants) -> RowWork | None:
    axis = int(call.attrs.axis) % len(shape)
    outer, width, columns = math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])
    if columns == 1:
        return RowSoftmax(outer, width) if width >= _SHORTEST_ROW else None
    return ColumnSoftmax(outer, width, columns) if columns >= _SHORTEST_ROW else None


def _norm(call: relax.Call, shape: tuple[int, ...], constant: Constants) -> RowWork | None:
    width = shape[-1]
    along = [int(axis) % len(shape) for axis in call.attrs.axes] == [len(shape) - 1]
    known = [constant(arg) for arg in call.args[1:]]
    if not along or width < _SHORTEST_ROW or any(array is None or array.shape != (width,) for array in known):
        return None
    return RowNorm(math.prod(shape[:-1]), width, float(call.attrs.epsilon))


def _product(call: relax.Call, shape: tuple[int, ...], constant: Constants) -> RowWork | None:
    left, right = (static_shape(arg) for arg in call.args)
    if left is None or right is None or len(left) < 2 or len(left) != len(right) or left[:-2] != right[:-2]:
        return None
    work = BatchedProduct(math.prod(left[:-2]), left[-2], left[-1], right[-1])
    flops = 2 * work.batch * work.rows * work.inner * work.columns
    computed = constant(call.args[0]) is None and constant(call.args[1]) is None
    float32 = all(is_float32(arg) for arg in call.args)
    return work if computed and float32 and work.columns >= _SHORTEST_ROW and flops >= _FEWEST_FLOPS else None


_READERS: dict[str, Callable[[relax.Call, tuple[int, ...], Constants], RowWork | None]] = {
    "relax.nn.softmax": _softmax,
    "relax.nn.layer_norm": _norm,
    "relax.matmul": _product,
}


@dataclass(frozen=True, eq=False)
class RowOperators:
    """Rewriter of calls."""

    layouts: Layouts
    library: KernelLibrary
    # Value of an original variable.
    lookup: Callable[[relax.Var], LaidOutValue | None]
    # Array behind an expression, or None.
    constant: Constants
    # Value that a variable is bound to, or None.
    bound: Callable[[relax.Expr], relax.Expr | None]

    def rewrite(self, binding: relax.VarBinding) -> relax.Expr | None:
        """Return a call of a kernel on plain operands, in the shape of the kernel; None if none applies."""
        call = binding.value
        if operator_name(call) == "relax.permute_dims":
            return self._image_rows(call)
        work = row_work(call, self.constant)
        if work is None:
            return None
        if isinstance(work, BatchedProduct):
            operands = [self._plain(arg) for arg in call.args]
            shapes: list[tuple[int, ...]] = [
                (work.batch, work.rows, work.inner),
                (work.batch, work.inner, work.columns),
            ]
            result: tuple[int, ...] = (work.batch, work.rows, work.columns)
        else:
            operands, shapes, result = [self._plain(call.args[0])], [work.shape], work.shape
        values = [operand for operand in operands if operand is not None]
        if len(values) < len(operands):
            return None
        arguments = [
            tensor if static_shape(tensor) == shape else self.layouts.reshape(tensor, shape)
            for tensor, shape in zip(values, shapes, strict=True)
        ]
        if isinstance(work, RowNorm):
            scale, shift = (self.constant(arg) for arg in call.args[1:])
            arguments.append(self.library.constant(np.stack([np.asarray(scale), np.asarray(shift)])))
        return relax.call_tir(self.library.row_kernel(work), arguments, out_ty=relax.TensorType(result, "float32"))

    def _image_rows(self, call: relax.Call) -> relax.Expr | None:
        """Return the pixels of a blocked image as rows, channels last, or None."""
        axes = [int(axis) for axis in call.attrs.axes or ()]
        image = call.args[0]
        if axes == [0, 2, 1]:
            flat = self.bound(image)
            image = flat.args[0] if flat is not None and operator_name(flat) == "relax.reshape" else None
        elif axes != [0, 2, 3, 1]:
            return None
        value = self.lookup(image) if isinstance(image, relax.Var) else None
        stored = None if value is None else value.stored("blocked")
        if value is None or stored is None or len(value.shape) != 4 or not is_float32(call):
            return None
        batch, channels, height, width = value.shape
        rows = (batch, height * width, channels)
        if static_shape(call) not in (rows, (batch, height, width, channels)):
            return None
        kernel = self.library.rows((batch, channels, height, width), blocked=False, source=stored)
        arguments = [self.layouts.blocked(value, stored)]
        return relax.call_tir(kernel, arguments, out_ty=relax.TensorType(rows, "float32"))

    def _plain(self, argument: relax.Expr) -> relax.Expr | None:
        value = self.lookup(argument) if isinstance(argument, relax.Var) else None
        return None if value is None else self.layouts.plain(value)
