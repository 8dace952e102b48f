"""Inputs for comparing outputs: random ones and structured ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fusion.model.named_arrays import Arrays, random_arrays
from fusion.model.tensor_info import TensorInfo

# Number of rectangles in the image-like input, similar to documents and photographs.
_RECTANGLES = 12
_FIRST_PICTURE = 7
# Number of further pictures for errors of lower precisions: a single one says little about changed classes.
MORE_PICTURES = 7


def probes(tensors: Sequence[TensorInfo], seed: int = 0) -> dict[str, Arrays]:
    """Name -> one array per input, deterministic. Inputs of integers or booleans are random in all."""
    made = {"random": random_arrays(tensors, seed)}
    for name, pattern in PATTERNS.items():
        arrays = random_arrays(tensors, seed)
        for tensor in tensors:
            if arrays[tensor.name].dtype.kind not in "iub":
                arrays[tensor.name] = pattern(tensor.shape).astype(arrays[tensor.name].dtype)
        made[name] = arrays
    return made


def broken_inputs(tensors: Sequence[TensorInfo]) -> dict[str, Arrays]:
    """Random inputs with a NaN, and with an infinity, in the middle of each floating point input.

    They imitate a broken camera or an overflow. Empty without floating point inputs.
    """
    made: dict[str, Arrays] = {}
    for name, value in (("NaN", np.nan), ("infinity", np.inf)):
        arrays = random_arrays(tensors)
        floats = [
            tensor.name for tensor in tensors if arrays[tensor.name].dtype.kind == "f" and arrays[tensor.name].size
        ]
        for each in floats:
            arrays[each].reshape(-1)[arrays[each].size // 2] = value
        if floats:
            made[name] = arrays
    return made


def error_inputs(tensors: Sequence[TensorInfo], pictures: int = MORE_PICTURES) -> dict[str, Arrays]:
    """Inputs for measuring errors: the :func:`probes` and ``pictures`` further pictures like the first."""
    made = probes(tensors)
    for index in range(1, pictures + 1):
        arrays = random_arrays(tensors, index)
        for tensor in tensors:
            if arrays[tensor.name].dtype.kind not in "iub":
                picture = image_like(tensor.shape, _FIRST_PICTURE + index)
                arrays[tensor.name] = picture.astype(arrays[tensor.name].dtype)
        made[f"image-like {index + 1}"] = arrays
    return made


def image_like(shape: Sequence[int], seed: int = _FIRST_PICTURE) -> np.ndarray:
    """Picture with values from 0 to 1: smooth background, rectangles with sharp edges, little noise."""
    generator = np.random.default_rng(seed)
    image = 0.3 + 0.4 * gradient(shape)
    height, width = (shape[-2], shape[-1]) if len(shape) > 1 else (1, shape[-1] if shape else 1)
    image = image.reshape(-1, height, width)
    for _ in range(_RECTANGLES):
        top, left = generator.integers(height), generator.integers(width)
        bottom, right = top + 1 + generator.integers(1 + height // 3), left + 1 + generator.integers(1 + width // 3)
        image[:, top:bottom, left:right] = generator.random((len(image), 1, 1))
    noisy = image + 0.02 * generator.standard_normal(image.shape)
    return np.clip(noisy, 0.0, 1.0).reshape(shape)


def gradient(shape: Sequence[int]) -> np.ndarray:
    """Gradient from -1 to 1 along the last axis, plus 0 to 1 along the axis before it, centred."""
    across = np.linspace(-1.0, 1.0, shape[-1]) if shape else np.zeros(())
    down = np.linspace(0.0, 1.0, shape[-2])[:, None] if len(shape) > 1 else 0.0
    return np.broadcast_to(across + down - 0.5 * (len(shape) > 1), shape).copy()


def zeros(shape: Sequence[int]) -> np.ndarray:
    """Black image: only biases remain."""
    return np.zeros(shape)


def ones(shape: Sequence[int]) -> np.ndarray:
    """White image: borders differ from the interior only by padding."""
    return np.ones(shape)


PATTERNS: dict[str, Callable[[Sequence[int]], np.ndarray]] = {
    "image-like": image_like,
    "ones": ones,
    "gradient": gradient,
    "zeros": zeros,
}
