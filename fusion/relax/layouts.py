"""Tensors of a module under construction in their layouts and dtypes; conversions are made on demand, each once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from tvm import relax

from fusion.relax.lowered_kernels import KernelLibrary
from schedules.contract.blocked_layout import blocked_shape

Layout = Literal["plain", "blocked"]


class Form(NamedTuple):
    """Layout and dtype of a tensor in memory."""

    layout: Layout
    dtype: str


class LaidOutValue:
    """One tensor of the original function, where it has ``shape`` and ``dtype``.

    ``forms``: the expressions of the tensor in the function under construction. Either one of them has the tensor's own
    ``dtype``, or the tensor was computed in a shorter dtype and has no more digits than that.
    """

    def __init__(self, shape: tuple[int, ...], layout: Layout, expression: relax.Expr, dtype: str = "float32") -> None:
        """Start with one form: ``expression`` in ``layout``."""
        self.shape = shape
        self.dtype = dtype
        self.forms = {Form(layout, str(expression.ty.dtype)): expression}

    def stored(self, layout: Layout) -> str | None:
        """Return the dtype in which the tensor exists in ``layout``, the first of several; None if it does
        not exist.
        """
        return next((form.dtype for form in self.forms if form.layout == layout), None)

    @property
    def is_blocked(self) -> bool:
        """True if the tensor exists in the blocked layout."""
        return self.stored("blocked") is not None

    @property
    def is_plain(self) -> bool:
        """True if the tensor exists in its own shape."""
        return self.stored("plain") is not None


@dataclass(frozen=True, eq=False)
class Layouts:
    """Emitter of conversions through ``emit(expression, name) -> variable``, which is public."""

    emit: Callable[[relax.Expr, str], relax.Var]
    library: KernelLibrary
    lanes: int

    def plain(self, value: LaidOutValue, dtype: str | None = None) -> relax.Expr:
        """Return the tensor in its own shape, in ``dtype`` (default: its dtype in the original function)."""
        return self._in_form(value, Form("plain", dtype or value.dtype))

    def blocked(self, value: LaidOutValue, dtype: str | None = None) -> relax.Expr:
        """Return the tensor (of rank four) in the blocked layout, in ``dtype`` (default: its dtype in the original
        function).
        """
        return self._in_form(value, Form("blocked", dtype or value.dtype))

    def reshape(self, tensor: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        """Return a view of ``tensor``; nothing is copied."""
        return self.emit(relax.op.reshape(tensor, shape), "view")

    def cast(self, tensor: relax.Expr, dtype: str) -> relax.Expr:
        """Return ``tensor`` in ``dtype``: an element-wise operator, which TVM fuses with the operators before or after
        it unless those are template kernels.
        """
        if str(tensor.ty.dtype) == dtype:
            return tensor
        return self.emit(relax.op.astype(tensor, dtype), f"as_{dtype}")

    def _in_form(self, value: LaidOutValue, wanted: Form) -> relax.Expr:
        if wanted not in value.forms:
            value.forms[wanted] = self._converted(value, _source(value, wanted), wanted)
        return value.forms[wanted]

    def _converted(self, value: LaidOutValue, source: Form, wanted: Form) -> relax.Expr:
        tensor = value.forms[source]
        if source.layout == wanted.layout:
            return self.cast(tensor, wanted.dtype)
        shape = value.shape if wanted.layout == "plain" else blocked_shape(value.shape, self.lanes)
        if self._same_bytes(value.shape):
            return self.cast(self.reshape(tensor, shape), wanted.dtype)
        batch, channels, height, width = value.shape
        image = (batch, channels, height, width)
        kernel = self.library.conversion(image, wanted.layout == "blocked", source.dtype, wanted.dtype)
        call = relax.call_tir(kernel, [tensor], out_ty=relax.TensorType(shape, wanted.dtype))
        return self.emit(call, wanted.layout)

    def _same_bytes(self, shape: tuple[int, ...]) -> bool:
        """True if the tensor has the same bytes in both layouts: one pixel of whole channel blocks."""
        return shape[2] * shape[3] == 1 and shape[1] % self.lanes == 0


def _source(value: LaidOutValue, wanted: Form) -> Form:
    """Return the best source of ``wanted``: preferably of the same dtype, then of the original dtype, then in the same
    layout.
    """
    return min(
        value.forms,
        key=lambda form: (form.dtype != wanted.dtype, form.dtype != value.dtype, form.layout != wanted.layout),
    )
