"""Linear resizing of byte images with the rounding of ONNX Runtime's Resize of mode ``linear``.

It multiplies each of four pixels by the product of two weights and adds the results one after the other, in FP32. In a
Resize between DequantizeLinear and QuantizeLinear the bytes are dequantised first and the sum is quantised; a Resize
that reads bytes directly truncates the sum.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import te, tirx

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
COORDINATES = frozenset(_POSITIONS)
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


def resized(data: np.ndarray, step: ByteResize, factors: np.ndarray) -> np.ndarray:
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


def workload(step: ByteResize) -> list[Any]:
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
