"""Tensors of a module under construction in their layouts: conversions are made when asked for, and once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import relax

from fusion.relax.lowered_kernels import KernelLibrary
from schedules.contract.blocked_layout import blocked_shape


@dataclass
class LaidOutValue:
    """One tensor of the original function, of ``shape`` in ``plain``; ``plain`` or ``blocked`` may not exist yet."""

    shape: tuple[int, ...]
    plain: relax.Expr | None = None
    blocked: relax.Expr | None = None


class Layouts:
    """Emits conversions through ``emit(expression, name) -> variable``, which is there for others too."""

    def __init__(self, emit: Callable[[relax.Expr, str], relax.Var], library: KernelLibrary, lanes: int) -> None:
        self.emit = emit
        self._library = library
        self.lanes = lanes

    def plain(self, value: LaidOutValue) -> relax.Expr:
        """The tensor in its own shape."""
        if value.plain is None:
            assert value.blocked is not None
            if self._same_bytes(value.shape):
                value.plain = self.reshape(value.blocked, value.shape)
            else:
                value.plain = self._convert(value.blocked, value.shape, value.shape, blocked=False)
        return value.plain

    def blocked(self, value: LaidOutValue) -> relax.Expr:
        """The tensor (of rank four) in the blocked layout."""
        if value.blocked is None:
            assert value.plain is not None
            shape = blocked_shape(value.shape, self.lanes)
            if self._same_bytes(value.shape):
                value.blocked = self.reshape(value.plain, shape)
            else:
                value.blocked = self._convert(value.plain, value.shape, shape, blocked=True)
        return value.blocked

    def reshape(self, tensor: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        """A view of ``tensor``; nothing is copied."""
        return self.emit(relax.op.reshape(tensor, shape), "view")

    def _same_bytes(self, shape: tuple[int, ...]) -> bool:
        """One pixel of whole channel blocks lies in memory alike in both layouts."""
        return shape[2] * shape[3] == 1 and shape[1] % self.lanes == 0

    def _convert(self, tensor: relax.Expr, shape: tuple, out_shape: tuple, blocked: bool) -> relax.Expr:
        kernel = self._library.conversion(shape, blocked)
        call = relax.call_tir(kernel, [tensor], out_ty=relax.TensorType(out_shape, "float32"))
        return self.emit(call, "blocked" if blocked else "plain")
