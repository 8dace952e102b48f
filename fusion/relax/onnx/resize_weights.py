"""Weights of ONNX's Resize along one axis, for the forms that neither TVM's operator nor a table of pixels supports.

Coordinates use the scale in the file, which is not the ratio of the two sizes if the size of the result was rounded
down; with ``antialias`` the filter is as wide as the distance between samples. Outside the image the filter reads the
outermost pixels, or nothing (``exclude``).
"""

from __future__ import annotations

import numpy as np

from fusion.relax.resize_kernel import COORDINATES, ROUNDINGS, keys_cubic


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
