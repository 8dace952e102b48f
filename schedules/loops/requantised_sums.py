"""Requantisation of 32-bit sums to bytes, with the rounding of ONNX Runtime's quantised operators, and its constants.

A byte stands for ``scale * (byte - zero point)``. The zero point of the data is folded into the bias, so that kernels
multiply unmodified bytes: ``sum (x - z) w = sum x w - z sum w``. Padding has the value of the zero point, and kernels
skip it: outputs whose window extends into it have a separate bias without these weights (:class:`EdgeClasses`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from costmodel.operators.layers import Conv2d, Dense, Epilogue
from schedules.contract.template import Parameters, blocks
from schedules.contract.vector_operations import MULTIPLY_ADD, PACK_UINT8
from schedules.loops import emit
from schedules.loops.dot_products import sums_quads
from schedules.loops.emit import Axis, Expr

# Indices in the first row of the constants, which has the values per tensor.
_LOW, _HIGH, _ZERO, _FLOOR, _FIXED, _OFFSET = range(6)
_OWN_LOW, _OWN_HIGH, _OWN_ZERO, _OWN_FIRST, _OWN_LAST, _RESIDUAL_RATIO, _PER_STEP = range(6, 13)
# Number of columns whose bytes are packed together (:func:`requantised_bytes`).
JOINED = PACK_UINT8.joined


@dataclass(frozen=True)
class EdgeClasses:
    """Classes of outputs along an axis by the part of their window in the padding.

    Near either end each output is a class, all between are one.
    """

    axis: Axis
    outputs: int

    @property
    def _whole(self) -> list[int]:
        """Outputs whose window is completely in the data."""
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
        """Class of an output."""
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
    """Classes along rows and along columns."""
    vertical = Axis(conv.height, conv.kernel[0], conv.stride[0], conv.padding[0], conv.dilation[0])
    horizontal = Axis(conv.width, conv.kernel[1], conv.stride[1], conv.padding[1], conv.dilation[1])
    return EdgeClasses(vertical, conv.out_height), EdgeClasses(horizontal, conv.out_width)


def requantisation_rows(layer: Conv2d | Dense, lanes: int) -> int:
    """Number of rows of V values made by :func:`pack_requantisation`."""
    classes = 1
    if isinstance(layer, Conv2d):
        rows, columns = edge_classes(layer)
        classes = len(rows.members) * len(columns.members)
    return 1 + blocks(layer.weight_shape[0], lanes) * (_per_block(layer.epilogue) + classes)


def _per_block(epilogue: Epilogue) -> int:
    """Vectors per block for scaling sums: multipliers; with an activation also the bias, and the slopes of a
    ``prelu``.
    """
    return 1 if epilogue.activation is None else 3 if epilogue.activation == "prelu" else 2


def pack_requantisation(
    layer: Conv2d | Dense, parameters: Parameters, lanes: int, firsts: Sequence[int] | None = None
) -> np.ndarray:
    """Pack the constants of a requantisation, (rows, V) of float32 that may hold the bits of 32-bit integers.

    They are: values per tensor; multipliers (with an activation followed by float biases and the slopes of a ``prelu``
    per block); initial sums of each class of outputs. ``firsts``: first output of each block, if blocks are not
    consecutive.
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
    """Initial sums of each class, rows before columns: float32 if summed in float32, otherwise integer bits."""
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
    """True if a layer of bytes is summed in FP32, where sums of so few products are exact."""
    return layer.is_depthwise and not sums_quads(layer)


def _bits(values: np.ndarray) -> np.ndarray:
    return values.astype(np.int32).view(np.float32)


def initial_sums(layer: Conv2d | Dense, constants: Any, block: Expr, lanes: int, at: tuple[Expr, Expr] = (0, 0)) -> Any:
    """Initial sums (bias) of an output ``block``; ``at``: row and column of the output."""
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


def emit_requantised(
    sums: Any, residual: Callable[[], Any] | None, constants: Any, block: Expr, lanes: int, epilogue: Epilogue
) -> Any:
    """``sums`` (int32, or integers as float32) of an output ``block`` as int32 between 0 and 255, after the
    activation.
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
    """Requantise :data:`JOINED` vectors and concatenate them as bytes.

    Bounds of bytes are those of the saturating conversions; the lower bound of an activation is applied to all at once.
    """
    shared = _Shared(constants, lanes)
    high = shared.value(_HIGH)  # values above the integer range would become the smallest integer
    values = [
        emit.nearest(tirx.min(_scaled(each, read, shared, block, epilogue), high), lanes)
        for each, read in zip(sums, residuals, strict=True)
    ]
    packed = emit.operation(PACK_UINT8, lanes, *values, shared.whole(_ZERO))
    floor = tirx.reinterpret(f"uint8x{JOINED * lanes}", shared.whole(_FLOOR))
    return tirx.max(packed, floor)


@dataclass(frozen=True)
class _Shared:
    """Constants per tensor, broadcast to every lane."""

    constants: Any
    lanes: int

    def value(self, place: int) -> Any:
        return emit.splat(self.constants[0, place], self.lanes)

    def whole(self, place: int) -> Any:
        return emit.splat(tirx.reinterpret("int32", self.constants[0, place]), self.lanes)


def _scaled(
    sums: Any, residual: Callable[[], Any] | None, shared: _Shared, block: Expr, epilogue: Epilogue
) -> Any:  # fmt: skip
    """``sums`` in steps of the result before rounding, including the residual if there is one."""
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
