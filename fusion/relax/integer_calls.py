"""Integer operators in Relax: calls of the functions that specify them, tagged with the operator.

The function of an integer layer is :func:`schedules.contract.operator_workload.workload` of the operator, so that a
layer without a kernel is compiled as any other function and gives the same bytes. It is compiled alone: TVM cannot
fuse several of them.

Operators on uint8 tensors are "byte steps". An element-wise function of one byte tensor is a table of 256 entries, or
one such table per channel. Two byte tensors are added or multiplied, and pixels are averaged over the image or over
windows, with the rounding of ONNX Runtime's QLinearAdd, QLinearMul, QLinearGlobalAveragePool and QLinearAveragePool.

Images are resized with the rounding of ONNX Runtime's Resize of mode ``linear``: it multiplies each of four pixels by
the product of two weights and adds the results one after the other, in FP32. In a Resize between DequantizeLinear and
QuantizeLinear the bytes are dequantised first and the sum is quantised; a Resize that reads bytes directly truncates
the sum.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import tvm
from tvm import relax, te, tirx

from costmodel.operators.any_operator import from_record, to_record
from costmodel.operators.layers import Conv2d, Dense, Pool2d
from fusion.relax.bindings import OPAQUE, operator_name
from schedules.contract.operator_workload import window_count, workload

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


# Positions in the input image of ``size``, in FP32, of output pixels x: function of (x, size, result, scale).
_POSITIONS: dict[str, Callable[[np.ndarray, np.float32, int, np.float32], np.ndarray]] = {
    "half_pixel": lambda x, size, result, scale: (x + np.float32(0.5)) / scale - np.float32(0.5),
    "pytorch_half_pixel": lambda x, size, result, scale: (
        (x + np.float32(0.5)) / scale - np.float32(0.5) if result > 1 else np.float32(0) * x
    ),
    "align_corners": lambda x, size, result, scale: (
        x * (size - np.float32(1)) / np.float32(result - 1) if result > 1 else np.float32(0) * x
    ),
    "asymmetric": lambda x, size, result, scale: x / scale,
}
RESIZE_COORDINATES = frozenset(_POSITIONS)
# Number of factors of the step: zero point and scale of the data, scale and zero point of the result, its bounds.
RESIZE_FACTORS = 6


@dataclass(frozen=True)
class ByteResize:
    """Linear resize: (data of NCHW ``shape``, the four arrays of :meth:`tables`, factors) -> the image at ``size``."""

    shape: tuple[int, int, int, int]
    # Rows and columns of the result.
    size: tuple[int, int]
    # Ratios of result to input size along rows and columns, as the file states them.
    scales: tuple[float, float]
    # One of :data:`COORDINATES`.
    coordinates: str
    # Round towards zero instead of to nearest.
    cut_off: bool = False

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of the result."""
        return (*self.shape[:2], *self.size)

    def tables(self) -> list[np.ndarray]:
        """Return pixels of rows and of columns, int32, and weights of rows and of columns, float32; each
        (2, extent).
        """
        found = [self._taps(axis) for axis in (0, 1)]
        return [*(pixels for pixels, _ in found), *(weights for _, weights in found)]

    def _taps(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        size, result = self.shape[2 + axis], self.size[axis]
        x, scale = np.arange(result, dtype=np.float32), np.float32(self.scales[axis])
        position = _POSITIONS[self.coordinates](x, np.float32(size), result, scale)
        position = np.clip(position, np.float32(0), np.float32(size - 1)).astype(np.float32)
        first = position.astype(np.int32)
        pixels = np.array([first, np.minimum(first + 1, size - 1)], np.int32)
        weights = np.abs(position - pixels[::-1].astype(np.float32)).astype(np.float32)
        weights[:, pixels[0] == pixels[1]] = 0.5
        return pixels, weights


def compute_resize(data: np.ndarray, step: ByteResize, factors: np.ndarray) -> np.ndarray:
    """Compute a :class:`ByteResize` in NumPy: the specification. ``v = (byte - f0) f1`` is weighted and summed pixel by
    pixel; the sum over ``f2`` is rounded to nearest, ties to even (with ``cut_off``: the sum is rounded towards zero),
    ``f3`` is added, and the result is clipped to ``f4 .. f5``.
    """
    zero, scale, result_scale, result_zero, low, high = (np.float32(each) for each in factors)
    rows, columns, down, across = step.tables()
    values = (data.astype(np.float32) - zero) * scale
    total = np.zeros(step.result, np.float32)
    for y, x in _ORDER:
        weights = across[x][None, :] * down[y][:, None]
        total = total + weights * values[:, :, rows[y]][:, :, :, columns[x]]
    steps = np.trunc(total) if step.cut_off else np.rint((total / result_scale).astype(np.float32))
    return np.clip(steps + result_zero, low, high).astype(np.uint8)


# Order of summation: upper left, upper right, lower left, lower right.
_ORDER = ((0, 0), (0, 1), (1, 0), (1, 1))


def resize_workload(step: ByteResize) -> list[Any]:
    """Return the arguments and the result as tensor expressions."""
    data = te.placeholder(step.shape, "uint8", name="data")
    names = ("rows", "columns", "down", "across")
    tables = [
        te.placeholder(table.shape, str(table.dtype), name=name)
        for name, table in zip(names, step.tables(), strict=True)
    ]
    factors = te.placeholder((RESIZE_FACTORS,), "float32", name="factors")
    rows, columns, down, across = tables

    def pixel(n: Any, c: Any, y: Any, x: Any) -> Any:
        total: Any = tirx.const(0.0, "float32")
        for row, column in _ORDER:
            value = (data[n, c, rows[row, y], columns[column, x]].astype("float32") - factors[0]) * factors[1]
            total = total + across[column, x] * down[row, y] * value
        whole = tirx.trunc(total) if step.cut_off else tirx.nearbyint(total / factors[2])
        return tirx.min(tirx.max(whole + factors[3], factors[4]), factors[5]).astype("uint8")

    return [data, *tables, factors, te.compute(step.result, pixel, name="resized")]


_STEP = "fusion.byte_step"
# Sums of at most this many bytes are exact in FP32.
MOST_PIXELS = 2**24 // 255
PairKind: TypeAlias = Literal["add", "multiply"]


@dataclass(frozen=True)
class ByteTable:
    """Table look-up: (data of ``shape``, table of 256) -> the entry of each byte of the data."""

    shape: tuple[int, ...]
    # Data is NCHW, and the tables, one per channel, have shape (C, 256).
    per_channel: bool = False

    @property
    def table(self) -> tuple[int, ...]:
        """Shape of the table."""
        return (self.shape[1], 256) if self.per_channel else (256,)

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of the result."""
        return self.shape


@dataclass(frozen=True)
class BytePair:
    """Sum or product: (left, right, factors of :func:`addition_factors` or :func:`product_factors`) -> result of the
    ``shape`` of left.
    """

    kind: PairKind
    shape: tuple[int, ...]
    # Right is (N, C, 1, 1) and left (N, C, H, W); products only.
    per_channel: bool = False

    @property
    def right(self) -> tuple[int, ...]:
        """Shape of the right operand."""
        return (*self.shape[:2], 1, 1) if self.per_channel else self.shape

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of the result."""
        return self.shape


@dataclass(frozen=True)
class ByteMean:
    """Global average: (data of NCHW ``shape``, factors of :func:`mean_factors`) -> the mean over the pixels, (N, C, 1,
    1).
    """

    shape: tuple[int, int, int, int]

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of the result."""
        return (*self.shape[:2], 1, 1)


@dataclass(frozen=True)
class ByteWindow:
    """Average pooling: (data of NCHW ``shape``, factors of :func:`window_factors`) -> the mean over windows."""

    shape: tuple[int, int, int, int]
    kernel: tuple[int, int]
    stride: tuple[int, int]
    # Top, left, bottom, right; padded pixels add nothing to the sum.
    padding: tuple[int, int, int, int]
    # Divide by the size of the window if true, else by the number of its pixels inside the image.
    counts_padding: bool

    @property
    def pool(self) -> Pool2d:
        """Pooling as an operator of the cost model."""
        batch, channels, height, width = self.shape
        window = (self.kernel, self.stride, self.padding, self.counts_padding)
        return Pool2d("average", batch, channels, height, width, *window, dtype="int8")

    @property
    def result(self) -> tuple[int, ...]:
        """Shape of the result."""
        return self.pool.output_shape


ByteStep: TypeAlias = ByteTable | BytePair | ByteMean | ByteWindow | ByteResize


@dataclass(frozen=True)
class Quantisation:
    """Quantisation of a tensor: a byte stands for ``scale * (byte - zero)``."""

    scale: np.float32
    zero: int
    # Bounds of the bytes of a result.
    low: int = 0
    high: int = 255
    # Number that was added to signed bytes to make them unsigned.
    offset: int = 0

    @property
    def is_whole(self) -> bool:
        """True if the bounds cut nothing off."""
        return (self.low, self.high) == (0, 255)


def addition_factors(left: Quantisation, right: Quantisation, result: Quantisation) -> np.ndarray:
    """Return the factors of :func:`compute_pair` for a sum: two ratios of scales, the constant term, bounds, 0, and the
    offset.
    """
    offset = _common_offset(left, right, result)
    first, second = (np.float32(each.scale / result.scale) for each in (left, right))
    zeros = _multiply_add(np.float32(left.zero - offset), first, second * np.float32(right.zero - offset))
    bounds = (result.low - offset, result.high - offset)
    return np.array([first, second, np.float32(result.zero - offset) - zeros, *bounds, 0.0, offset], np.float32)


def product_factors(left: Quantisation, right: Quantisation, result: Quantisation) -> np.ndarray:
    """Return the factors of :func:`compute_pair` for a product: zero points, result zero point, bounds, ratio of
    scales, offset.
    """
    offset = _common_offset(left, right, result)
    ratio = np.float32(left.scale * right.scale) / result.scale
    bounds = (result.low - offset, result.high - offset)
    return np.array([left.zero, right.zero, result.zero - offset, *bounds, ratio, offset], np.float32)


def _common_offset(*quantisations: Quantisation) -> int:
    """Return the offset that all quantisations share, or 0. Signed bytes are computed as such: FP32 would round their
    sums otherwise.
    """
    offsets = {each.offset for each in quantisations}
    return offsets.pop() if len(offsets) == 1 else 0


def mean_factors(data: Quantisation, result: Quantisation, pixels: int) -> np.ndarray:
    """Return the factors of :func:`compute_mean`: sum of the zero points, ratio of scales, result zero point, bounds
    relative to it.
    """
    ratio = data.scale / np.float32(result.scale * np.float32(pixels))
    bounds = (result.low - result.zero, result.high - result.zero)
    return np.array([data.zero * pixels, ratio, result.zero, *bounds], np.float32)


def window_factors(data: Quantisation, result: Quantisation) -> np.ndarray:
    """Return the factors of :func:`compute_window`: zero point and scale of the data, scale and zero point of the
    result, bounds, and the offset.
    """
    offset = _common_offset(data, result)
    bounds = (result.low - offset, result.high - offset)
    return np.array([data.zero, data.scale, result.scale, result.zero - offset, *bounds, offset], np.float32)


def resize_factors(data: Quantisation, result: Quantisation) -> np.ndarray:
    """Return the factors of :func:`compute_resize`: zero point and scale of the data, scale and zero
    point of the result, and its bounds.
    """
    return np.array([data.zero, data.scale, result.scale, result.zero, result.low, result.high], np.float32)


def compute_pair(kind: PairKind, left: np.ndarray, right: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Compute a :class:`BytePair` in NumPy: the specification.

    After subtraction of the offset ``f6`` from the bytes, a sum is ``left f0 + (right f1 + f2)``, each multiply-add
    rounded once; a product is ``(left - f0) (right - f1) f5``, rounded, plus ``f2``, rounded. Either is clipped to ``f3
    .. f4``, rounded to nearest, ties to even, and the offset is added.
    """
    first, second, fixed, low, high, ratio, offset = (np.float32(each) for each in factors)
    a, b = left.astype(np.float32), right.astype(np.float32)
    if kind == "add":
        value = _multiply_add(a - offset, first, _multiply_add(b - offset, second, fixed))
    else:
        value = ((a - first) * (b - second) * ratio).astype(np.float32) + fixed
    return (np.rint(np.clip(value, low, high)) + offset).astype(np.uint8)


def compute_mean(data: np.ndarray, factors: np.ndarray) -> np.ndarray:
    """Compute a :class:`ByteMean` in NumPy: ``(sum - f0) f1`` clipped to ``f3 .. f4``, rounded to
    nearest, plus ``f2``.
    """
    zeros, ratio, zero, low, high = (np.float32(each) for each in factors)
    sums = data.astype(np.int64).sum(axis=(2, 3), keepdims=True)
    value = (sums - int(zeros)).astype(np.float32) * ratio
    return (np.rint(np.clip(value, low, high)) + zero).astype(np.uint8)


def compute_window(data: np.ndarray, step: ByteWindow, factors: np.ndarray) -> np.ndarray:
    """Compute a :class:`ByteWindow` in NumPy: ``(byte - f0) f1`` is summed pixel by pixel, row by row; the sum is
    divided by the number of pixels and by ``f2``, and ``f3`` is added, each operation rounded to FP32. The result is
    clipped to ``f4 .. f5``, rounded to nearest, ties to even, and the offset ``f6`` is added.
    """
    zero, scale, result_scale, result_zero, low, high, offset = (np.float32(each) for each in factors)
    top, left, bottom, right = step.padding
    around = ((0, 0), (0, 0), (top, bottom), (left, right))
    values = np.pad((data.astype(np.float32) - zero) * scale, around)
    inside = np.pad(np.ones(data.shape[2:], np.float32), around[2:], constant_values=float(step.counts_padding))
    sums, counts = np.zeros(step.result, np.float32), np.zeros(step.result[2:], np.float32)
    for tap in np.ndindex(*step.kernel):
        rows, columns = (
            slice(first, first + (count - 1) * stride + 1, stride)
            for first, count, stride in zip(tap, step.result[2:], step.stride, strict=True)
        )
        sums += values[:, :, rows, columns]
        counts += inside[rows, columns]
    value = sums / counts / result_scale + result_zero
    return (np.rint(np.clip(value, low, high)) + offset).astype(np.uint8)


def _multiply_add(left: np.ndarray | np.float32, right: np.float32, added: np.ndarray | np.float32) -> np.ndarray:
    """Return ``left * right + added`` rounded once: products of FP32 are exact in FP64."""
    return (np.asarray(left, np.float64) * np.float64(right) + np.asarray(added, np.float64)).astype(np.float32)


def byte_call(builder: relax.BlockBuilder, step: ByteStep, arguments: Sequence[relax.Expr]) -> relax.Expr:
    """Return a call of ``step`` on its arguments; adds the function to the module of ``builder``."""
    function = (
        te.create_prim_func(_workload(step))
        .without_attr("global_symbol")
        .with_attr(_STEP, json.dumps([type(step).__name__, asdict(step)]))
    )
    variable = builder.add_func(function.with_attr("op_pattern", OPAQUE), _NAMES[type(step)])
    return relax.call_tir(variable, list(arguments), out_ty=relax.TensorType(step.result, "uint8"))


def step_of(mod: tvm.IRModule, expr: relax.Expr) -> tuple[ByteStep, list[relax.Expr]] | None:
    """Return the byte step that a call computes, and its arguments; None for any other expression."""
    if operator_name(expr) != "relax.call_tir":
        return None
    function = mod[expr.args[0]]
    if not isinstance(function, tirx.PrimFunc) or _STEP not in (function.attrs or {}):
        return None
    kind, fields = json.loads(str(function.attrs[_STEP]))
    fields = {name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()}
    return _STEPS[kind](**fields), list(expr.args[1].fields)


# Number of factors of each step.
FACTORS = {BytePair: 7, ByteMean: 5, ByteWindow: 7, ByteResize: RESIZE_FACTORS}
_NAMES = {
    ByteTable: "byte_table", BytePair: "byte_pair", ByteMean: "byte_mean", ByteWindow: "byte_window",
    ByteResize: "byte_resize",
}  # fmt: skip
_STEPS: dict[str, Any] = {step.__name__: step for step in _NAMES}


def _workload(step: ByteStep) -> list[Any]:
    """Return the arguments and the result of ``step`` as tensor expressions."""
    if isinstance(step, ByteResize):
        return resize_workload(step)
    data = te.placeholder(step.shape, "uint8", name="data")
    if isinstance(step, ByteTable):
        table = te.placeholder(step.table, "uint8", name="table")

        def entry(*at: Any) -> Any:
            place = data[at].astype("int32")
            return table[at[1], place] if step.per_channel else table[place]

        return [data, table, te.compute(step.shape, entry, name="entries")]
    factors = te.placeholder((FACTORS[type(step)],), "float32", name="factors")
    if isinstance(step, BytePair):
        right = te.placeholder(step.right, "uint8", name="right")

        def element(*at: Any) -> Any:
            a = data[at].astype("float32")
            b = right[(at[0], at[1], 0, 0) if step.per_channel else at].astype("float32")
            if step.kind == "add":
                value = (a - factors[6]) * factors[0] + ((b - factors[6]) * factors[1] + factors[2])
            else:
                value = (a - factors[0]) * (b - factors[1]) * factors[5] + factors[2]
            return _byte(value, factors[3], factors[4], factors[6])

        return [data, right, factors, te.compute(step.shape, element, name="paired")]
    if isinstance(step, ByteWindow):
        return [data, factors, _averaged_windows(step, data, factors)]
    y, x = (te.reduce_axis((0, size), name=name) for size, name in zip(step.shape[2:], "yx", strict=True))
    sums = te.compute(step.result, lambda n, c, *_: te.sum(data[n, c, y, x].astype("int32"), axis=[y, x]), name="sums")

    def mean(*at: Any) -> Any:
        value = (sums[at] - factors[0].astype("int32")).astype("float32") * factors[1]
        return _byte(value, factors[3], factors[4], factors[2])

    return [data, factors, te.compute(step.result, mean, name="mean")]


def _averaged_windows(step: ByteWindow, data: Any, factors: Any) -> Any:
    pool, (top, left, _, _) = step.pool, step.padding
    batch, channels, height, width = step.shape
    ky, kx = (te.reduce_axis((0, size), name=name) for size, name in zip(step.kernel, ("ky", "kx"), strict=True))

    def value(n: Any, c: Any, y: Any, x: Any) -> Any:
        return (data[n, c, y, x].astype("float32") - factors[0]) * factors[1]

    def around(n: Any, c: Any, y: Any, x: Any) -> Any:
        inside = tirx.all(y >= top, y < top + height, x >= left, x < left + width)
        return tirx.if_then_else(inside, values[n, c, y - top, x - left], tirx.const(0.0, "float32"))

    values = te.compute(step.shape, value, name="values")
    rows, columns = height + top + step.padding[2], width + left + step.padding[3]
    padded = te.compute((batch, channels, rows, columns), around, name="padded")
    sums = te.compute(
        step.result,
        lambda n, c, y, x: te.sum(padded[n, c, y * step.stride[0] + ky, x * step.stride[1] + kx], axis=[ky, kx]),
        name="sums",
    )

    def mean(n: Any, c: Any, y: Any, x: Any) -> Any:
        count = window_count(pool, y, x).astype("float32")
        return _byte(sums[n, c, y, x] / count / factors[2] + factors[3], factors[4], factors[5], factors[6])

    return te.compute(step.result, mean, name="mean")


def _byte(value: Any, low: Any, high: Any, added: Any) -> Any:
    return (tirx.nearbyint(tirx.min(tirx.max(value, low), high)) + added).astype("uint8")


def size_of(step: ByteStep) -> int:
    """Return the number of bytes of the result."""
    return math.prod(step.result)
