"""Kernels on blocked images whose input pixels come from tables: resizing to the nearest pixel or between two or
four, padding with the image's own pixels, and slices of rows and columns; and the weights of ONNX's Resize along one
axis as a matrix, for the forms that neither TVM's operator nor a table supports.

Shapes are known at compile time, so that every convention of coordinates is a table of positions and weights.
Coordinates of a matrix use the scale in the file, which is not the ratio of the two sizes if the size of the result
was rounded down; with ``antialias`` the filter is as wide as the distance between samples. Outside the image the
filter reads the outermost pixels, or nothing (``exclude``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Signature, TensorSpec, blocked_shape, blocks
from schedules.loops import emit

# Starting a parallel region costs about as much as moving this many values on one core.
_SERIAL_VALUES = 8192
_TASKS_PER_THREAD = 4

# Positions in the input image of ``size`` of pixels x of a result of the given size; ``scale``: their ratio, or the
# scale stated in a file.
COORDINATES: dict[str, Callable[[np.ndarray, int, int, float], np.ndarray]] = {
    "half_pixel": lambda x, size, result, scale: (x + 0.5) / scale - 0.5,
    "pytorch_half_pixel": lambda x, size, result, scale: (x + 0.5) / scale - 0.5 if result > 1 else 0.0 * x,
    "align_corners": lambda x, size, result, scale: x * ((size - 1) / (result - 1)) if result > 1 else 0.0 * x,
    "asymmetric": lambda x, size, result, scale: x / scale,
    "tf_half_pixel_for_nn": lambda x, size, result, scale: (x + 0.5) / scale,
}
ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round": lambda x: np.floor(x + 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


@dataclass(frozen=True)
class Resize2d:
    """Resize of an NCHW image of ``shape`` to ``size`` (rows, columns). Names as in ONNX and TVM."""

    shape: tuple[int, int, int, int]
    size: tuple[int, int]
    # ``nearest_neighbor`` with ``rounding``; ``linear`` between two pixels along each axis; ``cubic`` between four, by
    # Keys' polynomial of ``cubic_alpha``, with pixels outside the image left out (``cubic_exclude``) or replaced by the
    # outermost.
    method: str
    # Mapping of positions of the result to the image.
    coordinates: str
    rounding: str = ""
    cubic_alpha: float = -0.75
    cubic_exclude: bool = False

    @property
    def is_known(self) -> bool:
        """True if there is a table for the convention."""
        known = self.method in ("linear", "cubic") or (self.method == "nearest_neighbor" and self.rounding in ROUNDINGS)
        return known and self.coordinates in COORDINATES

    def taps(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """Return positions, int32, and weights, float32, both (taps, extent), along rows or columns."""
        size, result = self.shape[2 + axis], self.size[axis]
        position = COORDINATES[self.coordinates](np.arange(result, dtype=np.float64), size, result, result / size)
        # Rounding noise must not move a position that is on a pixel, or half-way between two.
        position = np.round(position, 6)
        if self.method == "nearest_neighbor":
            taps = ROUNDINGS[self.rounding](position)[None]
            weights = np.ones((1, result))
        elif self.method == "linear":
            first = np.floor(position)
            taps = np.array([first, first + 1])
            weights = np.array([1 - (position - first), position - first])
        else:
            taps = np.floor(position) + np.arange(-1, 3)[:, None]
            weights = keys_cubic(position - taps, self.cubic_alpha)
            if self.cubic_exclude:
                weights = np.where((taps >= 0) & (taps < size), weights, 0.0)
                weights /= weights.sum(axis=0)
        return np.clip(taps, 0, size - 1).astype(np.int32), weights.astype(np.float32)


@dataclass(frozen=True)
class MirrorPad2d:
    """Padding of an NCHW image of ``shape`` with its own pixels."""

    shape: tuple[int, int, int, int]
    # Top, left, bottom, right.
    padding: tuple[int, int, int, int]
    # ``reflect`` about the outermost pixels, or ``replicate`` them.
    mode: str

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        top, left, bottom, right = self.padding
        return self.shape[2] + top + bottom, self.shape[3] + left + right

    def taps(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """Return positions and weights as :meth:`Resize2d.taps` does."""
        widths = (self.padding[axis], self.padding[2 + axis])
        positions = np.pad(np.arange(self.shape[2 + axis]), widths, "edge" if self.mode == "replicate" else "reflect")
        return positions[None].astype(np.int32), np.ones((1, len(positions)), np.float32)


@dataclass(frozen=True)
class Slice2d:
    """Slice of an NCHW image of ``shape`` with the given ``rows`` and ``columns``."""

    shape: tuple[int, int, int, int]
    rows: range
    columns: range

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        return len(self.rows), len(self.columns)

    def taps(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """Return positions and weights as :meth:`Resize2d.taps` does."""
        taken = (self.rows, self.columns)[axis]
        return np.array([taken], np.int32), np.ones((1, len(taken)), np.float32)


PixelTable: TypeAlias = Resize2d | MirrorPad2d | Slice2d


def resize_tables(resize: PixelTable) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Return the constants of :func:`resize_kernel`: positions of rows and of columns, then their weights, except for
    one pixel per output.
    """
    (rows, down), (columns, across) = resize.taps(0), resize.taps(1)
    return [rows, columns], [down, across] if len(rows) > 1 else []


