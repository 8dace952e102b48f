"""Requantisation of 32-bit sums to bytes with the rounding of ONNX Runtime's quantised operators, and its constants.

A byte stands for ``scale * (byte - zero point)``. The zero point of the data is folded into the bias, so that kernels
multiply bytes without conversion: ``sum (x - z) w = sum x w - z sum w``. The padding holds the zero point, and a kernel
computes nothing there: outputs whose window reaches into it have a separate bias without these weights
(:class:`EdgeClasses`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d, Dense, Epilogue
from schedules.contract.blocked_layout import blocks
from schedules.contract.template import Parameters
from schedules.contract.vector_operations import MULTIPLY_ADD, PACK_UINT8
from schedules.loops import emit
from schedules.loops.column_words import sums_quads
from schedules.loops.emit import Axis, Expr

# Positions in the first row of the constants, which holds values that are read once per tensor.
_LOW, _HIGH, _ZERO, _FLOOR, _FIXED, _OFFSET = range(6)
_OWN_LOW, _OWN_HIGH, _OWN_ZERO, _OWN_FIRST, _OWN_LAST, _RESIDUAL_RATIO, _PER_STEP = range(6, 13)
# Columns whose bytes are packed together (:func:`requantised_bytes`).
JOINED = PACK_UINT8.joined


@dataclass(frozen=True)
class EdgeClasses:
    """Classes of the outputs along an axis by the part of their window in the padding: near either end each output is a
    class, all between are one class.
    """

    axis: Axis
    outputs: int

    @property
    def _whole(self) -> list[int]:
        """Outputs whose window is inside the data."""
        taps = (0, self.axis.kernel - 1)
        return [o for o in range(self.outputs) if all(self.axis.inside(o, tap) for tap in taps)]

    @property
    def members(self) -> list[int]:
        """One output of each class, in order."""
        whole = self._whole
        if not whole:
            return list(range(self.outputs))
        return [*range(whole[0] + 1), *range(whole[-1] + 1, self.outputs)]

    def of(self, output: Expr) -> Expr:
        """Return the class of an output."""
        whole = self._whole
        if len(whole) == self.outputs:
            return 0
        if not whole:
            return output
        found = emit.smaller(output, whole[0])
        if whole[-1] + 1 < self.outputs:
            found = found + emit.larger(0, output - whole[-1])
        return emit.bind(found)


def edge_classes(conv: Conv2d) -> tuple[EdgeClasses, EdgeClasses]:
    """Return the edge classes along rows and along columns."""
    vertical = Axis(conv.height, conv.kernel[0], conv.stride[0], conv.padding[0], conv.dilation[0])
    horizontal = Axis(conv.width, conv.kernel[1], conv.stride[1], conv.padding[1], conv.dilation[1])
    return EdgeClasses(vertical, conv.out_height), EdgeClasses(horizontal, conv.out_width)


def requantisation_rows(layer: Conv2d | Dense, lanes: int) -> int:
    """Return the number of rows of V values that :func:`pack_requantisation` returns."""
    classes = 1
    if isinstance(layer, Conv2d):
        rows, columns = edge_classes(layer)
        classes = len(rows.members) * len(columns.members)
    return 1 + blocks(layer.weight_shape[0], lanes) * (_per_block(layer.epilogue) + classes)


def _per_block(epilogue: Epilogue) -> int:
    """Return the number of vectors per block that convert sums to steps: the multipliers; before an activation also the
    bias, and the slopes of a ``prelu``.
    """
    return 1 if epilogue.activation is None else 3 if epilogue.activation == "prelu" else 2


def pack_requantisation(
    layer: Conv2d | Dense, parameters: Parameters, lanes: int, firsts: Sequence[int] | None = None
) -> np.ndarray:
    """Return (rows, V): the values read once, the multipliers (before an activation each with the float bias, and the
    slopes of a ``prelu``), and the initial sums of each class of outputs; float32 that may hold the bits of int32.

    ``firsts``: the first output of each block, if they are not consecutive.
    """
    requantisation = parameters.requantisation
    assert requantisation is not None
    outputs = layer.weight_shape[0]
    count = blocks(outputs, lanes)
    packed = np.zeros((requantisation_rows(layer, lanes), lanes), np.float32)
    shared = packed[0]
    shared[_LOW], shared[_HIGH] = (bound - requantisation.zero for bound in (requantisation.low, requantisation.high))
    shared.view(np.int32)[_ZERO] = requantisation.zero
    shared.view(np.uint8)[4 * _FLOOR : 4 * _FLOOR + 4] = requantisation.low
    if requantisation.step:
        shared[_PER_STEP] = 1.0 / np.float32(requantisation.step)
    if (addition := requantisation.addition) is not None:
        shared[_OWN_LOW], shared[_OWN_HIGH] = addition.low - addition.zero, addition.high - addition.zero
        shared.view(np.int32)[_OWN_ZERO] = addition.zero - addition.offset
        shared[_OWN_FIRST], shared[_OWN_LAST] = addition.own_ratios
        shared[_RESIDUAL_RATIO], shared[_FIXED], shared[_OFFSET] = (
            addition.residual_ratio,
            addition.fixed,
            addition.offset,
        )
    multipliers, apart = [requantisation.multiplier.astype(np.float32)], _per_block(layer.epilogue)
    if apart > 1:
        multipliers.append(np.zeros(outputs, np.float32) if parameters.bias is None else parameters.bias)
    if parameters.slopes is not None:
        multipliers.append(parameters.slopes)
    starts = [block * lanes for block in range(count)] if firsts is None else list(firsts)
    for block, start in enumerate(starts):
        for index, vector in enumerate(multipliers):
            part = vector[start : start + lanes]
            packed[1 + apart * block + index, : len(part)] = part
        for index, vector in enumerate(_biases(layer, parameters)):
            part = vector[start : start + lanes]
            packed[1 + (apart + index) * count + block, : len(part)] = part
    return packed


def _biases(layer: Conv2d | Dense, parameters: Parameters) -> list[np.ndarray]:
    """Return the initial sums of each class, rows before columns: as float32 if the sums are float32, else as the bits
    of int32.
    """
    assert parameters.requantisation is not None
    weight = parameters.weight.astype(np.int64)
    bias = np.zeros(weight.shape[0], np.int64)
    if parameters.bias is not None and layer.epilogue.activation is None:
        bias = parameters.bias.astype(np.int64)
    zero = parameters.requantisation.input_zero
    if isinstance(layer, Dense):
        return [_bits(bias - zero * weight.sum(axis=1))]
    taps = weight.sum(axis=1)  # (out, KH, KW)
    found = []
    rows, columns = edge_classes(layer)
    for row in rows.members:
        inside_rows = [rows.axis.inside(row, tap) for tap in range(layer.kernel[0])]
        for column in columns.members:
            inside = [columns.axis.inside(column, tap) for tap in range(layer.kernel[1])]
            total = bias - zero * taps[:, inside_rows][:, :, inside].sum(axis=(1, 2))
            found.append(total.astype(np.float32) if _sums_floats(layer) else _bits(total))
    return found


def _sums_floats(layer: Conv2d) -> bool:
    """True if a layer of bytes is summed in FP32, which is exact for its few products."""
    return layer.is_depthwise and not sums_quads(layer)


def _bits(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int32).view(np.float32)


def initial_sums(layer: Conv2d | Dense, constants: Any, block: Expr, lanes: int, at: tuple[Expr, Expr] = (0, 0)) -> Any:
    """Return the bias of an output ``block``, the initial value of its sums; ``at``: row and column of the output."""
    if layer.dtype != "int8":
        return emit.load(constants, block, lanes=lanes)
    number: Expr = 0
    if isinstance(layer, Conv2d):
        rows, columns = edge_classes(layer)
        number = rows.of(at[0]) * len(columns.members) + columns.of(at[1])
    count = blocks(layer.weight_shape[0], lanes)
    vector = emit.load(constants, 1 + (_per_block(layer.epilogue) + number) * count + block, lanes=lanes)
    if isinstance(layer, Conv2d) and _sums_floats(layer):
        return vector
    return tirx.reinterpret(f"int32x{lanes}", vector)


def requantised(
    sums: Any, residual: Callable[[], Any] | None, constants: Any, block: Expr, lanes: int, epilogue: Epilogue
) -> Any:
    """Return ``sums`` of an output ``block`` (int32, or integers as float32) as int32 between 0 and 255, after the
    activation of ``epilogue``.
    """
    shared = _Shared(constants, lanes)
    value = _scaled(sums, residual, shared, block, epilogue)
    return emit.nearest(_within(value, shared.value(_LOW), shared.value(_HIGH)), lanes) + shared.whole(_ZERO)


def requantised_bytes(
    sums: Sequence[Any],
    residuals: Sequence[Callable[[], Any] | None],
    constants: Any,
    block: Expr,
    lanes: int,
    epilogue: Epilogue,
) -> Any:
    """Return :data:`JOINED` vectors of sums, requantised, one after the other as bytes. The bounds of bytes come from
    the saturating conversions; the lower bound of an activation is applied to all of them at once.
    """
    shared = _Shared(constants, lanes)
    high = shared.value(_HIGH)  # values above the int32 range would convert to the least integer
    values = [
        emit.nearest(tirx.min(_scaled(each, read, shared, block, epilogue), high), lanes)
        for each, read in zip(sums, residuals, strict=True)
    ]
    packed = emit.operation(PACK_UINT8, lanes, *values, shared.whole(_ZERO))
    floor = tirx.reinterpret(f"uint8x{JOINED * lanes}", shared.whole(_FLOOR))
    return tirx.max(packed, floor)


@dataclass(frozen=True)
class _Shared:
    """Constants that are read once per tensor, in every lane."""

    constants: Any
    lanes: int

    def value(self, place: int) -> Any:
        return emit.splat(self.constants[0, place], self.lanes)

    def whole(self, place: int) -> Any:
        return emit.splat(tirx.reinterpret("int32", self.constants[0, place]), self.lanes)


def _scaled(
    sums: Any, residual: Callable[[], Any] | None, shared: _Shared, block: Expr, epilogue: Epilogue
) -> Any:  # fmt: skip
    """Return ``sums`` in steps of the result before rounding, including the residual, if there is one."""
    lanes = shared.lanes
    value = sums if "float" in str(sums.ty.dtype) else sums.astype(f"float32x{lanes}")
    first = 1 + _per_block(epilogue) * block
    value = T.bind(value * emit.load(shared.constants, first, lanes=lanes))
    if epilogue.activation is not None:
        value = T.bind(value + emit.load(shared.constants, first + 1, lanes=lanes))
        if epilogue.activation == "prelu":
            slopes = emit.load(shared.constants, first + 2, lanes=lanes)
            value = emit.leaking(value, slopes, lanes)
        else:
            value = emit.activate(value, epilogue.activation, lanes, epilogue.slope)
        value = T.bind(value * shared.value(_PER_STEP))
    if residual is not None:
        own = emit.nearest(_within(value, shared.value(_OWN_LOW), shared.value(_OWN_HIGH)), lanes)
        own = T.bind((own + shared.whole(_OWN_ZERO)).astype(f"float32x{lanes}"))
        value = emit.operation(MULTIPLY_ADD, lanes, own, shared.value(_OWN_FIRST), shared.value(_FIXED))
        other = residual() - shared.value(_OFFSET)
        value = emit.operation(MULTIPLY_ADD, lanes, other, shared.value(_RESIDUAL_RATIO), value)
        value = T.bind(emit.operation(MULTIPLY_ADD, lanes, own, shared.value(_OWN_LAST), value))
    return value


def _within(value: Any, low: Any, high: Any) -> Any:
    return tirx.min(tirx.max(value, low), high)
