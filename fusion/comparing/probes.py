"""Inputs on which outputs are compared: random ones and some with structure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from fusion.model.named_arrays import Arrays, random_arrays
from fusion.model.tensor_info import TensorInfo

# Rectangles of the image-like input, as one finds them in documents and photographs.
_RECTANGLES = 12
_FIRST_PICTURE = 7
# Further pictures where errors of a lower precision are told: one alone says little of how often a class changes.
MORE_PICTURES = 7


def probes(tensors: Sequence[TensorInfo], seed: int = 0) -> dict[str, Arrays]:
    """Name -> one array per input, always the same ones. Inputs that are not floating point are random in all."""
    made = {"random": random_arrays(tensors, seed)}
    for name, pattern in PATTERNS.items():
        arrays = random_arrays(tensors, seed)
        for tensor in tensors:
            if arrays[tensor.name].dtype.kind not in "iub":
                arrays[tensor.name] = pattern(tensor.shape).astype(arrays[tensor.name].dtype)
        made[name] = arrays
    return made


def broken_inputs(tensors: Sequence[TensorInfo]) -> dict[str, Arrays]:
    """What a broken camera or an overflow gives: random inputs with NaN, and with infinity, in the middle of each that
    is of floating point. None where no input is.
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
    """The :func:`probes` and so many further pictures like the first: the inputs that errors are told over."""
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
    """Values from 0 to 1: a smooth background, rectangles with sharp edges, a little noise."""
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
    """From -1 to 1 along the last axis, from 0 to 1 along the one before it."""
    across = np.linspace(-1.0, 1.0, shape[-1]) if shape else np.zeros(())
    down = np.linspace(0.0, 1.0, shape[-2])[:, None] if len(shape) > 1 else 0.0
    return np.broadcast_to(across + down - 0.5 * (len(shape) > 1), shape).copy()


def zeros(shape: Sequence[int]) -> np.ndarray:
    """An empty image: what is left are the biases."""
    return np.zeros(shape)


def ones(shape: Sequence[int]) -> np.ndarray:
    """A white image: borders differ from the inside by their padding alone."""
    return np.ones(shape)


PATTERNS: dict[str, Callable[[Sequence[int]], np.ndarray]] = {
    "image-like": image_like,
    "ones": ones,
    "gradient": gradient,
    "zeros": zeros,
}
