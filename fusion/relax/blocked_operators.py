"""Element-wise operators, enlargement and moves of channels computed directly on blocked tensors.

Lanes beyond the channels hold unspecified finite values. An operator qualifies only if it keeps them finite: a kernel
that reads them multiplies by packed zeros, and infinity times zero is not zero.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import relax, tirx

from fusion.relax.bindings import operator_name, static_shape
from fusion.relax.channel_moves import ChannelMove, ChannelMoves
from fusion.relax.layouts import LaidOutValue, Layouts
from fusion.relax.lowered_kernels import KernelLibrary
from schedules.contract.blocked_layout import block, blocked_shape

# Finite for every finite input of moderate size.
_BOUNDED = frozenset(
    f"relax.{name}"
    for name in (
        "nn.relu", "sigmoid", "tanh", "nn.silu", "nn.gelu", "nn.gelu_tanh", "nn.leakyrelu", "nn.softplus", "clip",
        "negative", "abs", "erf", "add", "subtract", "multiply", "maximum", "minimum",
    )
)  # fmt: skip
# These may divide by zero, overflow or leave their domain in unspecified lanes.
_UNBOUNDED = frozenset(
    f"relax.{name}" for name in ("divide", "exp", "log", "sqrt", "rsqrt", "square", "power", "floor", "ceil")
)


@dataclass(frozen=True, eq=False)
class BlockedOperators:
    """Rewrites calls.

    ``lookup``: the value of an original variable, ``constant``: the array behind an expression, ``moves``: what
    channels are copies of, ``wanted_blocked``: whether a kernel of ours reads a variable.
    """

    layouts: Layouts
    library: KernelLibrary
    lookup: Callable[[relax.Var], LaidOutValue | None]
    constant: Callable[[relax.Expr], np.ndarray | None]
    moves: ChannelMoves
    wanted_blocked: Callable[[relax.Var], bool]

    def rewrite(self, binding: relax.VarBinding) -> relax.Expr | None:
        """The call of ``binding`` on blocked operands; None where it does not apply or would not help."""
        call, wanted = binding.value, self.wanted_blocked(binding.var)
        shape = static_shape(call)
        name = operator_name(call)
        if shape is None or len(shape) != 4 or str(call.ty.dtype) != "float32":
            return None
        move = self.moves.of(binding.var)
        if move is not None:
            return self._gather(move, shape, wanted)
        if name == "relax.image.resize2d":
            return self._enlarge(call, shape, wanted)
        whole = shape[1] % self.layouts.lanes == 0
        if name not in _BOUNDED and not (whole and name in _UNBOUNDED):
            return None
        if not any(self._is_reason(argument, shape, wanted) for argument in call.args):
            return None
        operands = [self._operand(argument, shape) for argument in call.args]
        if any(operand is None for operand in operands):
            return None
        return relax.Call(call.op, [operand() for operand in operands if operand is not None], call.attrs)

    def _is_reason(self, argument: relax.Expr, shape: Sequence[int] | None, wanted: bool) -> bool:
        """An operand of the full ``shape`` that is blocked: alone, or also plain but the result is wanted blocked."""
        value = self.lookup(argument) if isinstance(argument, relax.Var) else None
        if value is None or value.blocked is None or (value.plain is not None and not wanted):
            return False
        return shape is None or tuple(value.shape) == tuple(shape)

    def _operand(self, argument: relax.Expr, shape: tuple[int, ...]) -> Callable[[], relax.Expr] | None:
        """A function that emits ``argument`` in a form that broadcasts over the blocked result; None: it has none."""
        if isinstance(argument, tirx.IntImm | tirx.FloatImm):
            return lambda: argument
        array = self.constant(argument)
        if array is not None:
            blocked = _blocked_constant(array, shape, self.layouts.lanes)
            return None if blocked is None else lambda: self.library.constant(blocked)
        value = self.lookup(argument) if isinstance(argument, relax.Var) else None
        if value is None or len(value.shape) != 4:
            return None
        if value.shape[1] == shape[1]:
            return lambda: self.layouts.blocked(value)
        # One channel for all: a last dimension of one broadcasts over the lanes.
        batch, _, height, width = value.shape
        return lambda: self.layouts.reshape(self.layouts.plain(value), (batch, 1, height, width, 1))

    def _enlarge(self, call: relax.Expr, shape: tuple[int, ...], wanted: bool) -> relax.Expr | None:
        """Every pixel so many times along both axes, where that is what resizing to the nearest one does."""
        data = call.args[0]
        value = self.lookup(data) if isinstance(data, relax.Var) else None
        factors = None if value is None else _whole_factors(call.attrs, value.shape, shape)
        if value is None or factors is None or not self._is_reason(data, None, wanted):
            return None
        enlarged = self.layouts.blocked(value)
        for axis, factor in zip((2, 3), factors, strict=True):
            enlarged = enlarged if factor == 1 else relax.op.repeat(enlarged, factor, axis)
        return enlarged

    def _gather(self, move: ChannelMove, shape: tuple[int, ...], wanted: bool) -> relax.Expr | None:
        """One kernel from the tensors that the channels come from, whatever is between; the old ones are not read."""
        values = [self.lookup(source) for source in move.sources]
        known = [value for value in values if value is not None]
        if len(known) < len(values) or not any(self._is_reason(source, None, wanted) for source in move.sources):
            return None
        kernel = self.library.channel_move([value.shape for value in known], move)
        result = relax.TensorType(blocked_shape(shape, self.layouts.lanes), "float32")
        return relax.call_tir(kernel, [self.layouts.blocked(value) for value in known], out_ty=result)


# Where the nearest source of an output pixel is the one that it is a copy of, for whole factors.
_COPIES = {("asymmetric", "floor"), ("half_pixel", "round_prefer_floor"), ("half_pixel", "round")}


def _whole_factors(attrs: Any, source: Sequence[int], result: Sequence[int]) -> tuple[int, int] | None:
    """How many times each row and each column is repeated; ``None`` if resizing does anything else."""
    way = (attrs.coordinate_transformation_mode, attrs.rounding_method)
    if len(source) != 4 or attrs.layout != "NCHW" or attrs.method != "nearest_neighbor" or way not in _COPIES:
        return None
    if any(new % old for old, new in zip(source[2:], result[2:], strict=True)) or source[:2] != result[:2]:
        return None
    return result[2] // source[2], result[3] // source[3]


def _blocked_constant(array: np.ndarray, shape: tuple[int, ...], lanes: int) -> np.ndarray | None:
    """``array``, which broadcasts over NCHW ``shape``, so that it broadcasts over the blocked result."""
    if array.size == 1:
        return array.reshape(())
    if array.ndim > 4 or array.dtype != np.float32:
        return None
    aligned = array.reshape((1,) * (4 - array.ndim) + array.shape)
    if aligned.shape[1] == 1 and shape[1] != 1:
        return aligned.reshape((*aligned.shape, 1))
    return block(aligned, lanes)
