"""Lowering of byte steps (:mod:`fusion.relax.byte_calls`) to kernels on plain or blocked tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import tvm
from tvm import relax

from fusion.relax.byte_calls import BytePair, ByteStep, ByteTable, size_of, step_of
from fusion.relax.byte_kernels import pack_channel_tables
from fusion.relax.byte_resize import ByteResize
from fusion.relax.layouts import LaidOutValue, Layout, Layouts
from fusion.relax.lowered_kernels import KernelLibrary
from schedules.contract.blocked_layout import blocked_shape

_BYTES = "uint8"


@dataclass(frozen=True, eq=False)
class ByteOperators:
    """Rewriter of the calls of byte steps in ``module``."""

    module: tvm.IRModule
    layouts: Layouts
    library: KernelLibrary
    # Value of an original variable.
    lookup: Callable[[relax.Var], LaidOutValue | None]
    # Array behind an expression, or None.
    constant: Callable[[relax.Expr], np.ndarray | None]

    def rewrite(self, binding: relax.VarBinding) -> LaidOutValue | None:
        """Return the value of ``binding`` computed by a kernel; None if it is not a byte step, or too small for a
        vector.
        """
        found = step_of(self.module, binding.value)
        if found is None:
            return None
        step, arguments = found
        if isinstance(step, ByteResize):
            return self._resized(step, arguments, binding.var.name)
        *data, last = arguments
        numbers = self.constant(last)
        values = [self.lookup(each) if isinstance(each, relax.Var) else None for each in data]
        known = [value for value in values if value is not None]
        if numbers is None or len(known) < len(data):
            return None
        name = binding.var.name
        if isinstance(step, ByteTable) and step.per_channel:
            packed = pack_channel_tables(numbers, self.layouts.lanes)
            return self._blocked(known, [self.library.constant(packed)], step, name)
        given = self.library.constant(numbers)
        if isinstance(step, ByteTable):
            return self._flat(known, given, step, name)
        if isinstance(step, BytePair) and not step.per_channel:
            return self._flat(known, given, step, name) if size_of(step) >= self.layouts.lanes else None
        return self._blocked(known, [given], step, name)

    def _resized(self, step: ByteResize, arguments: list[relax.Expr], name: str) -> LaidOutValue | None:
        data, *tables = arguments
        value = self.lookup(data) if isinstance(data, relax.Var) else None
        arrays = [array for array in map(self.constant, tables) if array is not None]
        if value is None or len(arrays) < len(tables):
            return None
        return self._blocked([value], [self.library.constant(array) for array in arrays], step, name)

    def _flat(
        self, values: list[LaidOutValue], given: relax.Expr, step: ByteTable | BytePair, name: str
    ) -> LaidOutValue:
        """Compute byte by byte: blocked if all tensors exist blocked, or one exists only blocked; else plain."""
        layout: Layout = "blocked" if any(value.is_blocked for value in values) else "plain"
        if all(value.is_plain for value in values) and not all(value.is_blocked for value in values):
            layout = "plain"
        tensors = [getattr(self.layouts, layout)(value, _BYTES) for value in values]
        shape = blocked_shape(step.shape, self.layouts.lanes) if layout == "blocked" else step.shape
        count = int(np.prod(shape))
        flat = [self.layouts.reshape(tensor, (count,)) for tensor in tensors]
        kernel = self.library.byte_step(step, count)
        call = relax.call_tir(kernel, [*flat, given], out_ty=relax.TensorType((count,), _BYTES))
        result = self.layouts.reshape(self.layouts.emit(call, name), shape)
        return LaidOutValue(step.shape, layout, result, _BYTES)

    def _blocked(self, values: list[LaidOutValue], given: list[relax.Expr], step: ByteStep, name: str) -> LaidOutValue:
        tensors = [self.layouts.blocked(value, _BYTES) for value in values]
        result = relax.TensorType(blocked_shape(step.result, self.layouts.lanes), _BYTES)
        call = relax.call_tir(self.library.byte_step(step), [*tensors, *given], out_ty=result)
        return LaidOutValue(step.result, "blocked", self.layouts.emit(call, name), _BYTES)