def resize_kernel(resize: PixelTable, cpu: CpuTarget, dtype: str = "float32") -> tirx.PrimFunc:
    """Build the kernel: (data, row positions, column positions, [row weights, column weights], result), images blocked
    and of ``dtype``.
    """
    lanes, (batch, channels, *_) = cpu.lanes, resize.shape
    rows, columns = resize.size
    positions, weights = resize_tables(resize)
    tables = [TensorSpec(table.shape, dtype=str(table.dtype)) for table in (*positions, *weights)]
    data = TensorSpec(blocked_shape(resize.shape, lanes), "blocked", dtype)
    output = TensorSpec(blocked_shape((batch, channels, rows, columns), lanes), "blocked", dtype)
    count = blocks(channels, lanes)
    bands = min(rows, max(1, -(-_TASKS_PER_THREAD * cpu.threads // (batch * count))))
    band = -(-rows // bands)
    serial = math.prod(output.shape) < _SERIAL_VALUES

    def body(source: Any, *rest: Any) -> None:
        *given, result = rest
        tasks = batch * count * bands
        with emit.loop(tasks) if serial else emit.tasks(tasks) as task:
            image, part = emit.quotient(task, count * bands), emit.remainder(task, count * bands)
            block, first = emit.bind(emit.quotient(part, bands)), emit.bind(emit.remainder(part, bands) * band)
            with emit.span(first, emit.bind(emit.smaller(first + band, rows))) as row:
                lines = [T.bind(given[0][tap, row]) for tap in range(positions[0].shape[0])]
                with emit.loop(columns) as column:
                    places = [T.bind(given[1][tap, column]) for tap in range(positions[1].shape[0])]
                    pixels = [[emit.load(source, image, block, y, x, lanes=lanes) for x in places] for y in lines]
                    value = pixels[0][0]
                    if weights:
                        across = [_weighted(line, given[3], column, lanes) for line in pixels]
                        value = _weighted(across, given[2], row, lanes)
                    emit.store(result, value, image, block, row, column, lanes=lanes)

    return emit.kernel("resize", Signature(data, tuple(tables), None, output), body)


def _weighted(values: Sequence[Any], weights: Any, position: Any, lanes: int) -> Any:
    """Return the weighted sum of one value per tap; of two, the first plus a fraction of their difference, exact if
    both are equal.
    """
    first = T.bind(values[0])
    if len(values) == 2:
        return T.bind(first + (values[1] - first) * emit.splat(weights[1, position], lanes))
    total = first * emit.splat(weights[0, position], lanes)
    for tap in range(1, len(values)):
        total = total + values[tap] * emit.splat(weights[tap, position], lanes)
    return T.bind(total)


def keys_cubic(distance: np.ndarray, alpha: float) -> np.ndarray:
    """Evaluate the cubic convolution kernel (Keys, 1981) at ``distance`` in pixels; zero from two on."""
    distance = np.abs(distance)
    near = ((alpha + 2) * distance - (alpha + 3)) * distance**2 + 1
    far = ((distance - 5) * distance + 8) * distance * alpha - 4 * alpha
    return np.where(distance <= 1, near, np.where(distance < 2, far, 0.0))


def _symmetric(x: np.ndarray, size: int, result: int, scale: float) -> np.ndarray:
    """Half-pixel coordinates about the middle of the image, which a rounded size would move."""
    adjustment = result / (scale * size)
    return size / 2 * (1 - adjustment) + (x + 0.5) / scale - 0.5


_POSITIONS = {**COORDINATES, "half_pixel_symmetric": _symmetric}


def resize_matrix(
    size: int,
    result: int,
    scale: float,
    mode: str,
    coordinates: str,
    rounding: str = "round_prefer_floor",
    alpha: float = -0.75,
    exclude: bool = False,
    antialias: bool = False,
) -> np.ndarray:
    """Return the weights, shape (``result``, ``size``), float32. Names are those of ONNX; ``ValueError`` for one
    without a formula.
    """
    if coordinates not in _POSITIONS or (mode == "nearest" and rounding not in ROUNDINGS):
        raise ValueError(f"Resize with {coordinates!r}, {rounding!r} has no formula")
    position = np.round(_POSITIONS[coordinates](np.arange(result, dtype=np.float64), size, result, scale), 6)
    matrix = np.zeros((result, size))
    rows = np.arange(result)
    if mode == "nearest":
        matrix[rows, np.clip(ROUNDINGS[rounding](position), 0, size - 1).astype(int)] = 1.0
        return matrix.astype(np.float32)
    width = max(1.0, 1.0 / scale) if antialias else 1.0
    reach = int(np.ceil((2 if mode == "cubic" else 1) * width))
    for offset in range(-reach, reach + 2):
        tap = np.floor(position) + offset
        distance = (position - tap) / width
        weight = keys_cubic(distance, alpha) if mode == "cubic" else np.maximum(0.0, 1.0 - np.abs(distance))
        if exclude:
            weight = np.where((tap >= 0) & (tap < size), weight, 0.0)
        np.add.at(matrix, (rows, np.clip(tap, 0, size - 1).astype(int)), weight)
    if exclude or antialias:
        matrix /= matrix.sum(axis=1, keepdims=True)
    return matrix.astype(np.float32)
