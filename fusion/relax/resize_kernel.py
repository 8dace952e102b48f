"""Resizing of blocked images, to the nearest pixel or between two, and padding with their own pixels: which pixels are
read is looked up in tables.

Shapes are known while compiling, so that every convention of coordinates is a table of positions and weights.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from tvm import tirx
from tvm.script.ir_builder import tirx as T

from schedules.contract.blocked_layout import blocked_shape, blocks
from schedules.contract.cpu_target import CpuTarget
from schedules.contract.template import Signature, TensorSpec
from schedules.loops import emit

# A parallel region costs about as much as moving this many values on one core.
_SERIAL_VALUES = 8192
_TASKS_PER_THREAD = 4

_COORDINATES: dict[str, Callable[[np.ndarray, int, int], np.ndarray]] = {
    "half_pixel": lambda x, size, result: (x + 0.5) * (size / result) - 0.5,
    "pytorch_half_pixel": lambda x, size, result: (x + 0.5) * (size / result) - 0.5 if result > 1 else 0.0 * x,
    "align_corners": lambda x, size, result: x * ((size - 1) / (result - 1)) if result > 1 else 0.0 * x,
    "asymmetric": lambda x, size, result: x * (size / result),
    "tf_half_pixel_for_nn": lambda x, size, result: (x + 0.5) * (size / result),
}
_ROUNDINGS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "round": lambda x: np.floor(x + 0.5),
    "round_prefer_ceil": lambda x: np.floor(x + 0.5),
    "round_prefer_floor": lambda x: np.ceil(x - 0.5),
    "floor": np.floor,
    "ceil": np.ceil,
}


@dataclass(frozen=True)
class Resize2d:
    """An NCHW image of ``shape`` at ``size`` (rows, columns).

    ``linear``: between two pixels along each axis, else the nearest one by ``rounding``; ``coordinates``: how positions
    of the result lie in the image. Names as in ONNX.
    """

    shape: tuple[int, int, int, int]
    size: tuple[int, int]
    linear: bool
    coordinates: str
    rounding: str

    @property
    def is_known(self) -> bool:
        """Whether the convention has a table."""
        return self.coordinates in _COORDINATES and (self.linear or self.rounding in _ROUNDINGS)

    def taps(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """Positions (taps, extent), int32, and weights of the second tap (extent,), float32, along rows or columns."""
        size, result = self.shape[2 + axis], self.size[axis]
        position = _COORDINATES[self.coordinates](np.arange(result, dtype=np.float64), size, result)
        # Noise of the last digits must not move a position that lies on a pixel, or half-way between two.
        position = np.round(position, 6)
        first = np.floor(position) if self.linear else _ROUNDINGS[self.rounding](position)
        weight = position - first if self.linear else np.zeros(result)
        taps = [first, first + 1] if self.linear else [first]
        return np.clip(taps, 0, size - 1).astype(np.int32), weight.astype(np.float32)


@dataclass(frozen=True)
class MirrorPad2d:
    """An NCHW image of ``shape`` with ``padding`` (top, left, bottom, right) of its own pixels.

    ``mode``: ``reflect`` about the outermost pixels, or ``replicate`` them.
    """

    shape: tuple[int, int, int, int]
    padding: tuple[int, int, int, int]
    mode: str

    @property
    def size(self) -> tuple[int, int]:
        """Rows and columns of the result."""
        top, left, bottom, right = self.padding
        return self.shape[2] + top + bottom, self.shape[3] + left + right

    @property
    def linear(self) -> bool:
        """Every pixel is that of the image."""
        return False

    def taps(self, axis: int) -> tuple[np.ndarray, np.ndarray]:
        """As of a :class:`Resize2d`."""
        widths = (self.padding[axis], self.padding[2 + axis])
        positions = np.pad(np.arange(self.shape[2 + axis]), widths, "edge" if self.mode == "replicate" else "reflect")
        return positions[None].astype(np.int32), np.zeros(len(positions), np.float32)


PixelTable: TypeAlias = Resize2d | MirrorPad2d


def resize_tables(resize: PixelTable) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The constants of :func:`resize_kernel`: positions of rows and of columns, then their weights (linear alone)."""
    (rows, down), (columns, across) = resize.taps(0), resize.taps(1)
    return [rows, columns], [down, across] if resize.linear else []


def resize_kernel(resize: PixelTable, cpu: CpuTarget, dtype: str = "float32") -> tirx.PrimFunc:
    """(data, positions of rows, of columns, [weights of rows, of columns], result), images blocked and of ``dtype``."""
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
                    if resize.linear:
                        upper, lower = (_between(line, given[3][column], lanes) for line in pixels)
                        value = _between((upper, lower), given[2][row], lanes)
                    emit.store(result, value, image, block, row, column, lanes=lanes)

    return emit.kernel("resize", Signature(data, tuple(tables), None, output), body)


def _between(pair: Sequence[Any], weight: Any, lanes: int) -> Any:
    first = T.bind(pair[0])
    return T.bind(first + (pair[1] - first) * emit.splat(weight, lanes))
